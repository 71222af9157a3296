"""The same picture through every door gives the same answer: library, command line, OpenAI's two APIs and Ollama's."""

from __future__ import annotations

import asyncio
import base64
import builtins
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from media_models import ID, build_seeing, file_of, picture, tone, wav
from paceline import LLM, AsyncLLM, UsageError
from paceline.audit.audit import Audit, Plan
from paceline.audit.client import Endpoint
from paceline.checkpoints.loading import Tensors
from paceline.cli import main
from paceline.cli.attached import files_in
from paceline.cli.conversation import Conversation
from paceline.cli.serve import command as serve
from paceline.cli.writing import stats_lines
from paceline.config import EngineConfig
from paceline.core import Stats
from paceline.errors import LoadError
from paceline.media.build import describe_media, reader_of
from paceline.media.decoder import Decoder
from paceline.models.registry import load_target
from paceline.models.towers.gemma4_audio import GemmaAudio
from paceline.models.towers.gemma4_vision import GemmaVision
from paceline.server.loading import load
from paceline.server.media import MediaThreads
from paceline.soft_tokens import MediaUse
from paceline.text.helper import Helper
from paceline.text.tokenizer import Tokenizer
from server.serving import Served, served

OPTIONS: dict[str, Any] = {"activations": "float32", "threads": 1, "max_model_len": 512, "cache_memory": 2**26,
                           "profile_dir": "none", "drafter": "none"}  # fmt: skip
SAID = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
IMAGE = file_of(picture(100, 70))
URL = "data:image/png;base64," + base64.b64encode(IMAGE).decode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    build_seeing("e2b", folder)
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": [ID["<image|>"]]}))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    config = EngineConfig(target=str(folder), **OPTIONS)
    with served(load=lambda service: load(config, service, lambda line: None)) as server:
        yield server


def asked(source: Any = IMAGE, **more: Any) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": source, **more}, {"type": "text", "text": "what"}]
    return [{"role": "user", "content": parts}]


@pytest.fixture(scope="module")
def answer(llm: LLM) -> Any:
    return llm.chat(asked(), **SAID)[0]


def test_library(llm: LLM, answer: Any, tmp_path: Path) -> None:
    import numpy as np

    path = tmp_path / "a picture.png"
    path.write_bytes(IMAGE)
    for source in (path, str(path), URL, picture(100, 70), np.asarray(picture(100, 70))):
        assert llm.chat(asked(source), **SAID)[0].token_ids == answer.token_ids
    text = "".join(llm.tokenizer.token_text(token) for token in answer.prompt_token_ids)
    marks = "<|image>" + "<|image|>" * 280 + "<image|>"
    assert marks in text
    said = llm.generate(text.replace(marks, "<|image|>"), images=[IMAGE], **SAID)[0]
    assert said.token_ids == answer.token_ids
    few = llm.chat(asked(max_soft_tokens=70), **SAID)[0]
    assert len(few.prompt_token_ids) < 110 < len(answer.prompt_token_ids)


def test_asyncio(folder: Path, answer: Any) -> None:
    async def run() -> Any:
        llm = AsyncLLM(folder, **OPTIONS)
        one, two = await asyncio.gather(llm.chat(asked(), **SAID), llm.chat(asked(), **SAID))
        llm.close()
        return one[0].token_ids, two[0].token_ids

    assert asyncio.run(run()) == (answer.token_ids, answer.token_ids)


def test_command_line(
    folder: Path,
    answer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(IMAGE)
    words = ["run", str(folder), "what", "--image", str(path), "-n", "8", "-t", "0", "--ignore-eos", "--json",
             "--max-model-len", "512", "--drafter", "none", "--threads", "1", "--activations", "float32"]  # fmt: skip

    def call(*more: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["paceline", *words, *more])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0), *capfd.readouterr()

    code, out, err = call()
    assert code == 0, err
    assert json.loads(out)["prompt_tokens"] == len(answer.prompt_token_ids)
    assert json.loads(out)["text"] == answer.text
    code, _, err = call("--no-media")
    assert code != 0
    assert "switched off" in err
    for wrong, why in (
        ("no.png", "no.png: there is no file"),
        ("https://x.org/a.png", "a.png is a web address"),
    ):
        code, _, err = call("--image", wrong)
        assert code == 2
        assert why in err


def told(conversation: Conversation, line: str, kind: str = "note") -> str:
    return ("" if kind == "said" else "\n").join(
        piece.text for piece in conversation.take(line) if piece.kind == kind
    )


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("{path}", "a.png"), ("'{path}'", "a b.png"), ('"{path}"', "a b.png"), ("{escaped}", "a b.png"),
     ("{url}", "a b.png"), ("./{relative}", "a.PNG")],
)  # fmt: skip
def test_a_path_in_a_message_is_a_picture(
    llm: LLM, answer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str, name: str
) -> None:
    path = tmp_path / name
    path.write_bytes(IMAGE)
    monkeypatch.chdir(tmp_path)
    words = spelling.format(
        path=path, escaped=str(path).replace(" ", "\\ "), url=path.as_uri(), relative=name
    )
    assert files_in(f"what {words}")[0] == "what"
    conversation = Conversation(llm, {"max_tokens": 8, "temperature": 0, "ignore_eos": True}, chat=True)
    assert f"attached {name}" in told(conversation, words)
    assert not conversation.turns.messages
    assert told(conversation, "what", "said") == answer.text
    assert not conversation.attached


def test_conversation_with_pictures(llm: LLM, answer: Any, tmp_path: Path) -> None:
    path, saved = tmp_path / "a.png", tmp_path / "talk.json"
    path.write_bytes(IMAGE)
    said = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    conversation = Conversation(llm, said, chat=True)
    assert "280 tokens" in told(conversation, f"/image {path}")
    assert told(conversation, "/drop") == "1 files are taken back"
    assert "there is no file b.png: it stays text" in told(conversation, f"/new {path}") + told(
        conversation, "b.png"
    )
    assert "check the path" in told(conversation, "/image b.png", "error")
    assert "/image needs the name" in told(conversation, "/image", "error")
    assert files_in("see https://x.org/a.png") == ("see https://x.org/a.png", [], [])
    conversation = Conversation(llm, said, chat=True)
    assert told(conversation, f"{path} what", "said") == answer.text
    one = told(conversation, "and now?", "said")
    assert "messages are in" in told(conversation, f"/save {saved}")
    again = Conversation(llm, said, chat=True)
    assert "messages are read" in told(again, f"/load {saved}")
    again.turns.messages = again.turns.messages[:2]
    assert told(again, "and now?", "said") == one
    stored = json.loads(saved.read_text())
    stored["messages"][0]["content"][0]["image"] = str(path)
    saved.write_text(json.dumps(stored))
    assert "no saved conversation" in told(again, f"/load {saved}", "error")


def test_files_of_prompts(folder: Path, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture, source, out = tmp_path / "a.png", tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    picture.write_bytes(IMAGE)
    lines = [{"prompt": "a <|image|> b", "images": [str(picture)]}, {"prompt": "a <|image|>", "images": []},
             {"prompt": "a", "images": "x"},
             {"prompt": "<|audio|><|image|>", "images": [str(picture)], "audio": ["x"]}]  # fmt: skip
    source.write_text("\n".join(map(json.dumps, lines)))
    words = ["generate", str(folder), str(source), "-o", str(out), "-n", "8", "-t", "0", "--ignore-eos",
             "--max-model-len", "512", "--drafter", "none", "--threads", "1", "--activations", "float32"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["paceline", *words])
    with pytest.raises(SystemExit):
        main()
    done = {record["id"]: record for record in map(json.loads, out.read_text().splitlines())}
    assert done[1]["text"] == llm.generate("a <|image|> b", images=[IMAGE], **SAID)[0].text
    assert "list of paths" in done[3]["error"]
    assert "audio[0]" in done[4]["error"]


def test_info(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["paceline", "info", str(folder), "--no-measure"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    said = capsys.readouterr().out
    assert "pictures     read, as 280 tokens at most" in said
    assert "sound        read, 25 tokens a second" in said
    assert "a picture " not in said
    found, _ = describe_media(folder, rate=lambda inputs, outputs: 1e8 * (inputs, outputs).index(40))
    assert found["a picture"].startswith("about 1.2 s at 70, 4.4 s at 140, 17 s at 280, ")


def test_openai_chat(server: Served, answer: Any) -> None:
    for part in (
        {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}},
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL},
        {"type": "image", "image": URL},
    ):
        content = [part, {"type": "text", "text": "what"}]
        got = server.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": content}], **SAID
        ).json()
        assert got["choices"][0]["message"]["content"] == answer.text, got
        usage = got["usage"]
        assert usage["prompt_tokens"] == len(answer.prompt_token_ids)
        assert usage["prompt_tokens_details"]["image_tokens"] == 280
    assert usage["prompt_tokens_details"]["cached_tokens"] > 250


def test_responses_and_ollama(server: Served, answer: Any) -> None:
    content = [
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"type": "input_text", "text": "what"},
    ]
    said = {"temperature": 0, "max_output_tokens": 8, "ignore_eos": True}
    got = server.post("/v1/responses", input=[{"role": "user", "content": content}], **said).json()
    assert got["output"][-1]["content"][0]["text"] == answer.text
    raw = base64.b64encode(IMAGE).decode()
    options = {"temperature": 0, "num_predict": 8}
    said = {"stream": False, "options": options, "ignore_eos": True}
    chat = [{"role": "user", "content": "what", "images": [raw]}]
    for path, body in (
        ("/api/chat", {"messages": chat}),
        ("/api/generate", {"prompt": "what", "images": [raw]}),
    ):
        got = server.post(path, **body, **said).json()
        assert got["prompt_eval_count"] == len(answer.prompt_token_ids), got


def test_completions_and_cards(server: Served, llm: LLM) -> None:
    expected = llm.generate("a <|image|> b", images=[IMAGE], **SAID)[0]
    body = {"prompt": "a <|image|> b", "images": [URL], **SAID}
    got = server.post("/v1/completions", **body).json()
    assert got["choices"][0]["text"] == expected.text
    assert got["usage"]["prompt_tokens_details"]["image_tokens"] == 280
    for wrong in ({"images": ["/etc/passwd"]}, {"images": [URL, URL]}, {"prompt": ["a", "b"]}):
        assert server.post("/v1/completions", **(body | wrong)).status_code == 400
    assert server.client.get("/v1/models").json()["data"][0]["modalities"] == ["text", "image", "audio"]
    assert {"vision", "audio"} <= set(server.post("/api/show", model="fake").json()["capabilities"])
    counted = server.post(
        "/tokenize", messages=[{"role": "user", "content": [{"type": "image", "image": URL}]}]
    ).json()
    assert counted["tokens"].count(ID["<|image|>"]) == 280


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}, "nothing is fetched"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "nothing is fetched"),
        ({"type": "image", "image": "/etc/passwd"}, "base64"),
        ({"type": "input_image", "file_id": "file-1"}, "file_id"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,!!"}}, "base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, "empty"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,PGh0bWw+"}}, "a web page"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "huge"}}, "detail"),
        ({"type": "image_url", "image_url": {"url": URL}, "max_soft_tokens": 99}, "budget"),
        ({"type": "image_url"}, "no image"),
        (
            {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
            "messages.0.content.1",
        ),
        ({"type": "video_url", "video_url": {"url": URL}}, "video_url"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_is_refused_names_its_part(server: Served, part: dict[str, Any], message: str) -> None:
    content = [{"type": "text", "text": "x"}, part]
    got = server.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], **SAID)
    assert got.status_code == 400
    error = got.json()["error"]
    assert message in error["message"], error
    assert "content.1" in error["message"] + str(error["param"])
    assert "0x" not in error["message"]
    assert server.client.get("/health").status_code == 200


def test_a_typed_placeholder_is_text(llm: LLM, server: Served) -> None:
    typed = [{"role": "user", "content": "is <|image|> a word, or <image|>"}]
    ids = llm.chat(typed, **SAID)[0].prompt_token_ids
    assert ID["<|image|>"] not in ids
    assert ID["<image|>"] not in ids
    assert "is <|image|> a word, or <image|>" in llm.tokenizer.decode(ids)
    got = server.post("/v1/chat/completions", messages=typed, **SAID).json()
    assert got["usage"]["prompt_tokens"] == len(ids)
    beside = [{"role": "user", "content": [*asked()[0]["content"], {"type": "text", "text": "<|image|>"}]}]
    assert llm.chat(beside, **SAID)[0].prompt_token_ids.count(ID["<|image|>"]) == 280


def test_counts_must_agree(llm: LLM) -> None:
    with pytest.raises(UsageError, match="give one for each"):
        llm.generate("<|image|><|image|>", images=[IMAGE])
    with pytest.raises(UsageError, match="one prompt"):
        llm.generate(["<|image|>", "x"], images=[IMAGE])


def test_suppressed_tokens_are_never_written(llm: LLM) -> None:
    silent = [ID["<image|>"], ID["<|image|>"], ID["<|audio|>"], ID["<|video|>"]]
    for drafter in ("none", "ngram"):
        pushed = dict.fromkeys(silent, 100.0) | {30: 99.0}
        done = llm.generate(
            "a", max_tokens=4, logit_bias=pushed, temperature=0, ignore_eos=True, drafter=drafter
        )
        assert done[0].token_ids == [30] * 4


def test_audit_with_a_picture(server: Served) -> None:
    sides = [Endpoint(server.url, body={"speculation": wanted, "ignore_eos": True, "image_tokens": 70})
             for wanted in ({"drafter": "ngram", "draft_tokens": 4}, {"drafter": "none"})]  # fmt: skip
    try:
        report = Audit(*sides, Plan(prompts=1, tokens=16, samples=0, images=(URL,))).run()
    finally:
        for side in sides:
            side.close()
    assert report.verdict == "lossless", report
    assert report.compared == 3


def test_a_second_question_about_a_picture_costs_what_text_costs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By counters: nothing decoded, no tower, and as many rows prefilled as of cached text of the same length."""
    ran: list[str] = []
    for owner, name in ((Decoder, "_ask"), (GemmaVision, "slices"), (GemmaAudio, "slices")):
        first = getattr(owner, name)

        def counted(*given: Any, first: Any = first, what: str = f"{owner.__name__}.{name}") -> Any:
            ran.append(what)
            return first(*given)

        monkeypatch.setattr(owner, name, counted)
    clip = {"type": "audio", "audio": wav(tone(0.5))}
    with LLM(folder, **OPTIONS) as llm:
        for media, ways in (({"type": "image", "image": IMAGE}, 2), (clip, 2)):
            begun = llm.chat(
                [{"role": "user", "content": [media, {"type": "text", "text": "what"}]}], **SAID
            )[0]
            assert len(ran) == ways, ran
            ran.clear()
            length = begun.prompt_token_ids.count(ID[f"<|{media['type']}|>"]) + 2
            asked = []
            for part in (media, {"type": "text", "text": "y" * length}):
                for question in ("what", "why?"):
                    parts = [part, {"type": "text", "text": question}]
                    asked += llm.chat([{"role": "user", "content": parts}], **SAID)
            assert not ran
            seen, read = (one.stats.cached_prompt_tokens for one in (asked[1], asked[3]))
            assert len(asked[1].prompt_token_ids) == len(asked[3].prompt_token_ids)
            assert seen == read >= length // 16 * 16
            later = llm.chat(
                [{"role": "user", "content": [{"type": "text", "text": "other words first"}, media]}], **SAID
            )
            assert not ran, "in another place the tower's results are kept, too"
            assert later[0].stats.cached_prompt_tokens < 64


def test_what_a_picture_costs_is_told(
    folder: Path, server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    content = [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "cost"}]
    messages, told = [{"role": "user", "content": content}], []
    for extra in ({"image_tokens": 140}, {"mm_processor_kwargs": {"max_soft_tokens": 140}}):
        got = server.post("/v1/chat/completions", messages=messages, **SAID, **extra).json()
        told.append(got["media"])
        assert got["usage"]["prompt_tokens_details"]["image_tokens"] == told[-1]["soft_tokens"] == 126
    assert [one["known"] for one in told] == [0, 1]
    assert told[0]["tower_seconds"] > 0 == told[1]["tower_seconds"]
    shown = server.client.get("/metrics").text
    assert 'paceline_media_total{kind="image"}' in shown
    assert 'paceline_media_seconds_total{stage="tower"}' in shown
    plain = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], **SAID).json()
    assert "media" not in plain
    lines = stats_lines(Stats(media=MediaUse(1, 0, 280, 1, 0.002, 0.0)))
    assert "1 picture, 280 soft tokens: decoded in 2 ms, tower 0 ms, 1 known from before" in lines


def test_a_prompt_without_room_is_refused_before_the_tower(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GemmaVision, "slices", lambda self, pixels: pytest.fail("the tower runs"))
    part = {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}
    content = [part, part, {"type": "text", "text": "what"}]
    got = server.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], **SAID)
    assert got.status_code == 400
    error = got.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "beside its pictures of 1120 + 1120" in error["message"], error
    assert "a budget of 140 would fit" in error["message"]


def test_texts_do_not_wait_for_towers_and_their_queue_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, gate = EngineConfig(target=str(folder), **OPTIONS), threading.Event()
    first = GemmaVision.slices
    monkeypatch.setattr(GemmaVision, "slices", lambda self, pixels: gate.wait(60) and first(self, pixels))

    def asks(server: Served, i: int) -> int:
        url = "data:image/png;base64," + base64.b64encode(file_of(picture(50 + i, 50))).decode()
        parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}}]
        return server.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": parts}], **SAID
        ).status_code

    with (
        served(load=lambda service: load(config, service, lambda line: None)) as server,
        ThreadPoolExecutor(12) as pool,
    ):
        server.service.media = MediaThreads(12)
        waiting = [pool.submit(asks, server, i) for i in range(12)]
        while server.service.media._busy < 12:
            time.sleep(0.01)
        plain = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], **SAID)
        assert plain.status_code == 200
        part = {"type": "image_url", "image_url": {"url": URL}}
        more = server.post("/v1/chat/completions", messages=[{"role": "user", "content": [part]}], **SAID)
        assert more.status_code == 503
        assert more.headers["retry-after"] == "5"
        assert more.json()["error"]["code"] == "media_queue_full"
        gate.set()
        assert [one.result(timeout=60) for one in waiting] == [200] * 12


CLIENT = Path(__file__).parents[1] / "clients" / "pictures.py"


@pytest.mark.parametrize("sees", ["sees", "blind"])
def test_clients(server: Served, sees: str) -> None:
    """openai for Python, and the requests of Open WebUI and Ollama; the others by hand, as docs/clients.md says."""
    with nullcontext(server) if sees == "sees" else served() as other:
        done = subprocess.run(
            [sys.executable, str(CLIENT), f"{other.url}/v1", "none", "fake", sees, "openai", "requests"],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("passed") == 2


def test_serve_has_the_options_of_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr("paceline.server.start.start", lambda file, flags, engine, *rest: seen.append(engine))
    words = ["--no-media", "--mmproj", "x.gguf", "--image-tokens", "140", "--preload-media"]
    serve.main(["demo", *words], standalone_mode=False)
    wanted = {"media": False, "mmproj": "x.gguf", "image_tokens": 140, "preload_media": True}
    assert seen[0].items() >= wanted.items()
    with pytest.raises(UsageError, match="image_tokens=99 is unknown: use 70, 140"):
        EngineConfig(image_tokens=99)


def test_towers_at_start(folder: Path) -> None:
    target, tokenizer = load_target(folder), Tokenizer.load(folder)
    for preload in (False, True):
        reader = reader_of(EngineConfig(target=str(folder), preload_media=preload), folder, target, tokenizer)
        assert reader is not None
        assert (reader._seeing is not None, reader._listening is not None) == (preload, preload)


def test_text_alone_pays_for_no_picture(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what is imported, read and started: no Pillow, no tensor of a tower, no process that decodes."""
    found: list[str] = []

    def spied(owner: Any, name: str, what: Any) -> None:
        first = getattr(owner, name)

        def spy(*given: Any, **named: Any) -> Any:
            found.extend(filter(None, [what(*given)]))
            return first(*given, **named)

        monkeypatch.setattr(owner, name, spy)

    spied(builtins, "__import__", lambda name, *_: name if name.split(".")[0] in ("PIL", "soundfile") else "")
    spied(Tensors, "take", lambda self, name: name if "tower" in name or "embed_vision" in name else "")
    spied(Helper, "_start", lambda self: "decoding" if "media" in self._module else "")
    sizes = []
    for media in (False, True):
        with LLM(folder, media=media, **OPTIONS) as llm:
            llm.chat([{"role": "user", "content": "what"}], **SAID)
            sizes.append(llm.info["cache_bytes"])
            assert not found
            if media:
                llm.chat(asked(max_soft_tokens=70), **SAID)
            else:
                with pytest.raises(UsageError, match="switched off"):
                    llm.chat(asked(), **SAID)
    assert sizes[0] == sizes[1]
    assert {"decoding", "vision_tower.patch_embedder.input_proj.weight"} <= set(found), (
        "the spies see nothing"
    )


def test_a_tower_with_a_missing_tensor(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    tensors = load_file(folder / "model.safetensors")
    lost = next(name for name in tensors if name.endswith("layers.1.self_attn.q_proj.input_max"))
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != lost}, broken / "model.safetensors"
    )
    target, tokenizer = load_target(broken), Tokenizer.load(broken)
    with pytest.raises(LoadError, match=r"1 missing \(.*q_proj.input_max\).*--no-media"):
        reader_of(EngineConfig(target=str(broken)), broken, target, tokenizer)
    assert reader_of(EngineConfig(target=str(broken), media=False), broken, target, tokenizer) is not None
