"""Drafts that branch, in integers. A token names the one before it by its place in the draft: `parents[j]` < j, or -1 for
the text's last token. In `preorder` the tokens of a branch that no branch before it has are neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from paceline.errors import UsageError, shown

MOST_DEEP, MOST_WIDE = 16, 4


class Shape(NamedTuple):
    """Of a tree: tokens one after the other, and tokens beside each other, at most."""

    depth: int
    width: int

    @classmethod
    def parse(cls, text: object) -> Shape:
        """From `6x4`. Raises UsageError."""
        numbers = text.lower().split("x") if isinstance(text, str) else []
        if len(numbers) == 2 and all(n.isascii() and n.isdigit() and len(n) < 3 for n in numbers):
            shape = cls(int(numbers[0]), int(numbers[1]))
            if 1 <= shape.depth <= MOST_DEEP and 2 <= shape.width <= MOST_WIDE:
                return shape
        raise UsageError(
            f"draft_tree={shown(text)} is not possible: give DEPTHxWIDTH from 1x2 to {MOST_DEEP}x{MOST_WIDE}, "
            "or leave it out for chains"
        )


def path_to(parents: Seq[int], node: int) -> list[int]:
    """The places of the tokens up to `node`, first to last; none for -1."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def branches(parents: Seq[int]) -> list[list[int]]:
    """The paths to all tokens that none follows, in their order."""
    inner = set(parents)
    return [path_to(parents, node) for node in range(len(parents)) if node not in inner]


def depths(parents: Seq[int]) -> list[int]:
    """How many tokens each one's path has, itself included."""
    out: list[int] = []
    for parent in parents:
        out.append(1 if parent < 0 else out[parent] + 1)
    return out


def trunk(parents: Seq[int]) -> int:
    """Tokens of the first branch, in preorder."""
    return next((j for j, parent in enumerate(parents) if parent != j - 1), len(parents))


def preorder(parents: Seq[int], weight: Seq[float]) -> list[int]:
    """The places in an order in which what follows a token comes right after it, the heaviest first."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    out, open_ = [], [-1]
    while open_:
        node = open_.pop()
        out.append(node)
        open_ += sorted(children.get(node, ()), key=lambda n: (weight[n], -n))
    return out[1:]


def products(parents: Seq[int], chances: Seq[float]) -> list[float]:
    """The product of each token's and its path's."""
    out: list[float] = []
    for parent, chance in zip(parents, chances, strict=True):
        out.append(chance * (out[parent] if parent >= 0 else 1.0))
    return out


def renumbered(parents: Seq[int], nodes: Seq[int]) -> list[int]:
    """The parents of `nodes` alone, in that order. Each one's parent is among them, before it."""
    place = {-1: -1} | {node: i for i, node in enumerate(nodes)}
    return [place[parents[node]] for node in nodes]


@dataclass(slots=True)
class Branches:
    """How rows of trees write K/V. A branch has a slot, and pages of its own from the first that is not whole on."""

    further: list[tuple[int, int]]  # a row, and a slot beside its own that it is stored for
    copies: list[tuple[int, int, int]]  # before all: from a slot to a slot, the page of that index
    runs: list[int]  # first rows of those that stand one behind the other in one slot, then their number
