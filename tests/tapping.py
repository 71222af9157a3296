"""Drafters that read hidden states, in an engine: what they draft, against an independent reading of their source.

`Reference.draft(text, states, count)` reads a whole text in plain torch: no cache, no graph, nothing of paceline but the
target's own hidden states, which the network asks for.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from checkpoints import VOCAB
from paceline.control.base import DraftPlan
from paceline.control.fixed import FixedPolicy
from paceline.core import SamplingParams
from paceline.drafters.base import Kept
from paceline.drafters.registry import over
from paceline.drafters.states import MemoryDrafter
from paceline.engine import step as stepping
from paceline.engine.engine import Engine, EngineParts
from paceline.engine.forced import ForcedAcceptance
from paceline.kv.cache import KVCache
from paceline.models.base import Cached
from paceline.models.drafters.base import FINAL
from paceline.models.registry import load_network, load_target
from paceline.models.target import GraphTarget
from paceline.ops.base import Runner

DEPTH = 5


class Reference(Protocol):
    def draft(
        self, text: list[int], states: torch.Tensor, count: int
    ) -> tuple[list[int], list[torch.Tensor]]:
        """(tokens, logits [C] of each) after `text`, from states [len(text) - 1, width] of its rows."""
        ...


def cache_of(model: Cached, pages: int = 64, sequences: int = 8) -> KVCache:
    return KVCache(
        model.layout,
        dict.fromkeys(model.layout.kinds, pages),
        max_sequences=sequences,
        max_tokens=256,
        dtype=model.kv_dtype,
    )


class Pair:
    """A target and its drafter, what they drafted in an engine, and what the reference drafts for the same texts."""

    def __init__(
        self, target: Path, drafter: Path, reference: Reference, runner: Runner | None = None, **sizes: int
    ) -> None:
        self.target: GraphTarget = load_target(target, runner=runner)
        self.reference = reference
        self.net: Any = load_network(drafter, self.target)
        self.target.runner.prepare([self.target.hidden_graph, self.target.logits_graph])
        self.target.runner.prepare(self.net.graphs)
        self.drafter: MemoryDrafter = over("tapping", self.net, cache_of(self.net, sizes.get("own", 64)))
        self.cache = cache_of(self.target, sizes.get("pages", 64))

    def engine(self, **changes: Any) -> Engine:
        parts: dict[str, Any] = {
            "target": self.target, "cache": self.cache, "drafters": {"tapping": self.drafter},
            "default_drafter": "tapping", "policy": FixedPolicy(DEPTH), "draft_tokens": DEPTH, "step_tokens": 24,
            "prefill_chunk": 9,
        }  # fmt: skip
        return Engine(EngineParts(**parts | changes))

    def expected(self, text: list[int], count: int) -> list[int]:
        """What the published source drafts after `text`."""
        return self.reference.draft(text, self.states(text), count)[0]

    def states(self, text: list[int]) -> torch.Tensor:
        """What the network is given of all rows but the last."""
        cache = cache_of(self.target)
        cache.open(0, text)
        with cache.tail([(0, text[:-1])]) as tail:
            found = self.target.states(tail.rows(), cache)
            at = [0 if tap == FINAL else 1 + self.target.tapped.index(tap) for tap in self.net.taps]
            return torch.cat([found[i].clone() for i in at], 1)

    def right(self, engine: Engine) -> int:
        """Run until all is done; how many drafts there were, each the reference's."""
        asked: list[tuple[str, int, list[int]]] = []  # text, its length then, the draft
        texts = {r.request_id: r.sequence for r in engine.state.requests.values()}
        whole = dict[str, list[int]]()
        while engine.has_work:
            whole = {name: list(sequence.tokens) for name, sequence in texts.items()}
            asked += [(d.request, len(whole[d.request]), d.proposed) for d in engine.step() if d.proposed]
        states = {name: self.states(text) for name, text in whole.items()}  # a row's hang on none after it
        for name, length, proposed in asked:
            text, known = whole[name][:length], states[name][: length - 1]
            assert proposed == self.reference.draft(text, known, len(proposed))[0]
        return len(asked)


def params(count: int = 20, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, **more)


def texts(count: int, length: int = 30) -> list[list[int]]:
    g = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCAB, (length + 3 * i,), generator=g).tolist() for i in range(count)]


PARTLY = ForcedAcceptance(
    (0.6,) * DEPTH
)  # keeps some tokens of most drafts, though they are not the target's


def partly(pair: Pair) -> int:
    engine = pair.engine(forced=PARTLY)
    for i, text in enumerate(texts(2)):
        engine.add(str(i), text, params(28, seed=i))
    return pair.right(engine)


def preempted(pair: Pair) -> int:
    engine = pair.engine(forced=PARTLY)
    for i, text in enumerate(texts(3, 40)):
        engine.add(str(i), text, params(30, seed=i))
    compared = pair.right(engine)
    assert engine.state.preemptions
    return compared


def prefix_hit(pair: Pair) -> int:
    """A prompt that was written before with the drafter, then one that was written without it."""
    first, second = texts(2, 40)
    engine = pair.engine()
    engine.run({"a": (first, params(4)), "b": (second, params(4, drafter="none"))})
    engine.add("a", [*first, 5, 6], params(8))
    engine.add("b", [*second, 5, 6], params(8))
    stats = {r.request_id: r.stats for r in engine.state.requests.values()}
    compared = pair.right(engine)
    assert stats["a"].cached_prompt_tokens == 32
    assert stats["b"].cached_prompt_tokens == 0  # it is computed again, for the drafter's sake
    assert stats["a"].drafted
    assert stats["b"].drafted
    return compared


def cancelled_neighbour(pair: Pair) -> int:
    engine = pair.engine(forced=PARTLY)
    for i, text in enumerate(texts(3)):
        engine.add(str(i), text, params(20, seed=i))
    for _ in range(9):
        engine.step()
    engine.cancel("1")
    engine.add("3", texts(4)[3], params(16, seed=3))
    return pair.right(engine)


class Seldom(FixedPolicy):
    """Drafts in two steps only: more rows wait before them than a draft computes along, or than may wait at all."""

    steps = 0

    def plan(self, rows: Any, free_proposals: Any, prefill_rows: int = 0) -> DraftPlan:
        self.steps += 1
        self.k = DEPTH if self.steps in (24, 103) else 0
        return super().plan([replace(row, draft_tokens="auto") for row in rows], free_proposals, prefill_rows)


def seldom(pair: Pair) -> int:
    engine = pair.engine(policy=Seldom(DEPTH), draft_tokens="auto")
    for i, text in enumerate(texts(4, 12)):
        engine.add(str(i), text, params(105, seed=i))
    return pair.right(engine)


SCENES = {
    "partly": partly, "preempted": preempted, "prefix": prefix_hit, "cancelled": cancelled_neighbour, "seldom": seldom,
}  # fmt: skip


def play(scene: str, target: Path, drafter: Path, reference: Reference, runner: Runner | None = None) -> None:
    pair = Pair(target, drafter, reference, runner, pages=11 if scene == "preempted" else 64)
    assert SCENES[scene](pair) > 6
    assert pair.drafter.cache.open_sequences == 0
    assert not pair.drafter._texts
    assert not pair.drafter._lacking


def a_row_late(patch: pytest.MonkeyPatch) -> None:
    notify = stepping.notify

    def late(state: Any, plan: Any, result: Any, states: Any, starts: Any) -> None:
        notify(state, plan, result, tuple(torch.roll(part, 1, 0) for part in states), starts)

    patch.setattr(stepping, "notify", late)


def refused_rows_are_told(patch: pytest.MonkeyPatch) -> None:
    notify = stepping.notify

    def all_of_them(state: Any, plan: Any, result: Any, states: Any, starts: Any) -> None:
        every = [b - a if k else 0 for a, b, k in zip(starts, starts[1:], result.keep, strict=False)]
        notify(state, plan, replace(result, keep=every), states, starts)

    patch.setattr(stepping, "notify", all_of_them)


def a_prefix_hit_without_states(patch: pytest.MonkeyPatch) -> None:
    """The target takes its whole prefix, and the drafter what `on_commit` brings as if that began where its own ends."""
    begin, on_commit = MemoryDrafter.begin, MemoryDrafter.on_commit

    def all_known(self: MemoryDrafter, sequence: Any) -> int:
        begin(self, sequence)
        return len(sequence.tokens)

    def renumbered(self: MemoryDrafter, kept: list[Kept]) -> None:
        for rows in kept:
            text = self._texts[rows.sequence.id]
            if text.known < rows.first:  # as if they had been brought
                text.waiting.put(torch.zeros(rows.first - text.known, self.net.width))  # type: ignore[attr-defined]
                text.known = rows.first
        on_commit(self, kept)

    patch.setattr(MemoryDrafter, "begin", all_known)
    patch.setattr(MemoryDrafter, "on_commit", renumbered)


BUGS = [(a_row_late, "partly"), (refused_rows_are_told, "partly"), (a_prefix_hit_without_states, "prefix")]
