"""Which networks draft from the target's hidden states, and how a checkpoint of one is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoints.foreign import Kind, drafter_kind
from paceline.checkpoints.loading import read_entries
from paceline.models.config import parse_target, read_config
from paceline.models.drafters import heads, mtp
from paceline.models.drafters.dflash import parse_dflash, plan_dflash
from paceline.models.drafters.dflash2 import parse_dflash2, plan_dflash2
from paceline.models.drafters.dspark import parse_dspark, plan_dspark
from paceline.models.drafters.eagle3 import parse_eagle3, plan_eagle3
from paceline.models.drafters.mtp import parse_mtp, plan_mtp
from paceline.models.drafters.peagle import parse_peagle, plan_peagle
from paceline.models.drafters.state_net import DrafterFiles, Fits, Network

Plan = Callable[[DrafterFiles, Fits | None], Network]


@dataclass(frozen=True, slots=True)
class NetworkKind:
    """One kind of network. How its config is recognised stands in `SIGNS` of checkpoints/foreign.py."""

    plan: Plan  # what of a folder is to be loaded
    parse: Callable[[Mapping[str, Any]], object] | None = None  # of a folder of its own; None: it has none


NETWORKS: Mapping[Kind, NetworkKind] = {
    "eagle3": NetworkKind(plan_eagle3, parse_eagle3),
    "mtp": NetworkKind(plan_mtp, parse_mtp),
    "dflash": NetworkKind(plan_dflash, parse_dflash),
    "peagle": NetworkKind(plan_peagle, parse_peagle),
    "dflash2": NetworkKind(plan_dflash2, parse_dflash2),
    "dspark": NetworkKind(plan_dspark, parse_dspark),
    "heads": NetworkKind(heads.plan_heads),
}
PARSERS: Mapping[Kind | None, Callable[[Mapping[str, Any]], object]] = {  # None: of a target
    None: parse_target, **{name: kind.parse for name, kind in NETWORKS.items() if kind.parse is not None},
}  # fmt: skip
BESIDE = tuple(
    name for name, kind in NETWORKS.items() if kind.parse is not None and name != "mtp"
)  # own folders


def kind_of(folder: Path, target: Path | str | None) -> Kind | None:
    """Which kind of drafter, made for one target, is in `folder`: also modules in the target's own. Raises LoadError."""
    raw = read_config(folder)
    kind = drafter_kind(raw)
    return own(folder, raw)[0] if kind is None and target is not None and Path(target) == folder else kind


def own(folder: Path, raw: Mapping[str, Any]) -> tuple[Kind | None, str | None]:
    """(kind of the drafter inside a target's own files, what the files hold, or what the config names and they lack).

    Raises LoadError.
    """
    return _inside(read_entries(folder), raw)


def _inside(names: Iterable[str], raw: Mapping[str, Any]) -> tuple[Kind | None, str | None]:
    """`own`, of the names of the tensors."""
    (modules, promise), (count, other) = mtp.inside(names, raw), heads.inside(names, raw)
    if modules:
        short = f", where {promise}: another download of this model may hold the rest" if promise else ""
        return "mtp", f"{modules} module{'s' * (modules > 1)} for multi-token prediction{short}"
    if count:
        return "heads", f"{count} parallel head{'s' * (count > 1)}"
    return None, promise or other


def plan_network(files: DrafterFiles, fits: Fits | None) -> Network:
    """What of a drafter's folder is to be loaded; a target's is looked at for its modules.

    Raises ConfigError, WeightsError and, for another target's drafter, PairError.
    """
    kind = drafter_kind(files.raw) or _inside(files.entries, files.raw)[0] or "mtp"
    return NETWORKS[kind].plan(files, fits)
