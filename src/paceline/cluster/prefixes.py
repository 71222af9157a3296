"""Which replica has read which beginning: the last one that was given it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Seq

PAGE = 16  # tokens: engines share prefixes by such pages (kv/store.py)
MOST = 200_000  # pages that are remembered, about 200 bytes each


class Prefixes:
    """A beginning is named by the hash of its pages and its salt. Two of one name cost speed, never text."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._known: OrderedDict[int, str] = OrderedDict()  # the least recently used first

    def find(self, salt: str, prompt: Seq[int], among: Collection[str]) -> str | None:
        """The replica of `among` that was given the longest beginning of the prompt."""
        place = None
        for name in _names(salt, prompt):
            if name not in self._known:
                break
            if self._known[name] in among:
                place = self._known[name]
        return place

    def add(self, salt: str, prompt: Seq[int], replica: str) -> None:
        for name in _names(salt, prompt):
            self._known[name] = replica
            self._known.move_to_end(name)
        while len(self._known) > self._most:
            self._known.popitem(last=False)


def _names(salt: str, prompt: Seq[int]) -> Iterator[int]:
    name = hash(salt)
    for end in range(PAGE, len(prompt) + 1, PAGE):
        name = hash((name, *prompt[end - PAGE : end]))
        yield name
