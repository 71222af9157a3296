"""What is known before the first request: the cost staircase, and what the drafter is worth with this target.

Acceptance comes from the first of these that exists: the calibration file beside the drafter, what an earlier start has
kept, a self-test where it is cheap. `Startup.info` says which it was, and why there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from paceline import __version__
from paceline.config import EngineConfig
from paceline.engine import profiles
from paceline.engine.acceptance import KINDS, Bins, Kind
from paceline.engine.calibration import FILE_NAME, Known, read_calibration
from paceline.engine.costs import Profile, default_profile
from paceline.engine.engine import EngineParts
from paceline.engine.selftest import LIMIT, LONGEST, complaint, estimate, run_selftest
from paceline.engine.stopwatch import measure_steps, steepness

Say = Callable[[str], None]
MEASURING = 2.0  # seconds that it may take to measure costs
DRIFT = 1.25  # a kept staircase is as steep as today's within this factor


@dataclass(frozen=True, slots=True)
class Pair:
    """What start-up looks at. `parts` holds only the network drafter, if there is one, as its default."""

    parts: EngineParts
    target: Path
    drafter: Path | None
    settings: Mapping[str, str]  # what else a measurement depends on: device, arithmetic, precision

    @property
    def kind(self) -> Kind | None:
        """Of the network drafter; the others are known well enough, or are strangers."""
        name = self.parts.default_drafter
        return next((kind for kind in KINDS if kind.sequential and kind.name == name), None)


@dataclass(slots=True)
class Startup:
    profile: Profile
    kinds: tuple[Kind, ...] = KINDS
    bins: dict[str, Bins] = field(default_factory=dict)
    info: dict[str, str] = field(default_factory=dict)

    def learn(self, kind: Kind, known: Known, source: str) -> None:
        """From now on `kind` is what was measured; acceptance far below it is alarming."""
        sampled = known.sampled
        new = replace(
            kind,
            prior=known.acceptance,
            sampled=sampled.acceptance if sampled is not None else (),
            known=True,
        )
        self.kinds = tuple(new if old.name == kind.name else old for old in self.kinds)
        if known.bins:
            self.bins[kind.law(sampled=False)] = known.bins
        if sampled is not None and sampled.bins:
            self.bins[kind.law(sampled=True)] = sampled.bins
        self.info["acceptance"] = f"{' '.join(f'{a:.2f}' for a in known.acceptance)} by position, {source}"


def start_up(config: EngineConfig, pair: Pair, say: Say) -> Startup:
    """Load or measure what the controller starts from. `say` gets one line for each thing that was ignored."""
    known, problem = read_calibration(pair.drafter) if pair.drafter is not None else (None, "")
    if problem:
        say(problem)
    source = FILE_NAME
    out = Startup(default_profile())
    out.info["cost_profile"] = "not measured: the draft length is fixed"
    if config.draft_tokens == "auto":
        kept = _kept(config, pair, known is None, say)
        out.profile, out.info["cost_profile"] = kept.profile, kept.said
        if known is None:
            known, source = kept.known, kept.source
    if pair.kind is None:
        return out
    if known is None:
        out.info["acceptance"] = source if source != FILE_NAME else "assumed: nothing is measured"
        return out
    warning = complaint(known, pair.kind)
    if warning:
        say(warning)
    out.learn(pair.kind, known, source)
    return out


@dataclass(frozen=True, slots=True)
class _Kept:
    profile: Profile
    said: str  # where the profile comes from
    known: Known | None
    source: str  # where `known` comes from, or why there is none


def _kept(config: EngineConfig, pair: Pair, test: bool, say: Say) -> _Kept:
    """The stored profile if it still holds, else a new one, which is then stored. `test`: acceptance is wanted too."""
    begin = time.perf_counter()
    path, key = None, _key(pair)
    profile, known = None, None
    if config.profile_dir is not None and config.profile_dir != "none":
        path = profiles.place(Path(config.profile_dir).expanduser(), pair.target, _settings(pair))
        if not config.remeasure:
            profile, known = _load(path, key, pair, say)
    fresh = profile is None
    profile = profile or measure_steps(pair.parts, pair.kind, MEASURING) or default_profile()
    if not profile.measured:
        return _Kept(profile, "not measured: the context is too short", None, "assumed: nothing is measured")
    said = f"{'measured' if fresh else 'kept'}, {time.perf_counter() - begin:.2f} s"
    source = "kept from an earlier self-test"
    if test and known is None and pair.kind is not None:
        known, source = _test(config, pair, pair.kind, profile)
        fresh = fresh or known is not None
    if path is None:
        said += "; not kept: no profile_dir"
    elif fresh:
        trouble = profiles.save(profiles.Kept(profile, known), key, path)
        said += f"; not kept: {trouble}" if trouble else f"; kept in {path}"
    return _Kept(profile, said, known, source)


def _load(path: Path, key: profiles.Key, pair: Pair, say: Say) -> tuple[Profile | None, Known | None]:
    """(costs, acceptance) that still hold. Costs that do not are no reason to doubt the acceptance."""
    stored, problem = profiles.load(path, key)
    if stored is not None:
        problem = _drifted(stored.profile, pair)
    if problem:
        say(problem)
    if stored is None:
        return None, None
    return None if problem else stored.profile, stored.known


def _test(config: EngineConfig, pair: Pair, kind: Kind, profile: Profile) -> tuple[Known | None, str]:
    """(what the self-test found, its description), or (None, why there is nothing)."""
    limit, takes = LONGEST if config.remeasure else LIMIT, estimate(profile)
    if takes > limit:
        return None, f"assumed: a self-test would take more than {takes:.0f} s, remeasure runs it"
    begin = time.perf_counter()
    tested = run_selftest(pair.parts, kind, limit)
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
        "machine": profiles.machine(pair.parts.target.device),
        "target": profiles.fingerprint(pair.target),
        "drafter": profiles.fingerprint(pair.drafter) if pair.drafter is not None else "none",
        "version": f"paceline {__version__}, torch {torch.__version__}",
    } | dict(pair.settings)


def _drifted(profile: Profile, pair: Pair) -> str:
    """What has changed, if nine rows cost another multiple of one row than they did. Else "": load slows both."""
    costs, now = profile.costs(), steepness(pair.parts, MEASURING / 4)
    then = costs.target(9) / costs.target(1)
    if now is None or 1 / DRIFT < now / then < DRIFT:
        return ""
    return (
        f"cost profile is ignored: 9 rows cost {now:.1f} times one row, it says {then:.1f}: measuring again"
    )
