"""Drafters of a target that nobody named: smaller models of its vocabulary and heads made for it, found on this machine.

Only headers and the beginnings of files are read, in some milliseconds. What is found is said, never loaded: a draft
model may be a gigabyte more.
"""

from __future__ import annotations

import filecmp
import mmap
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoints.foreign import drafter_kind
from paceline.checkpoints.gguf.reader import is_gguf
from paceline.control.outlook import by_bytes, pays_from
from paceline.errors import CapacityError, PacelineError
from paceline.models.config import read_config
from paceline.survey import why_not_together

LARGEST = 0.7  # of the target's bytes: what is larger takes nearly as long as the target itself
MOST = 64  # neighbours that are looked at
TOKENS = b"tokenizer.ggml.tokens"
COMPARED = 8192  # tokens of two lists


GIB = float(1 << 30)


@dataclass(frozen=True, slots=True)
class Suggestion:
    path: Path
    kind: str  # model, or one of drafter_kinds.py
    size: int  # bytes of weights
    share: float  # of the target's

    def described(self, target: Path) -> str:
        """One line: what it would cost and bring by its bytes, and how to use it."""
        beside = self.path.parent == target.parent
        what = (
            f"a {self.kind} head made for it" if self.kind != "model" else "a smaller model of its vocabulary"
        )
        share = pays_from(by_bytes(self.share), "model")
        place = "lies beside it" if beside else f"is in {self.path.parent}"
        return (
            f"{self.path.name} {place}, {what}: by its bytes a drafted token takes {self.share:.2f} of a step and pays "
            f"where more than {share:.0%} are kept. It is {self.size / GIB:.2f} GiB more; --drafter {self.path} uses it"
        )


def suggestions(target: Path, caches: Iterable[Path] = ()) -> list[Suggestion]:
    """Beside the target and in `caches` (folders of repositories), the smallest first. Raises nothing."""
    whole = weights(target)
    if not whole:
        return []
    out = []
    for path in _neighbours(target, caches):
        size = weights(path)
        if not 0 < size <= LARGEST * whole or path.resolve() == target.resolve():
            continue
        kind = _kind(path, target)
        if kind is not None:
            out.append(Suggestion(path, kind, size, size / whole))
    return sorted(out, key=lambda suggestion: suggestion.size)


def weights(path: Path) -> int:
    """Bytes of a model's files, 0 where there are none."""
    try:
        if path.is_file():
            return path.stat().st_size if path.suffix == ".gguf" else 0
        return sum(file.stat().st_size for file in path.glob("*.safetensors"))
    except OSError:
        return 0


def _neighbours(target: Path, caches: Iterable[Path]) -> Iterator[Path]:
    """GGUF files and model folders."""
    places = [target.parent]
    for cache in caches:
        places += sorted(cache.glob("models--*/snapshots/*"))
    for place in places[:MOST]:
        try:
            entries = sorted(place.iterdir())[:MOST]
        except OSError:
            continue
        yield from (
            entry for entry in entries if entry.suffix == ".gguf" or (entry / "config.json").is_file()
        )
        if place != target.parent and (place / "config.json").is_file():
            yield place


def _kind(path: Path, target: Path) -> str | None:
    """As what it can draft for the target; None if it cannot."""
    try:
        kind = drafter_kind(read_config(path)) if path.is_dir() else None
        if kind is not None:
            return kind if why_not_together(target, path) is None else None
        return "model" if _same_tokens(path, target) else None
    except (PacelineError, OSError, ValueError):
        return None


def _same_tokens(path: Path, target: Path) -> bool:
    """Whether two models seem to have one vocabulary, by what their files say in the same words."""
    if path.is_dir() and target.is_dir():
        mine, theirs = path / "tokenizer.json", target / "tokenizer.json"
        return mine.is_file() and theirs.is_file() and filecmp.cmp(mine, theirs, shallow=False)
    if not (is_gguf(path) and is_gguf(target)):
        return False
    mine_listed, theirs_listed = _listed(path), _listed(target)
    return mine_listed is not None and mine_listed == theirs_listed


def _listed(path: Path) -> tuple[int, bytes] | None:
    """(how many tokens a GGUF file lists, the first of them as they are stored)"""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(TOKENS)
        begin = at + len(TOKENS) + 16  # the kinds of the value and of its elements, and their number
        if at < 0 or begin > len(data):
            return None
        (count,) = struct.unpack_from("<Q", data, begin - 8)
        end = begin
        for _ in range(min(count, COMPARED)):
            if end + 8 > len(data):
                return None
            end += 8 + struct.unpack_from("<Q", data, end)[0]
        return count, data[begin:end]


def costs_too_much(drafter: Path, target: Path) -> str | None:
    """What a draft model costs that is hardly smaller than its target, or larger; None where it is."""
    mine, whole = weights(drafter), weights(target)
    if not whole or mine <= LARGEST * whole:
        return None
    return (
        f"the draft model {drafter.name} has {mine / whole:.1f} times its target's bytes, so a drafted token takes about "
        f"{mine / whole:.1f} of a step and hardly pays: auto will see, and mostly draft nothing. Give a smaller one"
    )


def check_memory(target: Path, drafter: Path, free: int) -> None:
    """Raise CapacityError where `free` bytes hold the target, but not its drafter, too."""
    mine, whole = weights(drafter), weights(target)
    if drafter != target and whole < free < whole + mine:
        raise CapacityError(
            f"target and drafter need {(whole + mine) / GIB:.1f} GiB together, {free / GIB:.1f} GiB of memory are free: "
            "use --drafter none or ngram, or a smaller one"
        )
