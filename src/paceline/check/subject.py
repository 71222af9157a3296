"""What is checked: an idle engine, what may be asked of it, and how far its numbers move with the rows."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from paceline.core import Completion, SamplingParams
from paceline.engine.engine import Engine

_ID = -7  # sequence ids of ours; the engine's own count from 0


@dataclass(frozen=True, slots=True)
class Subject:
    """`engine` has nothing to do. `prompts` are token ids; some should end shortly before the sliding window does."""

    engine: Engine
    prompts: tuple[tuple[int, ...], ...]

    @property
    def drafters(self) -> list[str]:
        return [name for name in self.engine.drafter_names if name != "none"]

    @property
    def window(self) -> int | None:
        """The longest sliding window that a text can outgrow here, in tokens."""
        windows = self.engine.state.target.layout.windows.values()
        return max((w for w in windows if w is not None and w < self.engine.max_len), default=None)

    def decode(self, tokens: Seq[int]) -> str:
        tokenizer = self.engine.tokenizer
        return tokenizer.decode(list(tokens)) if tokenizer else " ".join(map(str, tokens))

    def excerpt(self, tokens: Seq[int]) -> str:
        """How a text begins, for a line of the certificate."""
        return f"{self.decode(tokens[:16])[:60]!r}... ({len(tokens)} tokens)"

    def run(self, requests: Seq[tuple[Seq[int], SamplingParams]]) -> list[list[Completion]]:
        """Run requests side by side; per request its n texts."""
        done = self.engine.run(
            {str(i): (list(tokens), params) for i, (tokens, params) in enumerate(requests)}
        )
        return [done[str(i)] for i in range(len(requests))]

    def hidden(self, texts: Seq[Seq[int]], cuts: Seq[int]) -> list[torch.Tensor]:
        """Hidden states [len, H] of each text, fed in chunks of cuts[0], cuts[1], ... tokens (then again),
        together.
        """
        state = self.engine.state
        ids = [_ID - i for i in range(len(texts))]
        out: list[list[torch.Tensor]] = [[] for _ in texts]
        opened: list[int] = []
        try:
            for sequence_id, text in zip(ids, texts, strict=True):
                state.cache.open(sequence_id, list(text), share=False)
                opened.append(sequence_id)
            turn = 0
            while True:
                size = cuts[turn % len(cuts)]
                at = [state.cache.committed(i) for i in ids]
                items = [
                    (i, list(t[a : a + size])) for i, t, a in zip(ids, texts, at, strict=True) if a < len(t)
                ]
                if not items:
                    return [torch.cat(parts) for parts in out]
                with state.cache.tail(items) as tail:
                    rows = tail.rows(state.target.device)
                    hidden = state.target.forward(rows, state.cache)
                    for (sequence_id, _), first, last in zip(
                        items, rows.starts, rows.starts[1:], strict=False
                    ):
                        out[_ID - sequence_id].append(hidden[first:last].clone())
                    tail.commit([len(new) for _, new in items])
                turn += 1
        finally:
            for sequence_id in opened:
                state.cache.close(sequence_id)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, H] -> [M, V] float32, a copy."""
        return self.engine.state.target.logits(hidden).clone()
