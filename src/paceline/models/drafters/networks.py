"""How a checkpoint of a network that drafts from the target's hidden states is looked at, whatever its kind."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paceline.checkpoints.foreign import drafter_kind
from paceline.checkpoints.loading import read_entries
from paceline.drafter_kinds import KINDS
from paceline.models.config import parse_target, read_config
from paceline.models.drafters.state_net import DrafterFiles, Fits, Network, NetworkKind


def _network(name: str) -> NetworkKind:
    network = importlib.import_module(f"paceline.models.drafters.{name}").NETWORK
    assert isinstance(network, NetworkKind)
    return network


NETWORKS: Mapping[str, NetworkKind] = MappingProxyType({name: _network(name) for name in KINDS})
PARSERS: Mapping[str | None, Callable[[Mapping[str, Any]], object]] = {  # None: of a target
    None: parse_target, **{name: kind.parse for name, kind in NETWORKS.items() if kind.parse is not None},
}  # fmt: skip
BESIDE = tuple(name for name, kind in KINDS.items() if kind.beside)  # own folders


def kind_of(folder: Path, target: Path | str | None) -> str | None:
    """Which of `KINDS`, made for one target, is in `folder`: also modules in the target's own. Raises LoadError."""
    raw = read_config(folder)
    kind = drafter_kind(raw)
    return own(folder, raw)[0] if kind is None and target is not None and Path(target) == folder else kind


def own(folder: Path, raw: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """(kind of the drafter inside a target's own files, what the files hold, or what the config names and they lack).

    Raises LoadError.
    """
    return _inside(read_entries(folder), raw)


def _inside(names: Iterable[str], raw: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """`own`, of the names of the tensors."""
    held = {name: kind.inside(names, raw) for name, kind in NETWORKS.items() if kind.inside is not None}
    holder = next((name for name, inside in held.items() if inside.holds), None)
    if holder is not None:
        return holder, held[holder].holds
    return None, next((inside.promised for inside in held.values() if inside.promised), None)


def plan_network(files: DrafterFiles, fits: Fits | None) -> Network:
    """What of a drafter's folder is to be loaded; a target's is looked at for its modules.

    Raises ConfigError, WeightsError and, for another target's drafter, PairError.
    """
    kind = drafter_kind(files.raw) or _inside(files.entries, files.raw)[0]
    if kind is None:  # of a target without any, the kind that such files usually hold says what is missing
        kind = next(name for name, network in NETWORKS.items() if network.inside is not None)
    return NETWORKS[kind].plan(files, fits)
