"""Embeddings: as transformers computes them, and the same bits whatever stands beside them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from decoders import build_decoder
from paceline import LLM, AsyncLLM, SamplingParams, UsageError
from paceline.checkpoints.defaults import pooling_of
from paceline.core import Pooling
from paceline.engine.engine import Engine
from testing import Setup, make_engine, prompts

NAMES = ["llama", "qwen3"]


def embedded(engine: Engine, texts: list[list[int]], pooling: Pooling) -> list[np.ndarray]:
    params = SamplingParams(pooling=pooling)
    done = engine.run({str(i): (text, params) for i, text in enumerate(texts)})
    out = [done[str(i)][0] for i in range(len(texts))]
    assert all(one.finish_reason == "stop" and not one.token_ids for one in out)
    return [one.embedding for one in out if one.embedding is not None]


@pytest.mark.parametrize("name", NAMES)
def test_they_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = build_decoder(name, tmp_path)
    texts = [[5, 9, 3, 8, 20, 21], [7], [4, 4, 30, 11] * 20]
    with LLM(tmp_path, drafter="none", max_model_len=128, step_tokens=32) as llm:
        for pooling in ("last", "mean"):
            made = llm.embed(texts, pooling=pooling)  # type: ignore[arg-type]
            for ids, vector in zip(texts, made, strict=True):
                with torch.no_grad():
                    hidden = (
                        model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].double()
                    )
                wanted = hidden[-1] if pooling == "last" else hidden.mean(0)
                wanted = (wanted / wanted.norm()).numpy()
                assert vector.dtype == np.float32
                assert np.abs(vector - wanted).max() < 2e-5
        short = llm.embed(texts[0], dimensions=7)[0]
        whole = llm.embed(texts[0])[0][:7]
        assert np.allclose(short, whole / np.linalg.norm(whole), atol=1e-6)
        text = llm.generate([texts[0]], max_tokens=3)[0]
        assert text.embedding is None
        assert len(text.token_ids) == 3
        for wrong in ({"dimensions": 0}, {"dimensions": 10**6}, {"dimensions": True}):
            with pytest.raises(UsageError, match="dimensions"):
                llm.embed(texts[0], **wrong)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="pooling"):
            llm.embed(texts[0], pooling="cls")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def demo() -> LLM:
    return LLM("demo", max_model_len=512, step_tokens=64)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_the_bits_depend_on_nothing_but_the_text(demo: LLM, pooling: Pooling) -> None:
    """Beside others, in parts, and behind a prefix that is known already."""
    texts = ["def parse(", "class Stack:\n    def push(self,", "x = 1\n" * 40, "def parse(" + "a, " * 30]
    alone = [LLM("demo", max_model_len=512).embed(text, pooling=pooling)[0] for text in texts]
    together = demo.embed(texts, pooling=pooling)
    again = demo.embed(texts[::-1], pooling=pooling)[::-1]
    for made in (together, again):
        assert all(np.array_equal(a, b) for a, b in zip(alone, made, strict=True))


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_prompts_in_parts_known_and_preempted(pooling: Pooling) -> None:
    texts = [*prompts(5), prompts(1, seed=9)[0] * 3]
    alone = [embedded(make_engine(Setup(step_tokens=512)), [text], pooling)[0] for text in texts]
    known = make_engine(Setup(prefix_cache=True))
    embedded(known, texts, "last")
    for engine in (make_engine(Setup()), make_engine(Setup(prefill_chunk=3)), known):
        made = embedded(engine, texts, pooling)
        assert all(np.abs(a - b).max() < 1e-6 for a, b in zip(alone, made, strict=True))
    engine = make_engine(Setup(step_tokens=7))
    engine.add("long", texts[-1], SamplingParams(pooling=pooling))
    assert not engine.step()
    assert not engine.step()
    engine.state.preempt(engine.state.scheduler.running[0])
    deltas = [delta for _ in range(40) for delta in engine.step()]
    assert np.abs(deltas[0].embedding - alone[-1]).max() < 1e-6
    assert engine.state.preemptions == 1


def test_they_stand_beside_texts_that_draft() -> None:
    text, other = prompts(2)
    params = SamplingParams(max_tokens=12, temperature=0.7, seed=3)
    plain = make_engine(Setup(drafter="random")).run({"a": (text, params)})["a"][0]
    done = make_engine(Setup(drafter="random")).run(
        {"a": (text, params), "b": (other, SamplingParams(pooling="mean", n=2))}
    )
    assert done["a"][0].token_ids == plain.token_ids
    first, second = (one.embedding for one in done["b"])
    assert first is not None
    assert second is not None
    assert np.array_equal(first, second)
    assert done["b"][0].stats.drafted == 0


def test_asyncio_and_the_tokenizers_own_end(tmp_path: Path) -> None:
    build_decoder("llama", tmp_path)

    async def both() -> list[np.ndarray]:
        async with AsyncLLM(tmp_path, drafter="none", max_model_len=64) as llm:
            return (await llm.embed([[5, 6], [7, 8]])) + (await llm.embed([5, 6], pooling="mean"))

    first, second, mean = asyncio.run(both())
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, mean)


def test_what_the_files_say(tmp_path: Path) -> None:
    assert pooling_of(tmp_path) == "last"
    (tmp_path / "1_Pooling").mkdir()
    file = tmp_path / "1_Pooling" / "config.json"
    for said, kind in (
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_cls_token": True}, "last"),
    ):
        file.write_text(json.dumps(said))
        assert pooling_of(tmp_path) == kind
