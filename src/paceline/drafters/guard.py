"""What a third party's drafter is given instead of the engine's own objects, so that nothing it does can change a text.

Texts are copies that grow with the original; they and their parameters refuse to be changed, and a change by force stays
in the copy. Tensors of the cache share its memory, since copies would cost more than a draft brings: they refuse every
operation that torch announces as a write. Who goes on to raw pointers, or into private attributes, is beyond Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NoReturn, cast

import numpy as np
import torch

from paceline.core import Draft, SamplingParams, Sequence
from paceline.drafters.base import DraftContext, Drafter, Kept, Seen
from paceline.kv.cache import KVCache
from paceline.soft_tokens import SoftTokens

_WRITES = {
    "__setitem__", "__delitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__",
    "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__imatmul__", "__set__",
}  # fmt: skip

_SHOWN = (
    "k", "v", "tables", "layout", "page_size", "packed", "quantized", "max_tokens", "max_sequences",
    "max_pages", "slot", "committed",
)  # fmt: skip


class ReadOnlyError(TypeError):
    """A drafter tried to change what it may only read."""


def ask(drafter: Drafter, context: DraftContext) -> Draft:
    """What a drafter proposes. A third party's, also one that derives from a drafter of ours, gets a guarded context."""
    return drafter.draft(context if is_ours(drafter) else guarded(context))


def on_commit(drafter: Drafter, news: list[Kept], parked: list[dict[str, str]]) -> None:
    """The hook of that name, as guarded as `ask`. A drafter that fails is `parked` [rows], with the reason."""
    try:
        if not is_ours(drafter):
            news = [Kept(shown(drafter, k.sequence), k.first, [read_only(s) for s in k.states]) for k in news]
        drafter.on_commit(news)
    except Exception as error:  # noqa: BLE001  whatever a third party's drafter raises costs speed, never text
        for reasons in parked:
            reasons[drafter.name] = failure(error)


def on_verify(drafter: Drafter, seen: list[Seen], parked: list[dict[str, str]]) -> None:
    """The hook of that name, as `on_commit`."""
    try:
        drafter.on_verify([replace(item, sequence=shown(drafter, item.sequence)) for item in seen])
    except Exception as error:  # noqa: BLE001  as above
        for item in parked:
            item[drafter.name] = failure(error)


def begin(drafter: Drafter, sequence: Sequence, parked: dict[str, str]) -> int:
    """How many of a text's first rows the drafter already has, so that the target may take them from its cache."""
    try:
        return int(drafter.begin(shown(drafter, sequence)))
    except Exception as error:  # noqa: BLE001  as above
        parked[drafter.name] = failure(error)
        return len(sequence.tokens)


def lacks(drafter: Drafter, sequence: Sequence, parked: dict[str, str]) -> str | None:
    """Why the drafter cannot draft for a text now."""
    try:
        return drafter.lacks(shown(drafter, sequence))
    except Exception as error:  # noqa: BLE001  as above
        parked[drafter.name] = failure(error)
        return parked[drafter.name]


def unread(drafter: Drafter, sequence: Sequence, parked: dict[str, str]) -> int:
    """Tokens of a text that the drafter has to compute before it can draft."""
    if type(drafter).unread is Drafter.unread:
        return 0
    try:
        return max(int(drafter.unread(shown(drafter, sequence))), 0)
    except Exception as error:  # noqa: BLE001  as above
        parked[drafter.name] = failure(error)
        return 0


def failure(error: Exception) -> str:
    """Why a drafter is not asked any more for a request; as NoDraftReason says it."""
    return f"drafter failed: {type(error).__name__}: {error}"[:200]


def shown(drafter: Drafter, sequence: Sequence) -> Sequence:
    """A text as the drafter may see it: itself, or a view of it for a third party's."""
    return sequence if is_ours(drafter) else cast(Sequence, _view(sequence))


def is_ours(drafter: Drafter) -> bool:
    return type(drafter).__module__.partition(".")[0] == __name__.partition(".")[0]


def guarded(context: DraftContext) -> DraftContext:
    """The same context out of copies and read-only views."""
    return DraftContext(
        cast(list[Sequence], [_view(sequence) for sequence in context.sequences]),
        list(context.limits),
        list(context.slots),
        None if context.states is None else read_only(context.states),
        list(context.has_hidden),
        cast(KVCache, ReadOnlyCache(context.cache)),
        context.picker,
    )


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ReadOnlyError("a drafter may not change its context: copy what it wants to change")


class ReadOnlyTokens(list[int]):
    """A copy of a text's tokens that refuses to be changed. A real list, for what reads lists natively."""

    append = extend = insert = pop = remove = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def follow(self, tokens: list[int]) -> None:
        """Take over what the text has gained."""
        if len(self) > len(tokens):
            list.clear(self)
        list.extend(self, tokens[len(self) :])


@dataclass(frozen=True, slots=True, eq=False)
class SequenceView:
    """A `Sequence` to look at."""

    id: int
    tokens: ReadOnlyTokens
    prompt_len: int
    params: SamplingParams
    seed: int
    committed: int
    reference: tuple[int, ...]
    salt: str
    media: tuple[SoftTokens, ...] = ()
    constraint: None = None  # its state is the engine's

    @property
    def pending(self) -> list[int]:
        return self.tokens[self.committed :]

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len


def _view(s: Sequence) -> SequenceView:
    if s.shown is None:
        params = replace(s.params, logit_bias=MappingProxyType(dict(s.params.logit_bias)))
        media = tuple(replace(item, vectors=read_only(item.vectors)) for item in s.media)
        s.shown = (ReadOnlyTokens(), params, media)
    tokens, params, media = s.shown
    tokens.follow(s.tokens)
    return SequenceView(s.id, tokens, s.prompt_len, params, s.seed, s.committed, s.reference, s.salt, media)


class ReadOnlyTensor(torch.Tensor):
    """A view of a tensor that refuses what writes to it. What is computed from it is an ordinary tensor."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Seq[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        writes = name in _WRITES or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace")
        if (writes and _any(cls, args[:1])) or _any(cls, [kwargs.get("out")]):
            _refuse()
        out = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(out, np.ndarray):
                out.flags.writeable = False
                return out
            homes = {_home(t) for t in args if isinstance(t, cls)}
            return _sorted_out(out, homes)


def _any(cls: type, values: Iterable[Any]) -> bool:
    return any(isinstance(v, cls) or (isinstance(v, list | tuple) and _any(cls, v)) for v in values)


def _home(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _sorted_out(out: Any, homes: set[int]) -> Any:
    """Results that share memory with what is guarded stay guarded."""
    if isinstance(out, torch.Tensor):
        return out.as_subclass(ReadOnlyTensor if _home(out) in homes else torch.Tensor)
    if type(out) in (list, tuple):
        return type(out)(_sorted_out(item, homes) for item in out)
    return out


def read_only(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(ReadOnlyTensor)


class ReadOnlyCache:
    """What of a `KVCache` may be read."""

    states = None  # of recurrent layers: nothing reads them but the op that writes them

    def __init__(self, cache: KVCache) -> None:
        def read(name: str) -> Any:
            value = getattr(cache, name)
            if name in ("k", "v"):
                return [read_only(t) for t in value]
            if name == "tables":
                return {kind: read_only(t) for kind, t in value.items()}
            return (lambda sequence_id: value(sequence_id)) if callable(value) else value  # noqa: PLW0108  no way to the cache

        self._read: Callable[[str], Any] = read

    def __getattr__(self, name: str) -> Any:
        if name in _SHOWN:
            return self._read(name)
        raise ReadOnlyError(
            f"a drafter may not use {name!r} of the target's cache: it may read {', '.join(_SHOWN)}"
        )

    def at(self, layer: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `KVCache.at`."""
        return KVCache.at(cast(KVCache, self), layer, index)
