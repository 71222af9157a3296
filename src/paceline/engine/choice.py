"""What `auto` has decided for some rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.engine.budget import Look, Plan
from paceline.engine.fixed import Limit


@dataclass(slots=True)
class Choice:
    """What was decided for some rows, and until which step it holds."""

    ids: list[int]
    plans: dict[str, Plan]
    limits: dict[str, dict[int, int]]  # by kind: tokens that a row may get of it
    out: list[Limit]  # by row, where nothing is looked up
    caps: dict[int, int]  # rows whose length is ours to choose, and their most
    rows: int  # target rows that run whatever is drafted
    looks: dict[str, Look] = field(default_factory=dict)  # kinds that can be looked up, and would pay
    asked: dict[int, int] = field(default_factory=dict)  # by row: tokens of a kind that drafts one by one
    look: int = 0  # the step before which nothing has to be looked up
    looked: bool = False  # in this step
    until: int = 0
    hold: int = 0  # steps that it holds though it drafts
    probes: int = 0  # steps that its probes may still last
    trial: bool = False  # it drafts to see what that costs
    teaches: bool = True  # its steps tell what steps take
