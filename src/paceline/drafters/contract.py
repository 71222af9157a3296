"""What every drafter must keep to, as functions that a third party's test suite can call.

    from paceline.drafters.contract import check_drafter
    def test_contract(): check_drafter(lambda target, cache: MyDrafter(target), target, cache)

They raise AssertionError with what was broken. A drafter that breaks them is parked by the engine, never trusted.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import FrozenInstanceError

import torch

from paceline.core import MAX_DRAFT_TOKENS, Draft, SamplingParams, Sequence
from paceline.drafters.base import DraftContext, Drafter, Kept, Leaf, Seen
from paceline.drafters.guard import ReadOnlyError, ask, begin, on_commit, on_verify
from paceline.kv.cache import KVCache
from paceline.models.base import Target
from paceline.models.drafters.base import FINAL
from paceline.ops.base import Rule, Stop

Make = Callable[[Target, KVCache], Drafter]


class GreedyPicker:
    """A picker that takes the most likely token; implements `Picker`."""

    def __init__(self, rows: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.confidence: list[list[float]] = [[] for _ in range(rows)]

    def pick(
        self,
        rows: Seq[int],
        step: int,
        logits: torch.Tensor,
        ids: torch.Tensor | None = None,
        sure: Seq[float] | None = None,
    ) -> list[int]:
        out = []
        for i, row in enumerate(rows):
            assert len(self.tokens[row]) == step, "positions are drafted in order, each once"
            best = int(logits[i].argmax())
            out.append(best if ids is None else int(ids[i, best]))
            self.tokens[row].append(out[-1])
            self.confidence[row].append(float(torch.softmax(logits[i].float(), 0).max()))
        return out

    def best(self, row: int, scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        top = scores.float().cpu().sort(descending=True, stable=True)
        return top.values[:count], top.indices[:count]

    def rules(self, rows: Seq[int]) -> list[Rule] | None:
        return None

    def stop(self, row: int) -> Stop:
        return Stop(MAX_DRAFT_TOKENS)

    def take(self, row: int, tokens: list[int], confidence: list[float]) -> None:
        raise AssertionError("no rules were given, so nothing can have been drawn by them")

    def go_on(self, rows: Seq[int], step: int) -> list[int]:
        return list(rows)

    def width(self, row: int) -> int:
        return 1

    def grow(self, leaves: Seq[Leaf], logits: torch.Tensor, ids: torch.Tensor | None = None) -> list[Leaf]:
        raise AssertionError("a draft of width 1 is a chain: use `pick`")

    def draft(self, drafter: str) -> Draft:
        return Draft(
            self.tokens, self.confidence, None, [None] * len(self.tokens), [drafter] * len(self.tokens)
        )


def check_drafter(make: Make, target: Target, cache: KVCache, rounds: int = 6) -> None:
    """Drive a fresh drafter over growing, shrinking and vanishing texts. `cache` must be empty."""
    rng = random.Random(0)
    drafter = make(target, cache)
    assert drafter.name, "a drafter has a name"
    assert drafter.max_tokens >= 1, "a drafter can draft at least one token"
    assert isinstance(drafter, Drafter), "a drafter derives from paceline.drafters.base.Drafter"
    texts: dict[int, Sequence] = {}
    for i in range(3):
        prompt = [rng.randrange(target.vocab_size) for _ in range(rng.randrange(1, 30))]
        texts[i] = Sequence(i, prompt, len(prompt), SamplingParams(), seed=i)
        cache.open(i, prompt, share=False)
        if drafter.taps:
            assert begin(drafter, texts[i], {}) >= 0, "it cannot remember fewer rows than none"
    for turn in range(rounds):
        hidden = [_advance(target, cache, text, drafter) for text in texts.values()]
        context = _context(list(texts.values()), hidden, cache, rng)
        before = _snapshot(texts, cache)
        changes = "a drafter changes neither the texts nor the target's cache"
        try:
            draft = ask(drafter, context)
        except (ReadOnlyError, FrozenInstanceError) as error:
            raise AssertionError(f"{changes}: {error}") from error
        _check_draft(draft, context, target.vocab_size)
        assert _snapshot(texts, cache) == before, changes
        for row, text in enumerate(texts.values()):
            tokens, first = draft.tokens[row], len(text.tokens)
            committed = tokens[: rng.randrange(len(tokens) + 1)]
            rest = [rng.randrange(target.vocab_size) for _ in range(len(tokens) + 1 - len(committed))]
            text.tokens += [*committed, rest[0]]
            if drafter.observes and tokens:
                failed = dict[str, str]()
                on_verify(drafter, [Seen(text, first, tuple(tokens), (*committed, *rest))], [failed])
                assert not failed, f"on_verify fails: {failed}"
        if turn == rounds // 2:
            gone = texts.pop(0)
            cache.close(gone.id)
            drafter.forget(gone.id)
            drafter.forget(gone.id)  # twice is harmless
    for text in texts.values():
        drafter.forget(text.id)
        cache.close(text.id)


def _advance(target: Target, cache: KVCache, text: Sequence, drafter: Drafter) -> torch.Tensor:
    """Compute all but the last token, and call `on_commit`; the hidden state before it."""
    new = text.tokens[text.committed : -1]
    if not new:
        return torch.zeros(1, target.hidden_size, dtype=target.dtype)
    with cache.tail([(text.id, new)]) as tail:
        rows = tail.rows(target.device)
        states = target.states(rows, cache) if drafter.taps else (target.forward(rows, cache),)
        hidden = states[0][-1:].clone()
        tail.commit([len(new)])
    text.committed += len(new)
    if drafter.taps:
        parts = [states[0 if tap == FINAL else 1 + target.tapped.index(tap)] for tap in drafter.taps]
        before, failed = [part.clone() for part in parts], dict[str, str]()
        on_commit(drafter, [Kept(text, text.committed - len(new), parts)], [failed])
        assert not failed, f"on_commit fails: {failed}"
        unchanged = all(torch.equal(a, b) for a, b in zip(before, parts, strict=True))
        assert unchanged, "a drafter does not change the hidden states that on_commit brings"
    return hidden


def _context(
    texts: list[Sequence], hidden: list[torch.Tensor], cache: KVCache, rng: random.Random
) -> DraftContext:
    limits = [rng.randrange(0, 6) for _ in texts]
    slots = [cache.slot(text.id) for text in texts]
    states = torch.zeros(cache.max_sequences, *hidden[0].shape[1:], dtype=hidden[0].dtype)
    states[slots] = torch.cat(hidden)
    return DraftContext(
        texts,
        limits,
        slots,
        states,
        [text.committed > 0 for text in texts],
        cache,
        GreedyPicker(len(texts)),
    )


def _snapshot(texts: dict[int, Sequence], cache: KVCache) -> list[object]:
    stored = hashlib.sha256()
    for tensor in (*cache.k, *cache.v, *cache.tables.values()):
        stored.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return [
        stored.hexdigest(),
        *((list(t.tokens), t.committed, t.params, cache.committed(t.id)) for t in texts.values()),
    ]


def _check_draft(draft: Draft, context: DraftContext, vocab_size: int) -> None:
    rows = len(context.sequences)
    assert len(draft.tokens) == len(draft.confidence) == rows, "one row for each sequence"
    for tokens, confidence, limit in zip(draft.tokens, draft.confidence, context.limits, strict=True):
        assert len(tokens) <= limit, f"{len(tokens)} tokens drafted, {limit} allowed"
        assert len(confidence) == len(tokens), "one confidence for each token"
        assert all(0.0 <= c <= 1.0 for c in confidence), "confidence is a probability"
        assert all(isinstance(t, int) and 0 <= t < vocab_size for t in tokens), (
            "tokens are ids of the vocabulary"
        )
