"""An independent draft model with another vocabulary: what both share is the text.

The text is cut at fixed places, before a word or after so many characters, and each piece is encoded by itself. So the
draft model's tokens are a function of the text alone, and only those of its last piece can still change. What it drafts
is text again, cut to whole pieces and encoded by the target's tokenizer: so a short draft is the beginning of a longer
one. It is greedy, since draws from two vocabularies have no noise in common.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol

from paceline.core import MAX_DRAFT_TOKENS, Draft, Sequence
from paceline.drafters.base import DraftContext, Drafter
from paceline.drafters.contract import GreedyPicker
from paceline.drafters.draft_model import ModelDrafter
from paceline.kv.cache import KVCache
from paceline.models.base import Target

# a piece that nothing which follows can change: a word with the space before it, or so many characters of one kind
PIECE = re.compile(r"\s{0,63}\S{1,63}(?=\s)|\s{0,63}\S{64}|\s{64}")


class Spelling(Protocol):
    """What of a tokenizer is used: see paceline/text/tokenizer.py."""

    bos_id: int | None
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]

    def encode(self, text: str, add_bos: bool | None = None) -> list[int]: ...

    def piece(self, token: int, skip_special: bool = True) -> bytes: ...


@dataclass(slots=True)
class _Text:
    """One text as the draft model reads it."""

    shadow: Sequence
    settled: list[int] = field(default_factory=list)  # its tokens that do not change any more
    read: int = 0  # tokens of the target
    open: str = ""  # characters of the last piece
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    @property
    def whole(self) -> bool:
        """Whether it ends with a whole character."""
        return not self.decoder.getstate()[0]


class _Reader(ModelDrafter):
    """The draft model over its own tokens, of which the last ones may change from one round to the next."""

    def __init__(self, model: Target, cache: KVCache) -> None:
        super().__init__(model, cache, model.vocab_size)
        self.texts: dict[int, _Text] = {}

    def settled(self, sequence: Sequence) -> int:
        return len(self.texts[sequence.id].settled)


class _Picker(GreedyPicker):
    """Stops a row once its draft, in the target's tokens, is as long as is wanted."""

    def __init__(self, rows: int, enough: Callable[[int, list[int]], bool]) -> None:
        super().__init__(rows)
        self._enough = enough

    def go_on(self, rows: Seq[int], step: int) -> list[int]:
        return [row for row in rows if not self._enough(row, self.tokens[row])]


class TranslatedDrafter(Drafter):
    name = "model"
    needs_hidden = False
    blind = True

    def __init__(self, model: Target, cache: KVCache, own: Spelling, target: Spelling) -> None:
        self.max_tokens = MAX_DRAFT_TOKENS
        self.model, self.cache = model, cache
        self._own, self._target = own, target
        self._reader = _Reader(model, cache)
        self._texts = self._reader.texts

    def draft(self, context: DraftContext) -> Draft:
        out = Draft.empty(len(context.sequences), "no proposal")
        wanted = [
            b for b, limit in enumerate(context.limits) if limit > 0 and self._follow(context.sequences[b])
        ]
        if not wanted:
            return out
        shadows = [self._texts[context.sequences[b].id].shadow for b in wanted]
        limits = [context.limits[b] for b in wanted]

        def enough(row: int, tokens: list[int]) -> bool:
            return tokens[-1] in self._own.special_ids or len(self._translate(tokens, [])[0]) >= limits[row]

        picker = _Picker(len(wanted), enough)
        inner = DraftContext(
            shadows, [MAX_DRAFT_TOKENS] * len(wanted), [0] * len(wanted), None,
            [False] * len(wanted), context.cache, picker,
        )  # fmt: skip
        self._reader.draft(inner)
        for row, b in enumerate(wanted):
            tokens, confidence = self._translate(picker.tokens[row], picker.confidence[row])
            if tokens:
                out.tokens[b], out.confidence[b] = tokens[: limits[row]], confidence[: limits[row]]
                out.drafter[b], out.reasons[b] = self.name, None
        return out

    def unread(self, sequence: Sequence) -> int:
        text = self._texts.get(sequence.id)
        return max(len(sequence.tokens) - 1 - (0 if text is None else text.read), 0)

    def forget(self, sequence_id: int) -> None:
        self._reader.forget(sequence_id)
        self._texts.pop(sequence_id, None)

    def _follow(self, sequence: Sequence) -> bool:
        """Read what was written since the last draft; whether the draft model can go on from there."""
        text = self._texts.get(sequence.id)
        if text is None:
            text = self._texts[sequence.id] = _Text(replace(sequence, tokens=[], constraint=None, shown=None))
        new = sequence.tokens[text.read :]
        skipped = 1 if not text.read and new[:1] == [self._target.bos_id] else 0
        data = b"".join([self._target.piece(token, skip_special=False) for token in new[skipped:]])
        text.open += text.decoder.decode(data)
        text.read = len(sequence.tokens)
        end = 0
        while piece := PIECE.match(text.open, end):
            text.settled += self._encode(piece[0], begins=not text.settled)
            end = piece.end()
        text.open = text.open[end:]
        text.shadow.tokens[:] = text.settled + self._encode(text.open, begins=not text.settled)
        return text.whole and bool(text.shadow.tokens)

    def _encode(self, piece: str, begins: bool) -> list[int]:
        return self._own.encode(piece, None if begins else False) if piece else []

    def _translate(self, drafted: list[int], confidence: list[float]) -> tuple[list[int], list[float]]:
        """The tokens of the target that a draft spells, without its last piece, which may go on unless the text ends."""
        end = next((i for i, token in enumerate(drafted) if token in self._own.special_ids), len(drafted))
        pieces = [self._own.piece(token) for token in drafted[:end]]
        text, tokens = b"".join(pieces).decode("utf-8", errors="ignore"), []
        while piece := PIECE.match(text):
            tokens += self._target.encode(piece[0], False)
            text = text[piece.end() :]
        if end < len(drafted) and drafted[end] in self._own.eos_ids:
            tokens, end = [*tokens, *self._target.encode(text, False), *self._target.eos_ids[:1]], end + 1
        # a token of the target is as likely as the drafted ones that begin in it
        ends = list(accumulate(len(self._target.piece(token, skip_special=False)) for token in tokens))
        chances, begins = [1.0] * len(tokens), accumulate(map(len, pieces), initial=0)
        for begin, chance in zip(begins, confidence[:end], strict=False):
            at = bisect_right(ends, begin)
            if at < len(tokens):
                chances[at] *= chance
        return tokens, chances
