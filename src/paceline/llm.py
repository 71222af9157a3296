"""The library's front door: `LLM(target).generate(prompts)` and `.stream(prompt)`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from paceline.assembly import build_engine
from paceline.config import EngineConfig
from paceline.core import Completion, Delta, SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.shared import Call, SharedEngine
from paceline.errors import UsageError
from paceline.text.tokenizer import Tokenizer

Prompt = str | list[int]


class LLM:
    """A target with its drafter, ready to write.

    `target` and `drafter`: `demo` (the bundled pair), a folder in Hugging Face layout, or a hub id. `drafter` also takes
    `auto`, `none`, `ngram`, `mtp`, `mtp+ngram`, `model`. Further options are those of `EngineConfig`.
    Safe to use from several threads and with several open streams: all share the engine's steps.
    """

    def __init__(
        self, target: str = "demo", *, say: Callable[[str], None] | None = None, **options: Any
    ) -> None:
        config = EngineConfig.of({"target": str(target), **options})
        self._engine = build_engine(config, say or (lambda line: None))
        self._shared = SharedEngine(self._engine)

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

    def params(self, **said: Any) -> SamplingParams:
        """Sampling parameters with the model's own suggestions (generation_config.json) for what is not said.

        A model that suggests nothing is greedy. Raises UsageError for unknown names and for values that cannot be.
        """
        unknown = sorted(set(said) - set(SamplingParams.names()))
        if unknown:
            near = difflib.get_close_matches(unknown[0], SamplingParams.names(), 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(SamplingParams.names())}"
            raise UsageError(f"unknown sampling parameter {unknown[0]!r}: {hint}")
        return SamplingParams(**(dict(self.info.get("sampling", {})) | said))

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        on_done: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """Write all prompts to their ends, side by side; results in the order of the prompts.

        Without `params` the model's own suggestions hold, see `params`. With `params.n` > 1 the further texts are in
        `.siblings`. `on_done(i, completion)` is called as each prompt is finished. A text that failed has
        finish_reason "error"; the others are untouched.
        """
        listed = [prompts] if isinstance(prompts, str) or _is_ids(prompts) else list(prompts)
        each = self._each(params, len(listed))
        ids = [self._ids(prompt) for prompt in listed]  # type: ignore[arg-type]
        for prompt, one in zip(ids, each, strict=True):
            self._engine.check(prompt, one)
        call = Call()
        try:
            names = [self._shared.add(call, prompt, one) for prompt, one in zip(ids, each, strict=True)]
            order = {name: i for i, name in enumerate(names)}
            done: dict[str, dict[int, Completion]] = {name: {} for name in names}
            while call.open:
                delta = self._shared.receive(call)
                if delta.finish_reason is None:
                    continue
                live = call.lives[delta.request][delta.index]
                done[delta.request][delta.index] = live.completion(delta.finish_reason, delta.error)
                if on_done is not None and delta.request not in call.open:
                    on_done(order[delta.request], _family(done[delta.request]))
        finally:
            self._shared.close(call)
        return [_family(done[name]) for name in names]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Write one prompt, yielding each step's delta; the last has `finish_reason` and `stats`.

        Streams may be read in turn, and `generate` called while some are open: they share the engine's steps. Leaving the
        loop early, an exception in it, closing the stream or losing it cancels the request.
        """
        call = Call()
        try:
            self._shared.add(call, self._ids(prompt), params or self.params())
            while call.open:
                yield self._shared.receive(call)
        finally:
            self._shared.close(call)

    def _each(self, params: SamplingParams | Seq[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.params()] * count
        if len(params) != count:
            raise UsageError(
                f"{count} prompts but {len(params)} sampling params: give one for all, or one for each"
            )
        return list(params)

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return list(prompt)


def _is_ids(prompts: object) -> bool:
    return isinstance(prompts, list) and bool(prompts) and all(isinstance(t, int) for t in prompts)


def _family(texts: Mapping[int, Completion]) -> Completion:
    first, *rest = (texts[i] for i in sorted(texts))
    first.siblings = rest
    return first
