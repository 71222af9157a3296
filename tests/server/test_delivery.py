"""What is delivered is what was asked for and what is billed, as people reported it of other engines.

Reports that other tests make: a stop string that is a control token, and calls that never become one
(test_stops_and_continuations); a thinking budget (test_request_fields: told, it is not done); thoughts and calls in one
block (test_api); history without reasoning (tests/text/test_public_templates); assistants that are missing, foreign or
given as another kind (tests/real, tests/models/test_gguf_drafters); adapters merged without a drafter
(tests/real/test_adapter); a draft length that nobody chose (tests/llm/test_llm: config_knows_its_defaults).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoders import build_decoder
from paceline import LLM
from paceline.config import EngineConfig
from paceline.errors import PacelineError
from paceline.models.inspection import inspect
from paceline.server.loading import load
from server.fake_engine import FakeEngine, make_tokenizer
from server.grammars import grammars_of
from server.serving import Served, served

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hello"}]
PROMPTS = ["def parse(text", "class Stack:\n    def push(", "import os\nimport ", "for i in range("]
DRAFTERS = ["ngram", "mtp", "mtp+ngram"]
GREEDY: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}


def chunks(text: str) -> list[dict[str, Any]]:
    return [json.loads(part[6:]) for part in text.split("\n\n") if part.startswith("data: {")]


@pytest.fixture(scope="module")
def demo() -> Iterator[Served]:
    config = EngineConfig(target="demo", threads=1, max_model_len=128)
    with served(load=lambda service: load(config, service, lambda line: None)) as server:
        yield server
        assert server.service.loaded is not None
        server.service.loaded.grammars.close()


@pytest.mark.parametrize("draft_tokens", [0, 1, 4, 16])
@pytest.mark.parametrize("asked", [1, 2, 8])
def test_what_is_delivered_is_what_was_asked_and_what_is_billed(
    demo: Served, asked: int, draft_tokens: int
) -> None:
    """https://github.com/ikawrakow/ik_llama.cpp/pull/2358"""
    body = {"prompt": "for i in range(10):\n    for j in range(10):\n    ", "max_tokens": asked, "ignore_eos": True,
            "temperature": 0, "speculation": {"draft_tokens": draft_tokens, "trace": True}}  # fmt: skip
    whole = demo.post(TEXT, **body, logprobs=0).json()
    assert whole["usage"]["completion_tokens"] == asked == len(whole["choices"][0]["logprobs"]["tokens"])
    events = chunks(demo.post(TEXT, **body, stream=True, stream_options={"include_usage": True}).text)
    assert sum(len(e["paceline"]["tokens"]) for e in events if "paceline" in e) == asked
    assert events[-1]["usage"]["completion_tokens"] == asked
    assert whole["choices"][0]["finish_reason"] == "length"


SAID = "日本語の答え、絵文字 😀 と 👩‍💻 と 🇨🇭。 Zürich é\n" * 3


@pytest.mark.parametrize("draft_tokens", [0, 3, 16])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_characters_of_many_tokens_arrive_whole(path: str, draft_tokens: int) -> None:
    """https://github.com/penta2himajin/qwisp/pull/134, https://github.com/antonellof/ferrox/issues/124"""
    with served(FakeEngine(make_tokenizer(), SAID)) as s:
        body: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": "x"}
        body |= {"speculation": {"draft_tokens": draft_tokens}, "max_tokens": 500}
        choice = s.post(path, **body).json()["choices"][0]
        assert (choice["message"]["content"] if path == CHAT else choice["text"]) == SAID
        events = [e["choices"][0] for e in chunks(s.post(path, **body, stream=True).text) if e["choices"]]
        pieces = [(e["delta"].get("content") if path == CHAT else e["text"]) or "" for e in events]
        assert "".join(pieces) == SAID
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("draft_tokens", [0, 1, 3, 16])
def test_nothing_of_a_stop_string_leaks(draft_tokens: int) -> None:
    """Also under a grammar: https://github.com/SharpAI/SwiftLM/issues/126"""
    tokenizer = make_tokenizer()
    grammars = grammars_of(tokenizer)
    said = "Yes\nUse it\nUser: no"
    held = {"type": "regex", "regex": "Yes\nUse it\nUser: no"}
    for script, more in ((said, {}), (None, {"response_format": held})):
        with served(FakeEngine(tokenizer, script), grammars=grammars) as s:
            body = {
                "messages": USER,
                "stop": ["\nUser:"],
                "speculation": {"draft_tokens": draft_tokens},
                **more,
            }
            choice = s.post(CHAT, **body).json()["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("Yes\nUse it", "stop")
            events = chunks(s.post(CHAT, **body, stream=True).text)
            pieces = [e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]]
            assert "".join(pieces) == "Yes\nUse it"
            assert not any(piece.endswith(("\n", "\nU")) for piece in pieces[:-1])
    grammars.close()


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_property_with_a_space_in_its_name(path: str) -> None:
    """https://github.com/Pushkinist/rMLX/pull/399"""
    tokenizer = make_tokenizer()
    grammars = grammars_of(tokenizer)
    names = ["first name", 'a "b"', "naïve 😀", ""]
    schema = {"type": "object", "properties": {n: {"type": "boolean"} for n in names}, "required": names,
              "additionalProperties": False}  # fmt: skip
    with served(FakeEngine(tokenizer), grammars=grammars) as s:
        body: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": "x"}
        body |= {
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
            "seed": 5,
        }
        choice = s.post(path, **body, max_tokens=400).json()["choices"][0]
        answer = json.loads(choice["message"]["content"] if path == CHAT else choice["text"])
        assert list(answer) == names
    grammars.close()


def test_a_model_without_a_template_completes_and_says_so_to_chats(tmp_path: Path) -> None:
    """TGI 3247, https://github.com/vllm-project/vllm/issues/39279"""
    from layouts import edit, model

    folder = model(tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    edit(folder / "tokenizer_config.json", chat_template=...)
    config = EngineConfig(target=str(folder), drafter="ngram", threads=1, max_model_len=64)
    with served(load=lambda service: load(config, service, lambda line: None)) as s:
        assert s.post(TEXT, prompt="def f(", max_tokens=2).json()["usage"]["completion_tokens"] == 2
        answer = s.post(CHAT, messages=USER, max_tokens=2)
        assert answer.status_code == 400
        assert "has no chat template: give a prompt" in answer.json()["error"]["message"]
        assert s.service.loaded is not None
        s.service.loaded.grammars.close()


def test_exactly_one_bos_in_both(demo: Served) -> None:
    """https://github.com/unslothai/unsloth/pull/10312, https://github.com/vllm-project/vllm/pull/52304"""
    assert demo.service.loaded is not None
    bos = demo.service.loaded.tokenizer.bos_id
    for body in ({"prompt": "x"}, {"prompt": "<bos>x"}, {"messages": USER}):
        ids = demo.post("/tokenize", **body).json()["tokens"]
        assert ids[0] == bos
        assert ids.count(bos) == 1


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM("demo", drafter="none", max_model_len=64, native=False) as llm:
        yield llm


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_logprobs_are_those_of_plain_decoding_up_to_the_end_of_the_context(plain: LLM, drafter: str) -> None:
    """https://github.com/ggml-org/llama.cpp/pull/27196, https://github.com/vllm-project/vllm/pull/38711"""
    full = GREEDY | {"max_tokens": 1000, "logprobs": 3}
    (want,) = plain.generate(PROMPTS[0], **full)
    with LLM("demo", drafter=drafter, draft_tokens=5, max_model_len=64, native=False) as llm:
        (got,) = llm.generate(PROMPTS[0], **full)
    assert got.stats.drafted
    assert len(got.prompt_token_ids) + len(got.token_ids) == 64
    assert got.token_ids == want.token_ids
    for mine, theirs in zip(got.logprobs or (), want.logprobs or (), strict=True):
        assert mine.token == theirs.token
        assert abs(mine.raw - theirs.raw) < 1e-4
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


def counts(drafter: str, prompts: list[str], **options: Any) -> list[tuple[list[int], int, int]]:
    with LLM("demo", drafter=drafter, draft_tokens=4, **options) as llm:
        done = llm.generate(prompts, **GREEDY)
    return [(list(one.token_ids), one.stats.drafted, one.stats.accepted) for one in done]


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_what_is_accepted_depends_on_no_slot_no_neighbour_and_no_context_size(drafter: str) -> None:
    """https://github.com/ggml-org/llama.cpp/issues/23636, https://github.com/ggml-org/llama.cpp/issues/28286,
    https://github.com/spiritbuun/buun-llama-cpp/pull/110"""
    together = counts(drafter, PROMPTS, max_model_len=256)
    assert sum(accepted for _, _, accepted in together) > 10
    assert counts(drafter, PROMPTS[::-1], max_model_len=1024) == together[::-1]
    assert [counts(drafter, [prompt], max_model_len=64 + 7)[0] for prompt in PROMPTS[:2]] == together[:2]


def test_a_head_in_a_checkpoint_that_nothing_would_load_is_named(tmp_path: Path) -> None:
    """https://github.com/am17an/llama.cpp/pull/8, https://github.com/sgl-project/sglang/issues/35797"""
    build_decoder("qwen3", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"medusa_head.0.weight": torch.zeros(2, 2)}, file, metadata={"format": "pt"})
    (line,) = inspect(tmp_path).unsupported
    assert "1 that it does not describe (medusa_head.0.weight)" in line


@pytest.mark.parametrize("drafter", ["mtp+model+ngram", "mtp+model", "ngram+ngram", "mtp+mtp"])
def test_combinations_that_there_are_none_of_are_refused_in_one_line(drafter: str) -> None:
    """https://github.com/ggml-org/llama.cpp/issues/27839"""
    with pytest.raises(PacelineError, match="unknown drafter") as caught:
        LLM("demo", drafter=drafter)
    assert "\n" not in str(caught.value)
