"""`LLM` for asyncio: the same calls to await, streams to read with `async for`.

Each call has a thread that reads the shared engine; whoever has the turn steps it for all (engine/shared.py), so that
calls side by side are computed side by side. A call that is cancelled ends with the step that is running.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import aclosing
from types import TracebackType
from typing import Any, TypeVar, Unpack

import numpy as np

from paceline.chat.options import ChatOptions
from paceline.config import EngineOptions, SamplingOptions
from paceline.core import Completion, Delta, Pooling, SamplingParams
from paceline.llm import LLM, Message, Prompt, vector_of
from paceline.soft_tokens import Kind
from paceline.text.tokenizer import Tokenizer
from paceline.turns import in_thread, until

T = TypeVar("T")
Found = Iterator[tuple[int, Completion] | None]


class AsyncLLM:
    """`LLM` for asyncio. Building one loads the model and blocks until it is there: do it before the loop is busy, or in
    `asyncio.to_thread`. All names mean what they mean in `LLM`.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] = "demo",
        *,
        say: Callable[[str], None] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self._llm = LLM(target, say=say, **options)

    def __repr__(self) -> str:
        return f"Async{self._llm!r}"

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """As `LLM.close`. Calls that are running raise UsageError."""
        self._llm.close()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._llm.tokenizer

    @property
    def info(self) -> Mapping[str, Any]:
        """What was loaded and chosen, and why."""
        return self._llm.info

    def params(self, **options: Unpack[SamplingOptions]) -> SamplingParams:
        """As `LLM.params`."""
        return self._llm.params(**options)

    async def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        on_done: Callable[[int, Completion], None] | None = None,
        images: Seq[Any] = (),
        audio: Seq[Any] = (),
        **options: Unpack[SamplingOptions],
    ) -> list[Completion]:
        """As `LLM.generate`. `on_done` is called in the loop's thread."""
        media: Mapping[Kind, Seq[Any]] = {"image": images, "audio": audio}
        requests = await in_thread(self._llm.requests, prompts, params, options, media)
        return await _collect(lambda: self._llm.completions(requests), on_done)

    async def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        on_done: Callable[[int, Completion], None] | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[Completion]:
        """As `LLM.chat`. `on_done` is called in the loop's thread."""
        requests, finish = await in_thread(self._llm.conversations, messages, params, options)

        def finished(i: int, completion: Completion) -> None:
            finish(i, completion)
            if on_done is not None:
                on_done(i, completion)

        return await _collect(lambda: self._llm.completions(requests), finished)

    async def embed(
        self,
        prompts: Prompt | Seq[Prompt],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
    ) -> list[np.ndarray]:
        """As `LLM.embed`."""
        requests = await in_thread(self._llm.embeddings, prompts, pooling, dimensions)
        done = await _collect(lambda: self._llm.completions(requests), None)
        return [vector_of(completion, dimensions) for completion in done]

    async def stream(
        self,
        prompt: Prompt | Seq[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[Delta, None]:
        """As `LLM.stream`: `async for delta in llm.stream(prompt)`. Leaving the loop early cancels the request, at once
        with `contextlib.aclosing`, else when the loop has collected the stream.
        """
        async with aclosing(_read(lambda: self._llm.stream(prompt, params, **options))) as deltas:
            async for delta in deltas:
                yield delta


async def _collect(
    make: Callable[[], Found], on_done: Callable[[int, Completion], None] | None
) -> list[Completion]:
    done: dict[int, Completion] = {}
    async with aclosing(_read(make)) as completions:
        async for completion in completions:
            if completion is not None:
                done[completion[0]] = completion[1]
                if on_done is not None:
                    on_done(*completion)
    return [done[i] for i in sorted(done)]


async def _read(make: Callable[[], Iterator[T]]) -> AsyncGenerator[T, None]:
    """What the iterator of `make` gives, read in a thread of its own; it is closed when nobody wants more."""
    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[tuple[T | None, BaseException | None, bool]] = asyncio.Queue()
    left = threading.Event()

    def give(item: T | None, error: BaseException | None = None, last: bool = False) -> None:
        try:
            loop.call_soon_threadsafe(inbox.put_nowait, (item, error, last))
        except RuntimeError:  # the loop is closed: nobody waits
            left.set()

    def work() -> None:
        try:
            iterator = make()
            try:
                for item in iterator:
                    if left.is_set():
                        break
                    give(item)
            finally:
                iterator.close()  # type: ignore[attr-defined]
        except BaseException as error:  # noqa: BLE001  it is raised where the call was made
            give(None, error, True)
        else:
            give(None, None, True)

    threading.Thread(target=until, args=(left, work), name="paceline-call", daemon=True).start()
    try:
        while True:
            item, error, last = await inbox.get()
            if error is not None:
                raise error
            if last:
                return
            yield item  # type: ignore[misc]
    finally:
        left.set()
