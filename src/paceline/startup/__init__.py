"""What is known before the first request: what steps cost, and what the drafter is worth with this target.

Prices are measured, or those that an earlier start has kept. Acceptance comes from what earlier texts have shown here, or
from the calibration file beside the drafter. Where nothing is known the policy finds out by drafting. `Startup.info` says
which it was, and `Startup.keep` writes what was learnt for the next start.

Here belongs what is measured or read once. What is learnt while texts are written belongs to `control/`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from paceline import __version__
from paceline.config import EngineConfig
from paceline.control.adaptive import KnownPair, Learnt
from paceline.control.cost_model import CostTable, unmeasured
from paceline.drafters.registry import NETWORKS
from paceline.engine.engine import EngineParts
from paceline.files import fingerprint
from paceline.startup import profile_store
from paceline.startup.calibration_file import FILE_NAME, complaint, learnt_of, read_calibration
from paceline.startup.profile_store import Kept
from paceline.startup.profiling import measure_steps

Say = Callable[[str], None]
MEASURING = 2.0  # seconds that it may take to measure costs, where a step is short
UNKNOWN = "not known yet: the first text finds out by drafting"


@dataclass(frozen=True, slots=True)
class Pair:
    """What start-up looks at. `parts` holds only the network drafter, if there is one, as its default."""

    parts: EngineParts
    target: Path
    drafter: Path | None
    settings: Mapping[str, str]  # what else a measurement depends on: device, arithmetic, precision

    @property
    def network(self) -> str | None:
        name = self.parts.default_drafter
        return name if name in NETWORKS else None


@dataclass(slots=True)
class Startup:
    table: CostTable
    known: dict[tuple[str, bool], KnownPair] = field(default_factory=dict)
    info: dict[str, str] = field(default_factory=dict)
    # Write what was learnt for the next start. It raises nothing: then that is measured again
    keep: Callable[[Learnt], None] = lambda learnt: None


def start_up(config: EngineConfig, pair: Pair, say: Say) -> Startup:
    """Load or measure what the policy starts from. `say` gets one line for what a user should know."""
    known, problem = read_calibration(pair.drafter) if pair.drafter is not None else (None, "")
    if problem:
        say(problem)
    source = FILE_NAME
    out = Startup(unmeasured())
    out.info["cost_profile"] = "not measured: the draft length is fixed"
    if config.draft_tokens == "auto":
        stored = _Stored.of(config, pair)
        out.table, out.info["cost_profile"] = stored.table()
        if stored.kept is not None and stored.kept.known is not None:
            known, source = stored.kept.known, f"kept from {stored.kept.drafts} drafts of earlier texts"
        out.keep = stored.keep
    if pair.network is None:
        return out
    if known is None:
        out.info["acceptance"] = UNKNOWN
        return out
    warning = complaint(known, pair.network)
    if warning:
        say(warning)
        out.info["drafter_warning"] = warning
    out.known = known.pairs(pair.network)
    out.info["acceptance"] = f"{' '.join(f'{a:.2f}' for a in known.acceptance[:SHOWN])} by position, {source}"
    return out


SHOWN = 6  # positions


@dataclass(slots=True)
class _Stored:
    """The profile of a pair: what an earlier start has kept, and where."""

    pair: Pair
    path: Path | None  # None: nothing is to be kept
    key: dict[str, str]
    kept: Kept | None = None  # of this machine and these weights

    @classmethod
    def of(cls, config: EngineConfig, pair: Pair) -> _Stored:
        out = cls(pair, None, _key(pair))
        if config.profile_dir is not None and config.profile_dir != "none":
            folder = Path(config.profile_dir).expanduser()
            out.path = profile_store.place(folder, pair.target, _settings(pair))
            out.kept = None if config.remeasure else profile_store.load(out.path, out.key)
        return out

    def table(self) -> tuple[CostTable, str]:
        """(prices, where they come from). Those that were not trusted are measured again."""
        begin, stored = time.perf_counter(), self.kept
        if stored is not None and stored.table.trusted:
            return stored.table, f"kept, {time.perf_counter() - begin:.2f} s"
        table = measure_steps(self.pair.parts, MEASURING)
        if table is None:
            self.path = None
            return unmeasured(), "not measured: the context is too short"
        origin = f"measured, {time.perf_counter() - begin:.2f} s"
        if not table.trusted:
            origin += "; not trusted: too few steps, or a busy machine"
        self.kept = Kept(table) if stored is None else Kept(table, stored.known, stored.drafts)
        return table, origin + self._save()

    def keep(self, learnt: Learnt) -> None:
        """What texts have shown takes the place of what was known."""
        name, before = self.pair.network, self.kept
        if before is None:
            return
        known, drafts = before.known, before.drafts
        if name is not None:
            known = learnt_of(learnt, name, known)
            drafts += learnt.drafts.get(name, 0)
        self.kept = Kept(learnt.table, known, drafts)
        if self.kept != before:
            self._save()

    def _save(self) -> str:
        """Where it is kept, or why not."""
        if self.path is None:
            return "; not kept: no profile_dir"
        assert self.kept is not None, "there is something to keep"
        trouble = profile_store.save(self.kept, self.key, self.path)
        return f"; not kept: {trouble}" if trouble else f"; kept in {self.path}"


def _settings(pair: Pair) -> list[str]:
    """What a user chooses, so that every choice has a file of its own."""
    drafter = str(pair.drafter.resolve()) if pair.drafter is not None else pair.parts.default_drafter
    return [drafter, *(f"{name}={value}" for name, value in sorted(pair.settings.items()))]


def _key(pair: Pair) -> dict[str, str]:
    """What may not have changed since. The settings are in the file's name, and here in case it was copied."""
    return {
        "machine": profile_store.machine(pair.parts.target.device),
        "target": fingerprint(pair.target),
        "drafter": fingerprint(pair.drafter) if pair.drafter is not None else "none",
        "version": f"paceline {__version__}, torch {torch.__version__}",
    } | dict(pair.settings)
