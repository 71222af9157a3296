"""What is known before the first request: what steps cost, and what the drafter is worth with this target.

Acceptance comes from the first of these that exists: the calibration file beside the drafter, what an earlier start has
kept, a self-test where it is cheap. `Startup.info` says which it was, and why there is none.

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
from paceline.control.adaptive import KnownPair
from paceline.control.cost_model import CostTable, unmeasured
from paceline.drafters.registry import NETWORKS
from paceline.engine.engine import EngineParts
from paceline.files import fingerprint
from paceline.startup import profile_store
from paceline.startup.calibration_file import FILE_NAME, Known, read_calibration
from paceline.startup.profiling import measure_steps
from paceline.startup.selftest import LIMIT, LONGEST, complaint, estimate, run_selftest

Say = Callable[[str], None]
MEASURING = 2.0  # seconds that it may take to measure costs


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


def start_up(config: EngineConfig, pair: Pair, say: Say) -> Startup:
    """Load or measure what the policy starts from. `say` gets one line for what a user should know."""
    known, problem = read_calibration(pair.drafter) if pair.drafter is not None else (None, "")
    if problem:
        say(problem)
    source = FILE_NAME
    out = Startup(unmeasured())
    out.info["cost_profile"] = "not measured: the draft length is fixed"
    if config.draft_tokens == "auto":
        kept = _kept(config, pair, known is None)
        out.table, out.info["cost_profile"] = kept.table, kept.said
        if known is None:
            known, source = kept.known, kept.source
    if pair.network is None:
        return out
    if known is None:
        out.info["acceptance"] = source if source != FILE_NAME else "assumed: nothing is measured"
        return out
    warning = complaint(known, pair.network)
    if warning:
        say(warning)
        out.info["drafter_warning"] = warning
    out.known = known.pairs(pair.network)
    out.info["acceptance"] = f"{' '.join(f'{a:.2f}' for a in known.acceptance)} by position, {source}"
    return out


@dataclass(frozen=True, slots=True)
class _Kept:
    table: CostTable
    said: str  # where the table comes from
    known: Known | None
    source: str  # where `known` comes from, or why there is none


def _kept(config: EngineConfig, pair: Pair, test: bool) -> _Kept:
    """The stored profile if it is of this machine, else a new one, which is then stored. `test`: acceptance, too."""
    begin = time.perf_counter()
    path, key, stored = None, _key(pair), None
    if config.profile_dir is not None and config.profile_dir != "none":
        path = profile_store.place(Path(config.profile_dir).expanduser(), pair.target, _settings(pair))
        stored = None if config.remeasure else profile_store.load(path, key)
    table = stored.table if stored is not None else measure_steps(pair.parts, MEASURING)
    if table is None:
        return _Kept(
            unmeasured(), "not measured: the context is too short", None, "assumed: nothing is measured"
        )
    said = f"{'measured' if stored is None else 'kept'}, {time.perf_counter() - begin:.2f} s"
    known, source = stored.known if stored is not None else None, "kept from an earlier self-test"
    fresh = stored is None
    if test and known is None and pair.network is not None:
        known, source = _test(config, pair, table)
        fresh = fresh or known is not None
    if path is None:
        said += "; not kept: no profile_dir"
    elif fresh:
        trouble = profile_store.save(profile_store.Kept(table, known), key, path)
        said += f"; not kept: {trouble}" if trouble else f"; kept in {path}"
    return _Kept(table, said, known, source)


def _test(config: EngineConfig, pair: Pair, table: CostTable) -> tuple[Known | None, str]:
    """(what the self-test found, its description), or (None, why there is nothing)."""
    limit, takes = LONGEST if config.remeasure else LIMIT, estimate(table)
    if takes > limit:
        return None, f"assumed: a self-test would take more than {takes:.0f} s, remeasure runs it"
    begin = time.perf_counter()
    tested = run_selftest(pair.parts, limit)
    seconds = time.perf_counter() - begin
    if tested is None:
        return None, f"assumed: the self-test saw too little in {seconds:.1f} s"
    return tested.known, f"self-test of {tested.drafts} drafts in {seconds:.2f} s"


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
