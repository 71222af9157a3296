"""What a drafter is known for with its target before it runs here: acceptance by position, worth of confidence.

`paceline train` measures it on held-out texts and writes `paceline_calibration.json` beside the drafter's weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.control.acceptance import ALARM_SHARE, SAMPLED_SHARE, USUAL
from paceline.control.adaptive import KnownPair, Learnt
from paceline.control.base import heat_of, temperature_of
from paceline.control.confidence import BINS
from paceline.core import MAX_DRAFT_TOKENS
from paceline.drafter_kinds import KINDS
from paceline.errors import LoadError
from paceline.files import read_json

FILE_NAME = "paceline_calibration.json"
VERSION = 1
BIN_TRIES = 32.0  # what a bin counts for at most, so that a live engine can still learn


@dataclass(frozen=True, slots=True)
class Known:
    acceptance: tuple[float, ...]  # [1..MAX_DRAFT_TOKENS] chance to be kept, given that all before were
    bins: tuple[tuple[float, float], ...] = ()  # [BINS] (kept, tried) by confidence, or empty
    sampled: Known | None = None  # the same of texts drawn at a temperature, where it was measured
    temperature: float = 1.0  # of such texts

    def pairs(self, drafter: str) -> dict[tuple[str, bool], KnownPair]:
        """As the policy asks for it: by drafter, and whether text is sampled."""
        sampled = self.sampled or Known(tuple([SAMPLED_SHARE * a for a in self.acceptance]))
        return {
            (drafter, False): KnownPair(self.acceptance, self.bins),
            (drafter, True): KnownPair(sampled.acceptance, sampled.bins, heat_of(sampled.temperature)),
        }

    def to_json(self) -> dict[str, object]:
        out: dict[str, object] = {
            "acceptance": list(self.acceptance),
            "bins": [list(pair) for pair in self.bins],
            "temperature": self.temperature,
        }
        return out if self.sampled is None else out | {"sampled": self.sampled.to_json()}


def learnt_of(learnt: Learnt, drafter: str, before: Known | None) -> Known | None:
    """What a drafter's drafts have shown, what was known `before` where they showed nothing."""
    greedy, sampled = (learnt.pairs.get((drafter, hot)) for hot in (False, True))
    hot = before.sampled if before is not None else None
    if sampled is not None:
        hot = Known(sampled.acceptance, sampled.bins, None, temperature_of(sampled.heat))
    if greedy is not None:
        return Known(greedy.acceptance, greedy.bins, hot)
    if before is not None:
        return replace(before, sampled=hot)
    return None if hot is None else Known(hot.acceptance, (), hot)


def complaint(known: Known, drafter: str) -> str | None:
    """A warning if the pair keeps far less than such drafters usually do, else None."""
    measured, usual = known.acceptance[0], USUAL[0]
    if measured >= ALARM_SHARE * usual:
        return None
    trained = drafter in KINDS and KINDS[drafter].trained
    return (
        f"drafter {drafter} hardly fits this target: about {measured:.0%} of its first tokens are kept, such drafters "
        f"reach about {usual:.0%}. It may be of another target, or the target was fine-tuned since. The text is still "
        + ("right; `paceline train` fits the drafter to the target" if trained else
           "right; give a smaller model of the target's own family, or the drafter ngram")
    )  # fmt: skip


def known_of(raw: object) -> Known:
    """From the JSON object of a calibration file or a kept profile. Raises ValueError that says what is wrong."""
    if not isinstance(raw, Mapping):
        raise ValueError("it is no JSON object")
    acceptance = _numbers(raw.get("acceptance"), "acceptance")
    if not 1 <= len(acceptance) <= MAX_DRAFT_TOKENS or not all(0.0 <= a <= 1.0 for a in acceptance):
        raise ValueError(f"acceptance has to be 1 to {MAX_DRAFT_TOKENS} numbers from 0 to 1")
    pairs = raw.get("bins") or []
    if not isinstance(pairs, list) or len(pairs) not in (0, BINS):
        raise ValueError(f"bins has to be {BINS} pairs of (kept, tried)")
    sampled = known_of(raw["sampled"]) if raw.get("sampled") is not None else None
    (temperature,) = _numbers([raw.get("temperature", 1.0)], "temperature")
    if not 0.0 < temperature < float("inf"):
        raise ValueError("temperature is not above 0")
    return Known(acceptance, tuple(_pair(pair) for pair in pairs), sampled, temperature)


def _numbers(raw: object, name: str) -> tuple[float, ...]:
    if not isinstance(raw, list) or not all(isinstance(x, int | float) for x in raw):
        raise ValueError(f"{name} is no list of numbers")
    return tuple(float(x) for x in raw)


def _pair(raw: object) -> tuple[float, float]:
    pair = _numbers(raw, "a pair of bins")
    if len(pair) != 2 or not 0.0 <= pair[0] <= pair[1] < float("inf"):
        raise ValueError("a pair of bins is not 0 <= kept <= tried")
    accepted, tried = pair
    share = min(1.0, BIN_TRIES / tried) if tried else 1.0
    return accepted * share, tried * share


def read_calibration(folder: Path) -> tuple[Known | None, str]:
    """(what the file in a drafter's folder says, ""), (None, "") without a file, or (None, why it is ignored)."""
    path = folder / FILE_NAME
    try:
        raw = read_json(path)
        if raw is None:  # a drafter may be a GGUF file
            return None, ""
        if raw.get("version") != VERSION:
            raise ValueError(f"its version is {raw.get('version')!r}, this paceline reads {VERSION}")
        return known_of(raw), ""
    except (OSError, ValueError, LoadError) as problem:
        return None, f"{path} is ignored ({problem!s:.100}): train the drafter again, or delete the file"
