"""The library as a newcomer types it: keywords, conversations, asyncio, closing, and clear errors."""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, AsyncLLM, PacelineError, SamplingParams, UsageError
from paceline.chat.options import ChatOptions
from paceline.config import EngineConfig, EngineOptions, SamplingOptions

PROMPTS = ["def parse(", "class Stack:\n    def push(self,"]
TALK = [{"role": "user", "content": "x = 1"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", max_model_len=256, draft_tokens=3) as made:
        yield made


def test_typed_keywords_are_the_fields() -> None:
    """So that an editor completes all of them, and nothing else."""
    options = {f.name for f in fields(EngineConfig)} - {"target"}
    assert set(EngineOptions.__annotations__) == options
    assert set(SamplingOptions.__annotations__) == set(SamplingParams.names())
    for call, kind in (
        (LLM.__init__, EngineOptions),
        (AsyncLLM.__init__, EngineOptions),
        (LLM.generate, SamplingOptions),
        (LLM.chat, ChatOptions),
        (LLM.stream, ChatOptions),
        (AsyncLLM.stream, ChatOptions),
    ):
        last = list(inspect.signature(call).parameters.values())[-1]
        assert last.kind is inspect.Parameter.VAR_KEYWORD
        assert eval(last.annotation, vars(typing) | {kind.__name__: kind}) == typing.Unpack[kind]


def test_single_values_may_be_said_as_keywords(llm: LLM) -> None:
    params = SamplingParams(max_tokens=9, temperature=0.8, seed=3)
    expected = llm.generate(PROMPTS, params)
    said = llm.generate(PROMPTS, max_tokens=9, temperature=0.8, seed=3)
    changed = llm.generate(PROMPTS, SamplingParams(max_tokens=30, temperature=0.8), max_tokens=9, seed=3)
    streamed = list(llm.stream(PROMPTS[0], max_tokens=9, temperature=0.8, seed=3))
    assert [c.token_ids for c in said] == [c.token_ids for c in changed] == [c.token_ids for c in expected]
    assert [t for d in streamed for t in d.token_ids] == expected[0].token_ids
    assert llm.generate(tuple(llm.tokenizer.encode(PROMPTS[0])), params)[0].token_ids == expected[0].token_ids  # type: ignore[arg-type]


def test_chat_puts_messages_into_the_template(llm: LLM) -> None:
    from paceline.text.chat import encode_chat

    done: list[tuple[int, str]] = []
    (one,) = llm.chat(TALK, max_tokens=8, on_done=lambda i, c: done.append((i, c.text)))
    assert one.prompt_token_ids == encode_chat(llm.tokenizer, TALK)
    assert done == [(0, one.text)]
    two = llm.chat([TALK, [*TALK, {"role": "assistant", "content": "y"}, *TALK]], max_tokens=8)
    assert two[0].token_ids == one.token_ids
    assert len(two[1].prompt_token_ids) > len(one.prompt_token_ids)
    assert "".join(d.text for d in llm.stream(TALK, max_tokens=8)) == one.text
    (whole,) = llm.chat(TALK, ignore_eos=True)  # as long as the context, when nothing is said of it
    assert len(whole.prompt_token_ids) + len(whole.token_ids) == 256


def test_progress_is_a_bar_on_standard_error(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, max_tokens=2, progress=True)
    out = capsys.readouterr()
    assert "2/2" in out.err
    assert out.out == ""
    llm.generate(PROMPTS, max_tokens=2)
    assert capsys.readouterr().err == ""


def test_repr_says_what_runs_and_close_ends_it() -> None:
    with LLM("demo", max_model_len=128, drafter="ngram") as llm:
        assert repr(llm).startswith("LLM('demo', drafter='ngram', ")
        assert "context 128" in repr(llm)
        llm.chat(TALK, max_tokens=2)
        template = llm.tokenizer.chat
        assert not template._helper._gone()
        stream = llm.stream(PROMPTS[0], max_tokens=100, ignore_eos=True)
        next(stream)
    assert template._helper._gone()
    assert repr(llm) == "LLM('demo', closed)"
    with LLM("demo", max_model_len=128, drafter="ngram", verify="typical") as lossy:
        assert "verify='typical' (lossy)" in repr(lossy)
    for call in (lambda: next(stream), lambda: llm.generate("x"), lambda: llm.info, lambda: llm.chat(TALK)):
        with pytest.raises(UsageError, match="closed: make a new one"):
            call()
    llm.close()


BAD_CALLS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda llm: llm.generate(None), "prompts=None is not possible: give a text"),
    (lambda llm: llm.generate({"prompt": "x"}), "is not possible: give a text"),
    (lambda llm: llm.generate(["x", None]), r"prompts\[1\]=None"),
    (lambda llm: llm.generate(TALK), r"use chat\(messages\)"),
    (lambda llm: llm.generate("x", {"max_tokens": 3}), r"params is a dict: give SamplingParams"),
    (lambda llm: llm.generate("x", 3), "params=3 is not possible"),
    (lambda llm: llm.generate("x", max_token=3), "did you mean max_tokens"),
    (lambda llm: llm.generate("x", sampling_params=None), "did you mean params"),
    (lambda llm: llm.generate("x", max_new_tokens=3), "did you mean max_tokens"),
    (lambda llm: llm.generate("x", max_tokens="3"), "max_tokens='3' is not possible"),
    (lambda llm: llm.chat("hello"), "messages='hello' is not possible: give"),
    (lambda llm: llm.chat([]), "messages="),
    (lambda llm: llm.chat([{"role": "user"}]), r"messages\[0\]"),
    (lambda llm: llm.chat([{"role": "user", "content": "x"}, "y"]), r"messages\[1\]='y' is no message"),
    (lambda llm: llm.chat([{"role": "user", "content": 5}]), r"messages\[0\]=.*is no message"),
    (lambda llm: llm.chat([{"role": "user", "content": [{"type": "image"}]}]), "content.0 has no image"),
    (
        lambda llm: llm.chat([{"role": "user", "content": [{"type": "image", "image": "x"}]}]),
        "reads text only",
    ),
    (lambda llm: llm.chat([{"role": "user", "content": ["x"]}]), "messages.0.content.0 is no part"),
    (lambda llm: llm.generate("x", images=["x"]), "reads text only"),
    (lambda llm: LLM("demo", drafter="demo\n"), r"unknown drafter 'demo\\n'"),
    (lambda llm: LLM("x" * 10**6), "xxx... is no target"),
    (lambda llm: LLM("demo", adapter="demo"), "is no adapter: give its folder, or a hub id"),
    (lambda llm: llm.stream(None), r"prompts\[0\]=None"),
    (lambda llm: LLM(None), "target=None is not possible: give demo"),  # type: ignore[arg-type]
    (lambda llm: LLM({"target": "demo"}), "target="),  # type: ignore[arg-type]
    (lambda llm: LLM("demo", drafter=None), "drafter=None is not possible: give 'none'"),  # type: ignore[arg-type]
    (lambda llm: LLM("demo", drafter=3), "drafter=3"),  # type: ignore[arg-type]
    (lambda llm: LLM("demo", prefix_cache="yes"), "give True or False"),  # type: ignore[arg-type]
    (lambda llm: LLM(model="demo"), "did you mean target"),  # type: ignore[call-arg]
    (lambda llm: LLM("demo", quantization="int8"), "did you mean quantize"),  # type: ignore[call-arg]
    (lambda llm: LLM("demo", max_num_seqs=4), "did you mean max_batch"),  # type: ignore[call-arg]
]


def test_parts_are_joined_for_a_template_that_does_not_go_through_them(llm: LLM) -> None:
    """REAL_FILES row 9, by the library: the list itself would be printed into the prompt."""
    parts = [{"type": "text", "text": "def "}, {"type": "text", "text": "f("}]
    kept = llm.tokenizer.template
    try:
        llm.tokenizer.template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        texts = [llm.chat([{"role": "user", "content": c}], max_tokens=4)[0].text for c in (parts, "def f(")]
    finally:
        llm.tokenizer.template = kept
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS, ids=[m for _, m in BAD_CALLS])
def test_wrong_kinds_are_named_with_what_to_give(call: Callable[[Any], Any], message: str, llm: LLM) -> None:
    with pytest.raises(PacelineError, match=message):
        call(llm)
    assert not llm.engine.has_work


def test_paths_may_be_paths(llm: LLM) -> None:
    config = EngineConfig.of(
        {"target": Path("a"), "drafter": Path("b"), "adapter": Path("c"), "profile_dir": Path("d")}
    )
    assert (config.target, config.drafter, config.adapter, config.profile_dir) == ("a", "b", "c", "d")


def test_asyncio_gives_what_llm_gives_side_by_side(llm: LLM) -> None:
    said: Any = {"max_tokens": 16, "temperature": 0.8, "seed": 5}
    expected = [c.token_ids for c in llm.generate(PROMPTS, **said)]
    (answer,) = llm.chat(TALK, **said)

    async def read(other: AsyncLLM, prompt: str) -> list[int]:
        return [t async for delta in other.stream(prompt, **said) for t in delta.token_ids]

    async def main() -> None:
        async with AsyncLLM("demo", max_model_len=256, draft_tokens=3) as other:
            assert repr(other).startswith("AsyncLLM('demo', drafter=")
            done: list[int] = []
            both, *read_out, chat = await asyncio.gather(
                other.generate(PROMPTS, on_done=lambda i, c: done.append(i), **said),
                *(read(other, prompt) for prompt in PROMPTS),
                other.chat(TALK, **said),
            )
            assert [c.token_ids for c in both] == read_out == expected
            assert chat[0].text == answer.text
            assert sorted(done) == [0, 1]
            with pytest.raises(UsageError, match="did you mean"):
                await other.generate("x", max_token=3)  # type: ignore[call-arg]
            with pytest.raises(UsageError, match="is not possible"):
                async for _ in other.stream(None):  # type: ignore[arg-type]
                    pass
        with pytest.raises(UsageError, match="closed"):
            await other.generate("x")

    asyncio.run(main())


def test_what_asyncio_leaves_is_cancelled() -> None:
    async def main() -> None:
        async with AsyncLLM("demo", max_model_len=2048) as llm:
            engine = llm._llm.engine
            long: Any = {"max_tokens": 2000, "ignore_eos": True}
            async with aclosing(llm.stream(PROMPTS[0], **long)) as deltas:
                async for _ in deltas:
                    break
            task = asyncio.create_task(llm.generate(PROMPTS, **long))
            while not engine.has_work:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for _ in range(500):
                if not engine.has_work:
                    break
                await asyncio.sleep(0.01)
            assert not engine.has_work
            assert engine.state.cache.open_sequences == 0

    asyncio.run(main())
