"""An independent smaller model that drafts token by token, with a K/V cache of its own (arXiv 2211.17192).

It trusts nobody's bookkeeping: before each round the tokens it computed last time are compared with the text, and
only what agrees is committed in its cache.
"""

from __future__ import annotations

import torch

from paceline.core import MAX_DRAFT_TOKENS, Draft, Sequence
from paceline.drafters.base import DraftContext
from paceline.errors import CapacityError
from paceline.kv.cache import KVCache
from paceline.models.base import Target

CHUNK = 512  # prompt tokens per forward when it catches up


class ModelDrafter:
    name = "model"
    needs_hidden = False

    def __init__(
        self, model: Target, cache: KVCache, vocab_size: int, max_tokens: int = MAX_DRAFT_TOKENS
    ) -> None:
        """`vocab_size` is the target's: padding beyond it is cut off, a shorter head is filled with -inf."""
        self.model, self.cache, self.vocab_size, self.max_tokens = model, cache, vocab_size, max_tokens
        self._written: dict[int, list[int]] = {}  # tokens whose K/V stand at the committed position on

    def draft(self, context: DraftContext) -> Draft:
        active = [
            row
            for row, sequence in enumerate(context.sequences)
            if context.limits[row] > 0 and self._catch_up(sequence)
        ]
        news = {row: self._missing(context.sequences[row]) for row in active}
        for step in range(max(context.limits, default=0)):
            if not active:
                break
            logits = self._forward([context.sequences[row] for row in active], [news[row] for row in active])
            picked = context.picker.pick(active, step, logits)
            news = {row: [token] for row, token in zip(active, picked, strict=True)}
            active = [
                row for row in active if step + 1 < context.limits[row] and context.picker.go_on(row, step)
            ]
        return context.picker.draft(self.name)

    def _missing(self, sequence: Sequence) -> list[int]:
        """The end of the text that has no K/V yet: never empty."""
        known = self.cache.committed(sequence.id) + len(self._written[sequence.id])
        return sequence.tokens[known:]

    def _catch_up(self, sequence: Sequence) -> bool:
        """Commit what last round got right, compute all but the last few tokens; False if there is no room."""
        try:
            if sequence.id not in self._written:
                self.cache.open(sequence.id, sequence.tokens, sequence.salt)
                self._written[sequence.id] = []
            done = self.cache.committed(sequence.id)
            right = _common(self._written[sequence.id], sequence.tokens[done:-1])
            self._commit(sequence.id, sequence.tokens[done : done + right])
            while len(missing := self._missing(sequence)) > CHUNK:
                with self.cache.tail([(sequence.id, missing[:CHUNK])]) as tail:
                    self.model.forward(tail.rows(self.model.device), self.cache)
                    tail.commit([CHUNK])
        except CapacityError:
            self.forget(sequence.id)
            return False
        return len(sequence.tokens) + MAX_DRAFT_TOKENS < min(self.cache.max_tokens, self.model.max_len)

    def _commit(self, sequence_id: int, tokens: list[int]) -> None:
        with self.cache.tail([(sequence_id, tokens)]) as tail:
            tail.commit([len(tokens)])
        self._written[sequence_id] = []

    def _forward(self, sequences: list[Sequence], news: list[list[int]]) -> torch.Tensor:
        """Logits [b, V] after each sequence's new tokens, which follow what has been written in this round."""
        skip = [len(self._written[s.id]) for s in sequences]
        items = [(s.id, self._written[s.id] + new) for s, new in zip(sequences, news, strict=True)]
        with self.cache.tail(items) as tail:
            rows = tail.rows(self.model.device, skip)
            hidden = self.model.forward(rows, self.cache)
        self._written.update(items)
        last = torch.tensor([end - 1 for end in rows.starts[1:]], device=hidden.device)
        logits = self.model.logits(hidden[last])
        short = self.vocab_size - logits.shape[-1]
        if short > 0:
            return torch.nn.functional.pad(logits, (0, short), value=float("-inf"))
        return logits[:, : self.vocab_size]

    def forget(self, sequence_id: int) -> None:
        if self._written.pop(sequence_id, None) is not None:
            self.cache.close(sequence_id)


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common beginning."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
