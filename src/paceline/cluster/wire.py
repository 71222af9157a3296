"""What crosses between the ingress and a replica. It is pickled: both run the same version of paceline and Python."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ray import cloudpickle

from paceline.chat.constraint import Grammars
from paceline.core import Constraint, Delta, SamplingParams
from paceline.errors import PacelineError
from paceline.text.grammar import Lead


class Lost(Exception):
    """The replica that had an order cannot go on with it."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where an ingress takes the streams of replicas (cluster/stream.py)."""

    host: str
    port: int
    key: bytes = field(repr=False)


@dataclass(slots=True)
class Order:
    """One request, or what is left of it after a replica was lost."""

    id: str
    prompt: list[int]
    params: bytes  # see `pack`
    salt: str
    back: Address | None = None  # where the answers go
    written: Mapping[int, list[int]] | None = None  # as in engine/worker.py's Job
    like: str | None = None  # only a replica of this kind may go on
    avoid: frozenset[str] = frozenset()  # replicas that need not be asked
    known: str | None = None  # the router's: which replica knows most of the prompt,
    chosen: str = ""  # and why it took the one it took: prefix, load, hot or full


@dataclass(frozen=True, slots=True)
class Hello:
    """The first answer to an order: who took it, and how that replica stands."""

    replica: str
    kind: str  # what its arithmetic depends on: replicas of one kind write the same texts
    gauges: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Said:
    """What the texts of an order said since the last answer."""

    deltas: list[Delta]
    error: PacelineError | None = None  # the order has failed
    gone: str = ""  # why the replica can do nothing more for it, though another may
    last: bool = False  # nothing follows


class Recipe:
    """A constraint that can be sent: how its grammar is compiled, instead of what came out."""

    def __init__(self, make: Callable[[], Constraint], method: str, *arguments: Any) -> None:
        self._make, self.call = make, (method, arguments)

    def __call__(self) -> Constraint:
        return self._make()


class Recipes:
    """Grammars whose constraints can be sent. What cannot be compiled is refused here, before it is sent."""

    def __init__(self, inner: Grammars) -> None:
        self._inner = inner

    def hold(self, schemas: dict[str, Any], arguments: bool = False) -> dict[str, Any]:
        return self._inner.hold(schemas, arguments)

    def compile(self, kind: str, source: str, lead: Lead = "bare") -> Recipe:
        return Recipe(self._inner.compile(kind, source, lead), "compile", kind, source, lead)

    def compile_call(self, tools: dict[str, dict[str, Any]], most: int, lead: Lead = "none") -> Recipe:
        return Recipe(self._inner.compile_call(tools, most, lead), "compile_call", tools, most, lead)

    def compile_either(
        self, kind: str, source: str, tools: dict[str, dict[str, Any]], most: int, lead: Lead = "none"
    ) -> Recipe:
        make = self._inner.compile_either(kind, source, tools, most, lead)
        return Recipe(make, "compile_either", kind, source, tools, most, lead)

    def compile_strict(self, tools: dict[str, dict[str, Any]], lead: Lead = "none") -> Recipe:
        return Recipe(self._inner.compile_strict(tools, lead), "compile_strict", tools, lead)

    def close(self) -> None:
        self._inner.close()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # ray has no types for it
    def persistent_id(self, value: Any) -> Any:
        return value.call if isinstance(value, Recipe) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, grammars: Grammars) -> None:
        super().__init__(file)
        self._grammars = grammars

    def persistent_load(self, call: Any) -> Any:
        method, arguments = call
        return getattr(self._grammars, method)(*arguments)


def pack(params: SamplingParams) -> bytes:
    """Sampling parameters as bytes; a grammar goes as its recipe."""
    out = io.BytesIO()
    _Pickler(out).dump(params)
    return out.getvalue()


def unpack(data: bytes, grammars: Grammars) -> SamplingParams:
    """What `pack` packed, its grammars compiled here: may take seconds. Raises UsageError."""
    params = _Unpickler(io.BytesIO(data), grammars).load()
    assert isinstance(params, SamplingParams)
    return params
