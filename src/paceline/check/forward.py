"""Whether the bits of a row depend on the rows beside it, or on how a text is cut into chunks."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from paceline.check.certificate import Finding
from paceline.check.crash import Where, over
from paceline.check.subject import Subject

NAME = "bit-exact forward"
CUTS = ((1,), (2,), (3,), (5,), (7,), (8, 1), (17,), (64,))


@dataclass(slots=True)
class Deviation:
    """The largest difference of any logit between two ways of computing the same row; 0 is bit-exact."""

    logits: float = 0.0
    rows: int = 0
    values: int = 0
    worst: str = ""

    def add(self, mine: torch.Tensor, other: torch.Tensor, where: str) -> None:
        """Compare the logits [len, V] of the same rows."""
        self.rows, self.values = self.rows + len(mine), self.values + other.numel()
        far = _distance(mine, other)
        if far > self.logits:
            self.logits, self.worst = far, where


def measure(subject: Subject, texts: int = 3, length: int = 96, out: Deviation | None = None) -> Deviation:
    """Compare every cut, and texts computed together, with one text computed one token at a time; adds to `out`."""
    out = out if out is not None else Deviation()
    chosen = [_stretched(subject, i, length) for i in range(min(texts, len(subject.prompts)))]
    longest = max(range(len(subject.prompts)), key=lambda i: len(subject.prompts[i]))
    if subject.window is not None:  # one text that outgrows the sliding window
        chosen[-1] = _stretched(subject, longest, min(subject.window + 24, subject.engine.max_len - 1))
    apart = [_hidden(subject, [text], (1,))[0] for text in chosen]
    for text, mine in zip(chosen, apart, strict=True):
        alone = subject.logits(mine)  # [len, V]
        for cut in CUTS[1:]:
            other = subject.logits(_hidden(subject, [text], cut)[0])
            out.add(alone, other, f"chunks of {_sizes(cut)}")
    together, apart = (chosen, apart) if len(chosen) > 1 else ([*chosen, *chosen], [*apart, *apart])
    slots = subject.engine.state.cache.max_sequences
    together, apart = together[-slots:], apart[-slots:]
    for cut in ((1,), (5,), (3, 1)) if len(together) > 1 else ():
        for mine, other in zip(apart, _hidden(subject, together, cut), strict=True):
            where = f"{len(together)} texts together, chunks of {_sizes(cut)}"
            out.add(subject.logits(mine), subject.logits(other), where)
    return out


def _sizes(cut: tuple[int, ...]) -> str:
    return "/".join(map(str, cut))


def _hidden(subject: Subject, texts: list[list[int]], cut: tuple[int, ...]) -> list[torch.Tensor]:
    def where() -> Where:
        batch = f"{len(texts)} together, in chunks of {_sizes(cut)} tokens"
        return {"drafter": "none", "batch": batch, "prompt": subject.excerpt(texts[0])}

    with over(where):
        return subject.hidden(texts, cut)


def _stretched(subject: Subject, i: int, length: int) -> list[int]:
    """A prompt, repeated or cut to `length` tokens, different for each i."""
    tokens = list(subject.prompts[i])
    rng = random.Random(i)
    while len(tokens) < length:
        tokens.append(rng.choice(subject.prompts[i]))
    return tokens[: length - 7 * (i % 3)]


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """0 only for equal bits; NaN counts as infinitely far."""
    if torch.equal(a, b):
        return 0.0
    far = float((a.double() - b.double()).abs().max())
    return far if far == far and far > 0 else float("inf")


def finding(deviation: Deviation) -> Finding:
    if not deviation.rows:
        return Finding(NAME, "not shown", "nothing was compared", {"rows compared": 0})
    exact = deviation.logits == 0
    words = (
        "every row had the same bits, alone or beside others, in chunks of any size"
        if exact
        else f"logits move by up to {deviation.logits:.3g} with the rows computed together (worst: {deviation.worst})"
    )
    counts = {"rows compared": deviation.rows, "values compared": deviation.values}
    return Finding(NAME, "holds" if exact else "not shown", words, counts)
