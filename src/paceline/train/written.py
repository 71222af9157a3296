"""Texts that the target writes itself, kept group by group: whatever ends the run, no group is written twice."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from paceline.core import Completion, SamplingParams
from paceline.train.checkpoint import disk_errors
from paceline.train.windows import Text

GROUP = 64  # texts handed to the engine at once, and kept together


Done = Callable[[int, Completion], None]  # called with each text that is finished


class Writer(Protocol):
    """What is asked of an engine; `paceline.LLM` is one."""

    def generate(
        self, prompts: list[list[int]], params: list[SamplingParams], *, on_done: Done | None = None
    ) -> list[Completion]: ...


# The texts of some numbers; the same numbers, the same texts.
Write = Callable[[Writer, Seq[int], Done], list[Text]]


def write_all(
    path: Path,
    mark: str,
    count: int,
    write: Write,
    engine: Callable[[], AbstractContextManager[Writer]],
    phase: Callable[[int, int], None],
) -> list[Text]:
    """The texts of numbers 0 to `count`: those in `path`, which holds those of the same `mark`, and the rest written now.

    `engine` is opened only if there is a rest.
    """
    groups = _read(path, mark)
    phase(min(count, GROUP * len(groups)), count)
    if GROUP * len(groups) < count:
        with disk_errors(path, "nothing was trained yet"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(line) + "\n" for line in ({"mark": mark}, *groups)))
        with engine() as writer, path.open("a", encoding="utf-8") as file:
            while (start := GROUP * len(groups)) < count:
                stop = min(start + GROUP, count)
                numbers = itertools.count(start + 1)
                texts = write(writer, range(start, stop), lambda i, text, n=numbers: phase(next(n), count))  # type: ignore[misc]
                groups.append([[list(t.tokens), t.counted] for t in texts])
                with disk_errors(path, f"{start} texts are kept"):
                    file.write(json.dumps(groups[-1]) + "\n")
                    file.flush()
    return [Text(t, tuple((a, b) for a, b in spans)) for group in groups for t, spans in group]


def _read(path: Path, mark: str) -> list[Any]:
    """The whole groups in a file of this mark; the last line of a killed run may be half of one."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines[1:] if lines and lines[0] == {"mark": mark} else []
