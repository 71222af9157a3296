"""A recorded graph that several ranks compute: native programs, and after each but the last a sum over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from paceline.core import Blend
from paceline.ops.base import Group
from paceline.ops.recording import Symbol

AddUp = Callable[[Group, Symbol, Symbol, int], None]


def program_of(make: Callable[[], Any], group: Group | None, add_up: AddUp) -> Any:
    """An empty native program, or what stands for one where there is a group of ranks."""
    return make() if group is None else Segments(make, partial(add_up, group))


def whole(program: Any) -> Any:
    """The native program of a graph without sums, which is one."""
    if isinstance(program, Segments):
        (program,) = program.programs
    return program


class Segments:
    """Stands for one native `Program`. `cut` begins the next one, which reads the sum."""

    def __init__(self, make: Callable[[], Any], add_up: Callable[[Symbol, Symbol, int], None]) -> None:
        """`add_up(mine, whole, rows)` makes `whole` of the `mine` of all ranks."""
        self._make, self._add_up = make, add_up
        self.programs = [make()]
        self._sums: list[tuple[Symbol, Symbol]] = []

    def cut(self, mine: Symbol, whole: Symbol) -> None:
        self.programs.append(self._make())
        self._sums.append((mine, whole))

    def begin_step(self) -> None:
        self.programs[-1].begin_step()

    def add(self, *op: Any) -> None:
        self.programs[-1].add(*op)

    def bind(self, buffer: int, data: int, stride: int) -> None:
        for program in self.programs:
            program.bind(buffer, data, stride)

    def bind_cache(self, layers: list[Any], packed: bool) -> None:
        for program in self.programs:
            program.bind_cache(layers, packed)

    def bind_bytes(self, layers: list[Any]) -> None:
        for program in self.programs:
            program.bind_bytes(layers)

    def branch(self, further: list[tuple[int, int]], copies: list[tuple[int, int, int]]) -> None:
        """Pages are copied once, before all."""
        for i, program in enumerate(self.programs):
            program.branch(further, [] if i else copies)

    def adapt(self, starts: list[int], texts: list[Blend]) -> None:
        for program in self.programs:
            program.adapt(starts, texts)

    def run(self, count: int, tokens: int, positions: int, slots: int) -> int:
        return self._run(count, lambda program: program.run(count, tokens, positions, slots))

    def run_numbers(self, tokens: list[int], positions: list[int], slots: list[int]) -> int:
        return self._run(len(tokens), lambda program: program.run_numbers(tokens, positions, slots))

    def _run(self, count: int, run: Callable[[Any], int]) -> int:
        for i, program in enumerate(self.programs):
            if i:
                self._add_up(*self._sums[i - 1], count)
            if status := run(program):
                return status
        return 0
