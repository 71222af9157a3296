"""How far a long comparison has come, in a file: the next night goes on where this one ended."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.check.identity import Effort, Score
from paceline.check.subject import Subject
from paceline.errors import UsageError

_SETS = {"prompts", "temperatures", "batches", "lengths", "scenes", "failures"}  # fields of a score


@dataclass(frozen=True, slots=True)
class StateFile:
    """The score of whole chapters, and of what it is. Written whole or not at all."""

    path: Path

    def read(self, subject: Subject, effort: Effort) -> Score:
        """The score so far; an empty one if there is no such file. Raises UsageError for a file of something else."""
        if not self.path.exists():
            return Score()
        try:
            state = json.loads(self.path.read_text(encoding="utf-8"))
            values, was = dict(state["score"]), state["of"]
            values = {
                f.name: _set(values[f.name]) if f.name in _SETS else values[f.name] for f in fields(Score)
            }
            score = Score(**values)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{self.path} is no state of a check: name another file ({error})") from None
        now = facts(subject, effort)
        if other := [key for key in now if was.get(key) != now[key]]:
            what = ", ".join(f"{key} was {was.get(key)}, is {now[key]}" for key in other)
            raise UsageError(f"{self.path} is the state of another check: {what}; name another file")
        return score

    def write(self, subject: Subject, effort: Effort, score: Score) -> None:
        state = {"of": facts(subject, effort), "score": _plain(asdict(score))}
        beside = self.path.with_name(f".{self.path.name}.part")
        beside.write_text(json.dumps(state) + "\n", encoding="utf-8")
        os.replace(beside, self.path)


def facts(subject: Subject, effort: Effort) -> dict[str, str]:
    """What has to be the same for tokens of two nights to be added up."""
    info, state = subject.engine.info, subject.engine.state
    return {
        "paceline": __version__,
        "target": str(info.get("target", "in memory")),
        "drafters": ", ".join(subject.drafters),
        "arithmetic": str(info.get("arithmetic", "plain torch")),
        "K/V": str(state.cache.holds),
        "tokens of an answer": str(effort.length),
        "texts of a chapter": str(effort.cases),
        "prompts": hashlib.sha256(repr(subject.prompts).encode()).hexdigest()[:16],
    }


def _set(values: Any) -> set[Any]:
    return {tuple(value) if isinstance(value, list) else value for value in values}


def _plain(score: Mapping[str, Any]) -> dict[str, Any]:
    return {key: sorted(value) if key in _SETS else value for key, value in score.items()}
