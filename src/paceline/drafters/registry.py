"""Drafter kinds by name. A third party adds one through the entry-point group `paceline.drafters`.

An entry point names a factory `make(target, cache) -> Drafter`; its contract tests are in paceline/drafters/contract.py.
"""

from __future__ import annotations

import difflib
import os
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from paceline.drafter_kinds import KINDS
from paceline.drafters.base import Drafter
from paceline.drafters.block import BlockDrafter, ChainedBlockDrafter, PathDrafter
from paceline.drafters.chain import ChainDrafter
from paceline.drafters.heads import HeadsDrafter
from paceline.drafters.slots import SlotsDrafter
from paceline.drafters.states import MemoryDrafter, StateDrafter
from paceline.errors import LoadError, UsageError, shown
from paceline.kv.cache import KVCache
from paceline.models.base import Target
from paceline.models.drafters.base import (
    FINAL,
    BlockNet,
    ChainedNet,
    ChainNet,
    ParallelNet,
    PathNet,
    SeeingNet,
    SlotsNet,
    TappedNet,
)

LOOKAHEAD = ("lookahead", "lookahead+ngram")
NETWORKS = (*KINDS, "model")  # kinds that compute something
BUILT_IN = (
    "auto",
    "none",
    "ngram",
    *LOOKAHEAD,
    *(name for kind in NETWORKS for name in (kind, f"{kind}+ngram")),
)
PACKAGED = ("demo", "smollm2")  # models that need no folder, see hub/resolve.py
GROUP = "paceline.drafters"


def third_party() -> dict[str, EntryPoint]:
    """Installed drafter kinds that are not ours."""
    return {point.name: point for point in entry_points(group=GROUP)}


def third_party_taps(name: str) -> tuple[int, ...]:
    """Layers of the target that an installed drafter wants the hidden states of. Raises LoadError as below."""
    taps = getattr(_factory(name), "taps", ())
    return tuple(tap for tap in taps if tap != FINAL)


def _factory(name: str) -> Any:
    try:
        return third_party()[name].load()
    except Exception as error:
        raise LoadError(
            f"the drafter {name!r} could not be imported ({type(error).__name__}: {error}): update it"
        ) from error


def load_third_party(name: str, target: Target, cache: KVCache) -> Drafter:
    """Make an installed drafter. Raises LoadError if it cannot be imported or made."""
    try:
        drafter: Drafter = _factory(name)(target, cache)
    except LoadError:
        raise
    except Exception as error:
        raise LoadError(
            f"the drafter {name!r} could not be made ({type(error).__name__}: {error}): update it"
        ) from error
    if not isinstance(drafter, Drafter):
        raise LoadError(
            f"the drafter {name!r} is a {type(drafter).__name__}: derive its class from paceline.drafters.base.Drafter"
        )
    if missing := {*drafter.taps} - {FINAL, *target.tapped}:
        raise LoadError(
            f"the drafter {name!r} wants hidden states after layer {min(missing)}, which its factory did not announce: "
            "give the factory an attribute `taps`"
        )
    return drafter


def over(name: str, net: TappedNet, cache: KVCache) -> MemoryDrafter:
    """The drafter that works as a network wants it, with that one's own cache."""
    if net.parallel:
        return HeadsDrafter(name, cast(ParallelNet, net), cache)
    if not net.shift and getattr(net, "chained", False):
        return ChainedBlockDrafter(name, cast(ChainedNet, net), cache)
    if not net.shift and hasattr(net, "follows"):
        return PathDrafter(name, cast(PathNet, net), cache)
    if not net.shift:
        return BlockDrafter(name, cast(BlockNet, net), cache)
    if net.shift > 1:
        return ChainDrafter(name, cast(ChainNet, net), cache)
    if hasattr(net, "mask_states"):
        return SlotsDrafter(name, cast(SlotsNet, net), cache)
    drafter = StateDrafter(name, cast(SeeingNet, net), cache)
    drafter.blind = not cast(SeeingNet, net).sees
    return drafter


def check_kind(name: str) -> str:
    """The drafter's name, a combination as it is listed in BUILT_IN: `ngram+NAME` is `NAME+ngram`.

    Raises UsageError, with the closest known kind, for a name that is neither a kind nor a path or hub id.
    """
    known = [*BUILT_IN, *third_party()]
    if name in known or name in PACKAGED or "/" in name or "." in name or "\\" in name:
        return name
    turned = "+".join(reversed(name.split("+")))
    if turned in BUILT_IN:
        return turned
    if name and os.path.exists(os.path.expanduser(name)):
        return name
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
    raise UsageError(f"unknown drafter {shown(name)}: {hint} (a folder needs a slash, e.g. ./folder)")
