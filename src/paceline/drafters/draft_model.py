"""An independent smaller model that drafts token by token, with a K/V cache of its own (arXiv 2211.17192).

It trusts nobody's bookkeeping: before each round the tokens it computed last time are compared with the text, and
only what agrees is committed in its cache. When that is full, texts that do not draft lose their memory first, then
the newest ones give up their drafts until there is room again.

Half of what a small model reads for a token is its head: 145 of 300 MB of Qwen2.5-Coder-0.5B. A vocabulary lists the
pairs of characters that occur most first, so a third of it writes 96% of English and code, and it drafts with the head
of that third. A text that is in other tokens is drafted for with all of them.
"""

from __future__ import annotations

import torch

from paceline.core import MAX_DRAFT_TOKENS, Draft, Sequence
from paceline.drafters.base import DraftContext, Drafter
from paceline.kv.cache import KVCache
from paceline.kv.pages import OutOfPages
from paceline.models.base import Target, rows_of

CHUNK = 512  # prompt tokens per forward when it catches up
LARGE = 2**16  # tokens of a vocabulary whose head is narrowed
NARROW = 3  # the part of it that is drafted from, as 1 / NARROW
WINDOW = 128  # written tokens of a text that tell which head it needs
FEW = 4  # rare tokens that tell nothing yet
RARE = 0.1  # of them, so many that cannot be drafted: then the whole head pays


class ModelDrafter(Drafter):
    name = "model"
    needs_hidden = False
    blind = True

    def __init__(
        self,
        model: Target,
        cache: KVCache,
        vocab_size: int,
        max_tokens: int = MAX_DRAFT_TOKENS,
        narrow: Target | None = None,
    ) -> None:
        """`vocab_size` is the target's: padding beyond it is cut off, a shorter head is filled with -inf.

        `narrow` has the logits of the first tokens only, which is what most texts are written in.
        """
        self.model, self.cache, self.vocab_size, self.max_tokens = model, cache, vocab_size, max_tokens
        self.narrow = narrow
        # tokens whose K/V begin at the committed position, by sequence: the one not used for longest first
        self._written: dict[int, list[int]] = {}
        self._refused: set[int] = set()  # sequences that did not fit, and no memory has come free since
        self._shared: dict[
            int, int
        ] = {}  # tokens of others' prefixes, of sequences that were never drafted for

    def draft(self, context: DraftContext) -> Draft:
        active = self._with_room(context)
        news = {row: self._missing(context.sequences[row]) for row in active}
        for step in range(max(context.limits, default=0)):
            if not active:
                break
            logits = self._forward([context.sequences[row] for row in active], [news[row] for row in active])
            picked = context.picker.pick(active, step, logits)
            news = {row: [token] for row, token in zip(active, picked, strict=True)}
            active = context.picker.go_on([row for row in active if step + 1 < context.limits[row]], step)
        return context.picker.draft(self.name)

    def unread(self, sequence: Sequence) -> int:
        if sequence.id in self._written:
            known = self.cache.committed(sequence.id) + len(self._written[sequence.id])
        else:
            if sequence.id not in self._shared:
                pages = self.cache.prefix.match(sequence.tokens, sequence.salt)
                self._shared[sequence.id] = len(pages) * self.cache.page_size
            known = self._shared[sequence.id]
        return max(len(sequence.tokens) - 1 - known, 0)

    def _with_room(self, context: DraftContext) -> list[int]:
        """The rows that draft in this round: up to date, with pages for the whole of it. The newest give way."""
        wanted = [row for row, limit in enumerate(context.limits) if limit > 0]
        busy = {context.sequences[row].id for row in wanted}
        active = [row for row in wanted if self._enter(context.sequences[row], context.limits[row], busy)]
        while active:
            rows = [(context.sequences[row], [0] * (context.limits[row] - 1)) for row in active]
            try:
                sure = [self._sure(s) for s, _ in rows]
                self.cache.tail([(s.id, self._missing(s) + drafted) for s, drafted in rows], sure=sure)
                return active
            except OutOfPages:
                if not self._evict_idle(busy):
                    self._refuse(context.sequences[active.pop()].id)
        return active

    def _enter(self, sequence: Sequence, limit: int, busy: set[int]) -> bool:
        """Bring a text up to date, if need be on the pages of texts that are not `busy`; False if there is no room."""
        long = len(sequence.tokens) + MAX_DRAFT_TOKENS >= min(self.cache.max_tokens, self.model.max_len)
        loose = len(sequence.tokens) - min(self.settled(sequence), len(sequence.tokens) - 1) + limit
        if long or (self.cache.states is not None and loose > self.cache.states.most_refused):
            self._close(sequence.id)
            return False
        if sequence.id in self._refused and busy.issuperset(self._written):
            return False
        while True:
            try:
                self._catch_up(sequence, limit)
                return True
            except OutOfPages:
                if not self._evict_idle(busy):
                    self._refuse(sequence.id)
                    return False

    def _missing(self, sequence: Sequence) -> list[int]:
        """The end of the text that has no K/V yet: never empty."""
        known = self.cache.committed(sequence.id) + len(self._written[sequence.id])
        return sequence.tokens[known:]

    def _catch_up(self, sequence: Sequence, limit: int) -> None:
        """Commit the accepted tokens of the last round, compute all but the last few others. Raises OutOfPages."""
        if sequence.id not in self._written:
            shared = len(self.cache.prefix.match(sequence.tokens, sequence.salt)) * self.cache.page_size
            need = len(sequence.tokens) + limit - shared
            if not self.cache.fits(need):  # before anything is computed in vain
                raise OutOfPages("the draft model's K/V cache is full")
            self.cache.open(sequence.id, sequence.tokens[: max(self.settled(sequence), 1)], sequence.salt)
            self._written[sequence.id] = []
        done = self.cache.committed(sequence.id)
        right = min(
            _common(self._written[sequence.id], sequence.tokens[done:-1]), self.settled(sequence) - done
        )
        self._commit(sequence.id, sequence.tokens[done : done + right])
        while len(missing := self._missing(sequence)) > CHUNK:
            count = min(CHUNK, self.settled(sequence) - self.cache.committed(sequence.id))
            with self.cache.tail([(sequence.id, missing[:count])]) as tail:
                self.model.forward(tail.rows(self.model.device), self.cache)
                tail.commit([count])

    def settled(self, sequence: Sequence) -> int:
        """Tokens of a text that never change."""
        return len(sequence.tokens)

    def _sure(self, sequence: Sequence) -> int:
        """How many tokens from the committed ones on the next round will commit."""
        return max(
            min(self.settled(sequence), len(sequence.tokens) - 1) - self.cache.committed(sequence.id), 0
        )

    def _commit(self, sequence_id: int, tokens: list[int]) -> None:
        with self.cache.tail([(sequence_id, tokens)]) as tail:
            tail.commit([len(tokens)])
        del self._written[sequence_id]  # the last used goes to the end
        self._written[sequence_id] = []

    def _forward(self, sequences: list[Sequence], news: list[list[int]]) -> torch.Tensor:
        """Logits [b, V] after each sequence's new tokens, which follow what has been written in this round."""
        skip = [len(self._written[s.id]) for s in sequences]
        items = [(s.id, self._written[s.id] + new) for s, new in zip(sequences, news, strict=True)]
        with self.cache.tail(items, sure=[self._sure(s) for s in sequences]) as tail:
            rows = tail.rows(self.model.device, skip)
            hidden = self.model.forward(rows, self.cache)
        self._written.update(items)
        logits = self._model_for(sequences).logits(rows_of(hidden, [end - 1 for end in rows.starts[1:]]))
        short = self.vocab_size - logits.shape[-1]
        if short > 0:
            return torch.nn.functional.pad(logits, (0, short), value=float("-inf"))
        return logits[:, : self.vocab_size]

    def _model_for(self, sequences: list[Sequence]) -> Target:
        """The one with the narrow head, where each text is written in tokens that it has."""
        narrow = self.narrow
        return narrow if narrow and all(_usual(s, narrow.vocab_size) for s in sequences) else self.model

    def forget(self, sequence_id: int) -> None:
        self._refused.discard(sequence_id)
        self._shared.pop(sequence_id, None)
        self._close(sequence_id)

    def _close(self, sequence_id: int) -> None:
        if self._written.pop(sequence_id, None) is not None:
            self.cache.close(sequence_id)
            self._refused.clear()

    def _refuse(self, sequence_id: int) -> None:
        """Stop drafting for a text and free its pages, until another text frees some."""
        self._close(sequence_id)
        self._refused.add(sequence_id)

    def _evict_idle(self, busy: set[int]) -> bool:
        """Free the memory of the text that has not been drafted for the longest time; False if all are `busy`."""
        idle = next((i for i in self._written if i not in busy), None)
        if idle is not None:
            self._close(idle)
        return idle is not None


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common beginning."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _usual(sequence: Sequence, count: int) -> bool:
    """Whether what was written of a text last is of the first `count` tokens, but for a few."""
    recent = sequence.tokens[max(sequence.prompt_len, len(sequence.tokens) - WINDOW) :]
    return sum(token >= count for token in recent) <= max(FEW, RARE * len(recent))
