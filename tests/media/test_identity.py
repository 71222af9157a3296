"""The same text with pictures in the prompt: with any drafter, draft length, chunk, prefix hit, preemption and batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoints import build_assistant
from media_models import VOCAB, build_seeing, picture
from paceline import LLM, Completion

FAMILY = {"e2b": "e2b", "moe26b": "26b", "dense31b": "31b", "unified12b": "12b"}
OPTIONS: dict[str, Any] = {
    "activations": "float32", "threads": 1, "max_model_len": 512, "cache_memory": 2**26, "profile_dir": "none",
    "image_tokens": 70,
}  # fmt: skip


@pytest.fixture(scope="module", params=["e2b", "moe26b"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, drafter = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    build_seeing(request.param, target)
    build_assistant(FAMILY[request.param], drafter, vocab_size=VOCAB, sliding_window=40)
    return target, drafter


def talks() -> list[list[dict[str, Any]]]:
    """One picture, two, the same ids with another picture, a later turn, and text alone."""
    a, b = picture(100, 70), picture(70, 100, 1)

    def user(*parts: Any) -> dict[str, Any]:
        content = [
            {"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p}
            for p in parts
        ]
        return {"role": "user", "content": content}

    said = {"role": "assistant", "content": "a cat"}
    return [
        [user("look ", a, " what is it")], [user("look ", b.rotate(90, expand=True), " what is it")],
        [user(a, b, "both")],
        [user("look ", a, " what is it"), said, user("and now ", b)], [user("no picture at all")],
    ]  # fmt: skip


def texts(done: list[Completion]) -> list[list[int]]:
    assert all(c.finish_reason == "length" for c in done)
    return [c.token_ids for c in done]


def ask(llm: LLM, temperature: float, **said: Any) -> list[Completion]:
    return llm.chat(talks(), max_tokens=24, temperature=temperature, seed=7, ignore_eos=True, **said)


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> dict[float, list[list[int]]]:
    with LLM(folders[0], drafter="none", prefix_cache=False, **OPTIONS) as llm:
        return {t: [texts(llm.chat([talk], max_tokens=24, temperature=t, seed=7, ignore_eos=True))[0] for talk in talks()]
                for t in (0.0, 0.8)}  # fmt: skip


@pytest.mark.parametrize("chunk", [1, 7, 71, 512])
def test_drafters_chunks_and_prefix_hits(folders: Any, expected: Any, chunk: int) -> None:
    sizes = {"step_tokens": chunk, "prefill_chunk": chunk}
    with LLM(folders[0], drafter=str(folders[1]), draft_tokens=3, **sizes, **OPTIONS) as llm:
        assert llm.info["drafter"] == "mtp+ngram"
        for t in (0.0, 0.8):
            for again in (False, True):
                done = ask(llm, t)
                assert texts(done) == expected[t]
                assert not again or all(c.stats.cached_prompt_tokens >= 16 for c in done)
            assert sum(c.stats.drafted for c in done[:4]) > 0
        assert len(set(map(tuple, expected[0.0]))) == 5


@pytest.mark.parametrize("drafter", ["ngram", "lookahead", "mtp"])
@pytest.mark.parametrize("k", [1, 5])
def test_draft_lengths(folders: Any, expected: Any, drafter: str, k: int) -> None:
    name = str(folders[1]) if drafter == "mtp" else drafter
    with LLM(folders[0], drafter=name, draft_tokens=k, **OPTIONS) as llm:
        done = ask(llm, 0.8, **({"drafter": "mtp"} if drafter == "mtp" else {}))
        assert texts(done) == expected[0.8]
        assert drafter != "mtp" or all(c.stats.drafted > 0 for c in done)


def test_hits_that_end_at_each_page_of_a_picture(folders: Any, expected: Any) -> None:
    """What stands before the picture moves it over the pages, and a cut prompt leaves whole pages of it behind."""
    image = picture(100, 70)
    with (
        LLM(folders[0], drafter="none", **OPTIONS) as cached,
        LLM(folders[0], drafter="none", prefix_cache=False, **OPTIONS) as fresh,
    ):
        for offset in (0, 1, 5, 9, 15):
            for end in ("", " x", " quite another end"):
                prompt = "y" * offset + "<|image|>" + end
                one, two = (
                    llm.generate(prompt, images=[image], max_tokens=6, temperature=0, ignore_eos=True)[0]
                    for llm in (cached, fresh)
                )
                assert one.token_ids == two.token_ids
            assert one.stats.cached_prompt_tokens >= 64


@pytest.mark.parametrize("drafter", ["none", "mtp"])
def test_preemption(folders: Any, expected: Any, drafter: str) -> None:
    name = str(folders[1]) if drafter == "mtp" else "none"
    with LLM(folders[0], drafter=name, step_tokens=32, prefill_chunk=32, **OPTIONS) as llm:
        pool = llm.engine.state.cache.pools["full_attention"]
        pool.take(pool.free - 24)  # a text has up to 13 pages
        assert texts(ask(llm, 0.8)) == expected[0.8]
        assert llm.engine.state.preemptions > 0
