"""The target's hidden states as they fall out of its own forwards, by conversation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.core import ForwardBatch
from paceline.kv.cache import KVCache
from paceline.models.decoder import DecoderTarget

TAPS = (2, 15, 27, 30)  # layers done; 30 is the last, before the final norm
Record = tuple[list[int], list[Tensor]]  # tokens and their states


class Recorder:
    """What each cache slot has seen since its last position 0. Needs an engine without a prefix cache."""

    def __init__(self) -> None:
        self.on = False
        self.slots: dict[int, Record] = {}
        self.found: dict[tuple[int, ...], list[Tensor]] = {}

    def take(self, rows: ForwardBatch, states: Tensor) -> None:
        """states: [N, 4 * 576] of the rows of one forward."""
        numbers = rows.numbers or tuple(x.tolist() for x in (rows.tokens, rows.positions, rows.slots))
        tokens, positions, slots = numbers
        for first, after in zip(rows.starts[:-1], rows.starts[1:], strict=True):
            slot = slots[first]
            if positions[first] == 0:
                self.flush(slot)
            seen, kept = self.slots.setdefault(slot, ([], []))
            assert len(seen) == positions[first], "a prefix came from elsewhere"
            seen += tokens[first:after]
            kept.append(states[first:after])

    def flush(self, slot: int) -> None:
        seen, kept = self.slots.pop(slot, ([], []))
        if seen:
            self.found[tuple(seen)] = kept

    def states(self, tokens: list[int]) -> Tensor:
        """[T, 4, 576] of a conversation that was written."""
        return torch.cat(self.found[tuple(tokens)]).unflatten(-1, (len(TAPS), -1))

    def end(self) -> None:
        for slot in list(self.slots):
            self.flush(slot)

    def clear(self) -> None:
        self.slots, self.found = {}, {}


def install() -> Recorder:
    """Make every decoder that is loaded from now on hand its states to the recorder that is returned."""
    recorder = Recorder()
    make, compute = DecoderTarget.__init__, DecoderTarget.states

    def init(self: DecoderTarget, *args: Any) -> None:
        make(self, *args)
        self.tap(TAPS)

    def states(self: DecoderTarget, rows: ForwardBatch, cache: KVCache) -> tuple[Tensor, ...]:
        out = compute(self, rows, cache)
        if recorder.on:
            recorder.take(rows, torch.cat([s.to(torch.bfloat16) for s in out[1:]], -1))
        return out

    DecoderTarget.__init__, DecoderTarget.states = init, states  # type: ignore[method-assign]
    return recorder
