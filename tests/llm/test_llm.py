"""The library's front door on the bundled pair."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from paceline import LLM, PacelineError, PromptError, RequestFailed, SamplingParams, UsageError
from paceline.config import EngineConfig
from paceline.convert.quantized import measure_loss
from paceline.models.registry import load_target
from paceline.ops import native
from paceline.ops.runners import pick_runner

PROMPTS = ["def parse(", "class Stack:\n    def push(self,"]
DRAFTERS = ["none", "ngram", "mtp", "model", "mtp+ngram", "model+ngram"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", max_model_len=512)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_real_text_is_the_same_with_every_drafter_and_length(temperature: float) -> None:
    params = SamplingParams(max_tokens=48, temperature=temperature, top_p=0.95, seed=7)
    texts = []
    for drafter in DRAFTERS:
        for k in (4,) if drafter != "mtp" else (1, 4, 7):
            out = LLM("demo", drafter=drafter, draft_tokens=k, max_model_len=512).generate(PROMPTS, params)
            texts.append([c.token_ids for c in out])
            drafted = sum(c.stats.drafted for c in out)
            assert (drafted > 0) == (drafter != "none") or drafter == "ngram"
    assert all(text == texts[0] for text in texts)


def test_generate_returns_what_it_promises(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=1, logprobs=2, n=2)
    first, second = llm.generate(PROMPTS, params)
    assert first.text == llm.tokenizer.decode(first.token_ids)
    assert len(first.token_ids) == len(first.logprobs or []) == 12
    assert all(len(p.top) == 2 and p.raw <= 0 for p in first.logprobs or [])
    assert [c.index for c in first.siblings] == [1]
    assert first.siblings[0].token_ids != first.token_ids
    assert first.finish_reason == second.finish_reason == "length"
    assert first.stats.emitted == 12
    assert first.stats.seconds > 0


def test_prompts_may_be_ids_and_params_may_differ(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    a = llm.generate(PROMPTS[0], SamplingParams(max_tokens=8))[0]
    b = llm.generate(ids, SamplingParams(max_tokens=8))[0]
    c, d = llm.generate([ids, PROMPTS[1]], [SamplingParams(max_tokens=8), SamplingParams(max_tokens=3)])
    assert a.token_ids == b.token_ids == c.token_ids
    assert len(d.token_ids) == 3


def test_stream_gives_the_text_of_generate_and_may_be_left(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=5)
    whole = llm.generate(PROMPTS[0], params)[0]
    deltas = list(llm.stream(PROMPTS[0], params))
    assert "".join(d.text for d in deltas) == whole.text
    assert [t for d in deltas for t in d.token_ids] == whole.token_ids
    assert deltas[-1].finish_reason == "length"
    assert deltas[-1].stats is not None
    for _ in llm.stream(PROMPTS[0], params):
        break
    assert not llm.engine.has_work
    assert llm.engine.state.cache.open_sequences == 0


def test_threads_may_share_one_llm(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10, temperature=0.8, seed=5)
    expected = [llm.generate(p, params)[0].token_ids for p in PROMPTS]
    got: dict[int, list[int]] = {}
    threads = [
        threading.Thread(
            target=lambda i=i: got.update({i: llm.generate(PROMPTS[i % 2], params)[0].token_ids})
        )
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(4)] == expected * 2


def idle(llm: LLM) -> bool:
    return not llm.engine.has_work and llm.engine.state.cache.open_sequences == 0


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=24, temperature=0.8, seed=seed)


def test_streams_may_be_read_in_turn_and_generate_called_between(llm: LLM) -> None:
    expected = [llm.generate(p, sampled(i))[0].token_ids for i, p in enumerate(PROMPTS)]
    streams = [llm.stream(p, sampled(i)) for i, p in enumerate(PROMPTS)]
    got: list[list[int]] = [list(next(stream).token_ids) for stream in streams]
    assert llm.generate(PROMPTS[1], sampled(1))[0].token_ids == expected[1]
    for pair in itertools.zip_longest(*streams):
        for tokens, delta in zip(got, pair, strict=True):
            tokens += delta.token_ids if delta is not None else []
    assert got == expected
    assert idle(llm)


def test_a_callback_may_ask_for_more(llm: LLM) -> None:
    expected = llm.generate(PROMPTS, sampled(3))
    inner: list[list[int]] = []
    done = llm.generate(
        PROMPTS[0],
        sampled(3),
        on_done=lambda i, c: inner.append(llm.generate(PROMPTS[1], sampled(3))[0].token_ids),
    )
    assert (done[0].token_ids, inner) == (expected[0].token_ids, [expected[1].token_ids])


@pytest.mark.parametrize(
    "how", ["closed", "lost", "lost in a cycle", "exception", "Ctrl-C within", "half read"]
)
def test_an_abandoned_stream_is_cancelled_and_hinders_nobody(
    how: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.generate(PROMPTS[0], sampled(4))[0].token_ids
    stream: Any = llm.stream(PROMPTS[1], SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    if how == "closed":
        stream.close()
    elif how == "lost":
        del stream
    elif how == "lost in a cycle":
        cycle = [stream]
        cycle.append(cycle)
        del cycle, stream
        gc.collect()
    elif how == "exception":
        with pytest.raises(ValueError, match="mine"):
            stream.throw(ValueError("mine"))
    elif how == "Ctrl-C within":
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine, "step", mock.Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                list(stream)
    assert idle(llm) == (how != "half read")
    assert llm.generate(PROMPTS[0], sampled(4))[0].token_ids == expected
    if how == "half read":
        stream.close()
    assert idle(llm)


def test_a_stream_that_is_collected_in_the_middle_of_a_step_is_cancelled_after_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.generate(PROMPTS[0], sampled(4))[0].token_ids
    held: list[Any] = [llm.stream(PROMPTS[1], SamplingParams(max_tokens=400, ignore_eos=True))]
    next(held[0])
    step = llm.engine.step

    def collecting() -> Any:
        deltas = step()
        held.clear()
        return deltas

    monkeypatch.setattr(llm.engine, "step", collecting)
    assert llm.generate(PROMPTS[0], sampled(4))[0].token_ids == expected
    assert idle(llm)


def test_tokens_that_another_s_interrupted_step_has_lost_are_an_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, other = llm.stream(PROMPTS[0], sampled(1)), llm.stream(PROMPTS[1], sampled(2))
    next(ours)
    next(other)
    step = llm.engine.step

    def interrupted() -> Any:
        step()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(other)
    with pytest.raises(RequestFailed, match="ask again"):
        list(ours)
    assert idle(llm)


def test_a_request_that_cannot_run_is_refused_where_it_was_made(llm: LLM) -> None:
    with pytest.raises(PromptError, match="context holds 512"):
        next(llm.stream([5] * 600))
    good = llm.stream(PROMPTS[0], sampled(1))
    next(good)
    with pytest.raises(PromptError, match="empty"):
        next(llm.stream([]))
    assert list(good)[-1].finish_reason == "length"
    assert idle(llm)


def test_threads_may_stream_and_generate_at_once(llm: LLM) -> None:
    expected = [llm.generate(PROMPTS[i % 2], sampled(i))[0].token_ids for i in range(6)]
    got: dict[int, list[int]] = {}

    def work(i: int) -> None:
        for _ in range(3):
            if i % 3:
                got[i] = [t for delta in llm.stream(PROMPTS[i % 2], sampled(i)) for t in delta.token_ids]
            else:
                got[i] = llm.generate(PROMPTS[i % 2], sampled(i))[0].token_ids

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert [got[i] for i in range(6)] == expected
    assert idle(llm)


def test_a_reference_is_copied_from() -> None:
    llm = LLM("demo", drafter="ngram", max_model_len=1024, draft_tokens=4)  # whatever steps take
    params = SamplingParams(max_tokens=40)
    plain = llm.generate(PROMPTS[1], params)[0]
    got = llm.generate(PROMPTS[1], SamplingParams(max_tokens=40, reference=PROMPTS[1] + plain.text))[0]
    assert got.token_ids == plain.token_ids
    assert got.stats.accepted > 20
    assert got.stats.steps < plain.stats.steps


def test_info_says_what_was_chosen_and_why(llm: LLM) -> None:
    assert llm.info["drafter"] == "mtp+ngram"
    assert "beside the target" in llm.info["drafter_reason"]
    assert llm.info["max_model_len"] == 512


def test_plain_torch_gives_the_same_greedy_text(llm: LLM) -> None:
    """Near-ties could part two arithmetics; this prompt has none in its first tokens."""
    params = SamplingParams(max_tokens=16)
    other = LLM("demo", native=False, drafter="none", max_model_len=256)
    assert other.generate(PROMPTS[1], params)[0].token_ids == llm.generate(PROMPTS[1], params)[0].token_ids
    assert "plain torch" in other.info["arithmetic"]
    assert (llm.engine.parts.own_threads, other.engine.parts.own_threads) == (True, False)


def test_activations_can_stay_float32() -> None:
    """Rounded where that is faster, they are off from float32 by what bfloat16 is off, and not by more."""
    params = SamplingParams(max_tokens=1, logprobs=1)
    raw = {}
    for name in ("auto", "float32"):
        llm = LLM("demo", drafter="none", activations=name, max_model_len=256)
        assert ("bf16" in llm.info["arithmetic"]) == (
            name == "auto" and native.available() and native.bf16_dot()
        )
        packed = "bf16" in llm.info["arithmetic"]  # then K/V are rounded, too
        assert llm.info["cache_dtype"] == ("packed bfloat16" if packed else "float32")
        points = llm.generate(PROMPTS[1], params)[0].logprobs
        assert points is not None
        raw[name] = points[0].raw
    assert raw["auto"] == pytest.approx(raw["float32"], abs=0.02)
    if native.available():
        assert (raw["auto"] == raw["float32"]) != native.bf16_dot()
    with pytest.raises(UsageError, match="set dtype=float32"):
        pick_runner(EngineConfig(activations="float32"), torch.device("cuda"))


@pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
def test_what_rounded_activations_lose_is_next_to_nothing(llm: LLM) -> None:
    folder = Path(llm.info["target"])
    exact, rounded = (load_target(folder, runner=native.NativeRunner(exact=own)) for own in (True, False))
    text = (files("paceline.bench") / "data" / "prose.txt").read_text(encoding="utf-8")
    ids = llm.tokenizer.encode(text)[:400]
    loss = measure_loss(exact, rounded, ids, len(llm.tokenizer.decode(ids).encode()))
    assert loss.positions == 399
    assert loss.kl < 1e-4  # bits per token; int8 weights lose 2e-4
    assert (loss.kl > 0) == native.bf16_dot()
    assert loss.quantized_bits_per_byte == pytest.approx(loss.bits_per_byte, abs=1e-3)


@pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
def test_keys_and_values_can_be_int8(llm: LLM) -> None:
    """A quarter of float32, the same text with drafters and without, and a loss that is told."""
    options: dict[str, Any] = {"kv_cache": "int8", "max_model_len": 256, "profile_dir": "none"}
    params = [SamplingParams(max_tokens=24, temperature=t, seed=3, ignore_eos=True) for t in (0.0, 0.8)]
    texts = []
    for more in ({"drafter": "none"}, {"drafter": "mtp+ngram"}):
        with LLM("demo", **options, **more) as small:
            assert small.info["cache_dtype"] == "int8"
            texts.append([small.generate(PROMPTS[1], each)[0].token_ids for each in params])
    assert texts[0] == texts[1]
    exact = load_target(Path(llm.info["target"]), runner=native.NativeRunner())
    text = (files("paceline.bench") / "data" / "prose.txt").read_text(encoding="utf-8")
    ids = llm.tokenizer.encode(text)[:200]
    rounded = load_target(Path(llm.info["target"]), runner=native.NativeRunner())
    rounded.keep_bytes()
    assert rounded.kv_dtype == "int8"
    assert 0 < measure_loss(exact, rounded, ids, 1000).kl < 1e-3


def test_a_full_drafter_path_is_accepted(llm: LLM) -> None:
    folder = os.fspath(llm.info["drafter_path"])
    assert LLM("demo", drafter=folder, max_model_len=128).info["drafter"] == "mtp+ngram"


BAD_OPTIONS = [
    ({"drafters": "none"}, "did you mean drafter"),
    ({"dtype": "float8"}, "float32"),
    ({"activations": "int8"}, "auto or float32"),
    ({"kv_cache": "int4"}, "auto or int8"),
    ({"kv_cache": "int8", "native": False}, "leave --kv-cache"),
    ({"device": "tpu"}, "cpu, cuda"),
    ({"verify": "lossy"}, "match, reject or block"),
    ({"draft_tokens": 20}, "0..16"),
    ({"max_batch": 0}, "a whole number from 1"),
    ({"step_tokens": 65300}, "a smaller step_tokens, prefill_chunk or max_batch"),
    ({"prefill_chunk": 48000, "max_batch": 1040}, "may have 65680 rows, at most 65535"),
    ({"quantize": "int3"}, "int8 or int4"),
    ({"cache_memory": 1000}, "lower max_model_len"),
    ({"target": "nowhere"}, "give demo"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=[m for _, m in BAD_OPTIONS])
def test_bad_options_are_refused_with_the_next_step(options: dict[str, object], message: str) -> None:
    with pytest.raises(PacelineError, match=message):
        LLM(**({"target": "demo", "max_model_len": 128} | options))  # type: ignore[arg-type]


def test_bad_prompts_are_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(PromptError, match="context holds 512"):
        llm.generate([[5] * 600])
    with pytest.raises(PromptError, match="empty"):
        llm.generate([[]])
    with pytest.raises(UsageError, match="2 prompts but 1"):
        llm.generate(PROMPTS, [SamplingParams()])
    assert not llm.engine.has_work


def test_config_knows_its_defaults() -> None:
    assert EngineConfig().verify == "match"
    assert (
        EngineConfig().draft_tokens == "auto"
    )  # what is measured to pay, for the library and the server, too
    assert EngineConfig.of({"draft_tokens": "auto"}).draft_tokens == "auto"


def test_a_context_that_is_shorter_than_asked_for_is_said() -> None:
    lines: list[str] = []
    with LLM("demo", drafter="none", max_model_len=9999, profile_dir="none", say=lines.append) as llm:
        assert llm.info["max_model_len"] == 4096
    assert "the context is 4096 tokens, which is all the model has here: 9999 were asked for" in lines
