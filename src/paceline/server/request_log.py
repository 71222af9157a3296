"""One line for each request that asks for something: what it was, what it took, how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.core import Delta

Write = Callable[[str], None]
QUIET = ("GET", "HEAD", "OPTIONS")  # pages, health checks and scrapes would be most of the lines
_SHOWN = 100  # characters of a path


@dataclass(slots=True)
class Told:
    """What became of one generation; filled while it goes on."""

    id: str = ""
    model: str = ""
    prompt: int = 0  # tokens
    output: int = 0
    drafted: int = 0
    accepted: int = 0
    finish: dict[str, None] = field(default_factory=dict)  # reasons of its texts, in order

    def delta(self, delta: Delta) -> None:
        self.output += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.finish[delta.finish_reason] = None
        if delta.stats is not None:
            self.drafted += delta.stats.drafted
            self.accepted += delta.stats.accepted


def line(method: str, path: str, status: int, seconds: float, told: Told) -> str:
    """Times are local. Whatever strangers put into a path, it stays on this line."""
    shown = path[:_SHOWN].encode("unicode_escape").decode()
    out = f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {method} {shown} {status} {seconds:.3f} s"
    if not told.id:
        return out
    share = f"{told.accepted / told.drafted:.2f}" if told.drafted else "-"
    return (
        f"{out} id={told.id} model={told.model} prompt={told.prompt} output={told.output} "
        f"finish={','.join(told.finish) or '-'} acceptance={share}"
    )
