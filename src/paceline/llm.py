"""The library's front door: `LLM(target).generate(prompts)` and `.stream(prompt)`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from paceline.assembly import build_engine
from paceline.config import EngineConfig
from paceline.core import Completion, Delta, SamplingParams
from paceline.engine.engine import Engine
from paceline.errors import UsageError
from paceline.text.tokenizer import Tokenizer

Prompt = str | list[int]


class LLM:
    """A target with its drafter, ready to write.

    `target` and `drafter`: `demo` (the bundled pair), a folder in Hugging Face layout, or a hub id. `drafter` also takes
    `auto`, `none`, `ngram`, `mtp`, `mtp+ngram`, `model`. Further options are those of `EngineConfig`.
    Safe to use from several threads; calls run one after the other.
    """

    def __init__(
        self, target: str = "demo", *, say: Callable[[str], None] | None = None, **options: Any
    ) -> None:
        config = EngineConfig.of({"target": str(target), **options})
        self._engine = build_engine(config, say or (lambda line: None))
        self._lock = threading.Lock()
        self._count = 0

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self._engine.tokenizer
        assert tokenizer is not None, "an assembled engine has a tokenizer"
        return tokenizer

    @property
    def info(self) -> Mapping[str, Any]:
        """What was loaded and chosen, and why."""
        return self._engine.info

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        on_done: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """Write all prompts to their ends, side by side; results in the order of the prompts.

        With `params.n` > 1 the further texts are in `.siblings`. `on_done(i, completion)` is called as each prompt
        is finished. A text that failed has finish_reason "error"; the others are untouched.
        """
        listed = [prompts] if isinstance(prompts, str) or _is_ids(prompts) else list(prompts)
        each = self._each(params, len(listed))
        ids = [self._ids(prompt) for prompt in listed]  # type: ignore[arg-type]
        for prompt, one in zip(ids, each, strict=True):
            self._engine.check(prompt, one)
        with self._lock:
            names = [self._name() for _ in listed]
            order = {name: i for i, name in enumerate(names)}
            requests = dict(zip(names, zip(ids, each, strict=True), strict=True))
            done = self._engine.run(
                requests, (lambda name, c: on_done(order[name], _family(c))) if on_done is not None else None
            )
        return [_family(done[name]) for name in names]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Write one prompt, yielding each step's delta; the last has `finish_reason` and `stats`.

        Leaving the loop early cancels the request.
        """
        name = self._name()
        with self._lock:
            self._engine.add(name, self._ids(prompt), params or SamplingParams())
            try:
                while self._engine.has_work:
                    yield from self._engine.step()
            finally:
                self._engine.cancel(name)

    def _each(self, params: SamplingParams | Seq[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        if len(params) != count:
            raise UsageError(
                f"{count} prompts but {len(params)} sampling params: give one for all, or one for each"
            )
        return list(params)

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return list(prompt)

    def _name(self) -> str:
        self._count += 1
        return f"llm-{self._count}"


def _is_ids(prompts: object) -> bool:
    return isinstance(prompts, list) and bool(prompts) and all(isinstance(t, int) for t in prompts)


def _family(texts: list[Completion]) -> Completion:
    first, *rest = texts
    first.siblings = rest
    return first
