"""What front ends, proxies and other servers' clients send and expect beside OpenAI's API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from gguf_files import write_gguf
from paceline.checkpoints.card import describe_files
from paceline.server.sse import EventStream, event
from server.fake_engine import MAX_LEN, FakeEngine, make_tokenizer
from server.serving import Served, served

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TALK = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def s() -> Iterator[Served]:
    with served(FakeEngine(make_tokenizer())) as server:
        yield server


def chunks_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def merged(chunks: list[dict[str, Any]]) -> dict[str, list[Any]]:
    out: dict[str, list[Any]] = {}
    for chunk in chunks:
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items() if chunk["choices"] else ():
            out.setdefault(name, []).extend(values)
    return out


@pytest.mark.parametrize("prompt", ["a😀b日本é", "<|turn>a😀", [2, 109, 110]])
@pytest.mark.parametrize("script", ["x😀y日本é z", "für naïve 🎉🎉"])
def test_offsets_are_where_the_tokens_text_begins(prompt: Any, script: str) -> None:
    """The parts of a character begin where it does; streamed offsets are the whole answer's."""
    with served(FakeEngine(make_tokenizer(), script)) as s:
        for echo in (True, False):
            body = {"prompt": prompt, "echo": echo, "logprobs": 0, "max_tokens": 40, "temperature": 0}
            choice = s.post(TEXT, **body).json()["choices"][0]
            found = choice["logprobs"]
            assert merged(chunks_of(s.post(TEXT, stream=True, **body).text)) == found
            text, begins = choice["text"], found["text_offset"]
            assert begins == sorted(begins)
            for token, begin in zip(found["tokens"], begins, strict=True):
                if token.startswith("bytes:"):
                    data = bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
                    assert data in text[begin].encode() or text[begin] == "\ufffd"
                elif token not in ("<bos>", "<eos>", "<|turn>"):
                    assert text[begin:].startswith(token)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_end_with_the_text(stream: bool) -> None:
    """Tokens of a stop string are not shown, and neither are their entries; what ends the text by itself is."""
    for script, stop, text, count in (
        ("abcdefgh", ["ef"], "abcd", 4), ("abcdefgh", ["xx"], "abcdefgh", 9), ("ab<|turn>cd", ["<|turn>"], "ab", 3),
        ("abé", ["é"], "ab", 2),
    ):  # fmt: skip
        with served(FakeEngine(make_tokenizer(), script)) as s:
            answer = s.post(TEXT, prompt="x", stop=stop, logprobs=1, max_tokens=30, stream=stream)
            chunks = chunks_of(answer.text) if stream else [answer.json()]
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
            assert len(merged(chunks)["tokens"]) == count, (script, merged(chunks)["tokens"])


def test_marks_as_text_and_pieces(s: Served) -> None:
    def ask(**body: Any) -> Any:
        return s.client.post("/tokenize", json=body).json()["tokens"]

    text, mark = "<|turn>hé", s.engine.tokenizer.token_id("<|turn>")
    assert ask(content=text)[0] == mark
    as_text = ask(content=text, parse_special=False)
    assert mark not in as_text
    assert s.engine.tokenizer.decode(as_text) == text
    pieces = ask(content=text, with_pieces=True)
    assert [one["piece"] for one in pieces] == ["<|turn>", "h", [0xC3], [0xA9]]
    assert [one["id"] for one in pieces] == ask(content=text)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_names_of_other_servers_mean_what_they_mean_there(s: Served, path: str) -> None:
    body: dict[str, Any] = {"messages": TALK} if path == CHAT else {"prompt": "hello"}
    used = s.post(path, repeat_penalty=1.5, max_new_tokens=3, stop="", **body).json()
    assert "warnings" not in used
    assert used["usage"]["completion_tokens"] <= 3
    assert s.engine.last_params is not None
    assert (s.engine.last_params.repetition_penalty, s.engine.last_params.stop) == (1.5, ())
    prompt = used["usage"]["prompt_tokens"]
    s.post(path, max_length=prompt + 2, stop=["", "zz"], **body).json()
    assert (s.engine.last_params.max_tokens, s.engine.last_params.stop) == (2, ("zz",))
    short = s.post(path, max_length=prompt, **body)
    assert (short.status_code, short.json()["error"]["param"]) == (400, "max_length")


def test_a_flag_for_a_number_is_told_which_number(s: Served) -> None:
    error = s.post(TEXT, prompt="x", logprobs=True).json()["error"]
    assert (error["param"], "how many likely tokens to show" in error["message"]) == ("logprobs", True)


@pytest.mark.parametrize(
    "path", ["/", "/health", "/v1/models", "/v1/models/fake", "/version", "/metrics", "/api/tags"]
)
def test_head_is_get_without_a_body(s: Served, path: str) -> None:
    got, head = s.client.get(path), s.client.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    assert s.client.head(CHAT).status_code == 405


def test_a_stream_moves_before_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies end a connection on which nothing comes; an early error still has a status of its own."""
    monkeypatch.setattr(EventStream, "patience", 0.05)
    monkeypatch.setattr(EventStream, "pause", 0.02)

    async def run(wait: float, fails: bool) -> tuple[list[dict[str, Any]], Exception | None]:
        sent: list[dict[str, Any]] = []

        async def chunks() -> AsyncIterator[bytes]:
            await asyncio.sleep(wait)
            if fails:
                raise ValueError("late")
            yield event({"n": 1})

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            await asyncio.sleep(3600)

        try:
            await EventStream(chunks())({"type": "http"}, receive, send)
        except ValueError as error:
            return sent, error
        return sent, None

    quick, error = asyncio.run(run(0.0, False))
    assert [m.get("body", b"") for m in quick] == [b"", event({"n": 1}), b""]
    early, error = asyncio.run(run(0.0, True))
    assert (early, str(error)) == ([], "late")
    slow, error = asyncio.run(run(0.3, False))
    bodies = [m.get("body", b"") for m in slow]
    assert error is None
    assert bodies[0] == b""
    assert bodies[1:3] == [b": waiting\n\n"] * 2
    assert bodies[-2:] == [event({"n": 1}), b""]
    failed, error = asyncio.run(run(0.3, True))
    assert error is None
    assert b'"error"' in failed[-2]["body"]


def test_ollamas_words_of_models(s: Served) -> None:
    (one,) = s.client.get("/api/tags").json()["models"]
    assert {"name", "model", "modified_at", "size", "digest", "details"} <= set(one)
    assert len(one["digest"]) == 64
    assert set(one["details"]) >= {"format", "family", "families", "parameter_size", "quantization_level"}
    (running,) = s.client.get("/api/ps").json()["models"]
    assert (running["name"], running["context_length"]) == ("fake", MAX_LEN)
    assert "expires_at" in running
    for named in ({"model": "fake"}, {"name": "fake:latest"}, {}):
        about = s.client.post("/api/show", json=named).json()
        assert about["capabilities"][0] == "completion"
        family = about["details"]["family"]
        assert about["model_info"]["general.architecture"] == family
        assert about["model_info"][f"{family}.context_length"] == MAX_LEN
    gone = s.client.post("/api/show", json={"model": "llama3"})
    assert (gone.status_code, "not found" in gone.json()["error"]) == (404, True)


@pytest.mark.parametrize(
    ("keep", "reason"),
    [(0, "unload"), ("0", "unload"), ("0s", "unload"), ("5m", "load"), (-1, "load"), (None, "load")],
)
def test_a_request_without_text_loads_or_unloads(s: Served, keep: Any, reason: str) -> None:
    for path in ("/api/chat", "/api/generate"):
        assert s.post(path, keep_alive=keep).json()["done_reason"] == reason


def test_ollama_leaves_out_the_oldest_turns_of_a_long_chat(s: Served) -> None:
    long = [{"role": "system", "content": "Be brief."}]
    for i in range(12):
        long += [{"role": "user", "content": f"q{i} " + "x" * 60}, {"role": "assistant", "content": f"a{i}"}]
    long.append({"role": "user", "content": "last"})
    assert s.post("/api/chat", messages=long, truncate=False, stream=False).status_code == 400
    told = s.post("/api/chat", messages=long, stream=False, options={"num_predict": 2}).json()
    (warning,) = [one for one in told["warnings"] if one.startswith("messages: the oldest")]
    assert "were left out, to fit the context" in warning
    shown = s.engine.tokenizer.decode(s.engine.last_prompt, skip_special=False)
    assert "Be brief." in shown
    assert "last" in shown
    assert "q0 " not in shown
    assert "q11 " in shown
    alone = [{"role": "user", "content": "y" * 600}]
    assert s.post("/api/chat", messages=alone, stream=False).status_code == 400


def test_a_gguf_file_says_its_architecture_size_and_types(tmp_path: Path) -> None:
    q4 = gguf.GGMLQuantizationType.Q4_0
    tensors = {"token_embd.weight": np.ones((96, 64)), "output_norm.weight": np.ones(64)}
    file = write_gguf(
        tmp_path / "a.gguf",
        "llama",
        {},
        tensors,
        lambda name, _: q4 if name.startswith("token") else gguf.GGMLQuantizationType.F32,
    )
    about = describe_files(file, "float32")
    assert about == {
        "format": "gguf",
        "family": "llama",
        "bytes": file.stat().st_size,
        "dtype": "Q4_0",
        "parameters": "6.2K",
    }
    with served() as s:
        assert s.service.loaded is not None
        s.service.loaded = replace(s.service.loaded, about=about)
        details = s.client.get("/api/tags").json()["models"][0]["details"]
        assert (details["family"], details["parameter_size"], details["quantization_level"]) == (
            "llama",
            "6.2K",
            "Q4_0",
        )
