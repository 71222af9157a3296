"""Texts of DeepSeek-V3 and GLM-4-MoE with any drafter have the bits of plain decoding, with native kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decoders import build_decoder
from mtp_files import build_mtp
from paceline import SamplingParams
from paceline.assembly import build_engine
from paceline.check.distribution import prepare, try_rule
from paceline.check.subject import Subject
from paceline.config import EngineConfig
from paceline.core import Completion
from paceline.drafters.base import Drafter
from paceline.drafters.ngram import NgramDrafter
from paceline.kv.cache import KVCache
from paceline.models.registry import load_target
from paceline.models.target import GraphTarget
from paceline.ops import native
from testing import OracleDrafter, ScriptedDrafter, Setup, make_engine, run, totals

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
STEM = [3 + (7 * i) % 60 for i in range(34)]
TEXTS = [STEM + [5 + i] * (3 * i + 1) for i in range(4)]


@pytest.fixture(scope="module", params=["deepseek", "deepseek-whole", "glm4-moe", "lfm2-moe"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GraphTarget:
    folder = tmp_path_factory.mktemp(request.param)
    build_decoder(request.param, folder)
    return load_target(folder, runner=native.NativeRunner(2))


def written(
    target: GraphTarget, params: SamplingParams, drafter: Drafter | None = None, **changes: Any
) -> tuple[list[Completion], Any]:
    setup = replace(Setup(pages=64, prefill_chunk=9, step_tokens=24), **changes)
    pages = dict.fromkeys(target.layout.kinds, setup.pages)
    cache = KVCache(target.layout, pages, max_sequences=8, max_tokens=128, dtype=target.kv_dtype)
    engine = make_engine(setup, drafter, target=target, cache=cache)
    if setup.prefix_cache:
        run(engine, TEXTS[:1], replace(params, max_tokens=2))
    return run(engine, TEXTS, params), engine


def bits(done: list[Completion]) -> list[list[tuple[int, float]]]:
    return [[(p.token, p.raw) for p in one.logprobs or ()] for one in done]


@pytest.mark.parametrize(
    "scene", [{}, {"pages": 8}, {"prefix_cache": True}], ids=["roomy", "preempted", "prefix"]
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_planted_drafters_change_no_bit(
    target: GraphTarget, temperature: float, scene: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=4, ignore_eos=True, logprobs=0)
    plain, _ = written(target, params)
    assert [len(one.token_ids) for one in plain] == [40] * 4
    whole = [text + one.token_ids for text, one in zip(TEXTS, plain, strict=True)]
    planted: list[Drafter] = [
        NgramDrafter(),
        ScriptedDrafter(whole, lambda j: j % 3 == 2),
        OracleDrafter(whole),
    ]
    for drafter in planted:
        done, engine = written(target, params, drafter, **scene)
        assert bits(done) == bits(plain), drafter.name
        drafted, accepted = totals(done)
        assert drafted > accepted or drafter.name != "scripted"
        assert accepted > 20 or drafter.name == "ngram"
        assert bool(engine.state.preemptions) == ("pages" in scene)
        assert "prefix_cache" not in scene or all(one.stats.cached_prompt_tokens == 32 for one in done)


def test_reject_follows_the_exact_distribution(tmp_path: Path) -> None:
    build_decoder("deepseek", tmp_path / "target")
    folder = build_mtp(tmp_path / "target", tmp_path / "made")
    settings: dict[str, Any] = {
        "max_model_len": 64,
        "profile_dir": "none",
        "cache_memory": 2**22,
        "threads": 1,
    }
    subject = Subject(
        build_engine(EngineConfig(target=str(folder), drafter="mtp", **settings)), tuple(map(tuple, TEXTS))
    )
    params = SamplingParams(verify="reject", drafter="mtp")
    found = try_rule(subject, params, prepare(subject, "mtp"), 500)

    assert found.fit.p_value > 1e-4
