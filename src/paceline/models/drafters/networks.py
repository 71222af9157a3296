"""Which networks draft from the target's hidden states, and how a checkpoint of one is looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoints.foreign import Kind, drafter_kind
from paceline.checkpoints.loading import read_entries
from paceline.models.config import parse_target, read_config
from paceline.models.drafters import heads, mtp
from paceline.models.drafters.dflash import parse_dflash, plan_dflash
from paceline.models.drafters.eagle3 import parse_eagle3, plan_eagle3
from paceline.models.drafters.mtp import parse_mtp, plan_mtp
from paceline.models.drafters.state_net import Fits, Network

PLANS = {"eagle3": plan_eagle3, "mtp": plan_mtp, "dflash": plan_dflash, "heads": heads.plan_heads}
PARSERS: Mapping[Kind | None, Callable[[Mapping[str, Any]], object]] = {  # by kind of drafter; None: of a target
    "eagle3": parse_eagle3, "mtp": parse_mtp, "dflash": parse_dflash, None: parse_target,
}  # fmt: skip


def kind_of(folder: Path, target: Path | str | None) -> Kind | None:
    """Which kind of drafter, made for one target, is in `folder`: also modules in the target's own. Raises LoadError."""
    raw = read_config(folder)
    kind = drafter_kind(raw)
    return own(folder, raw)[0] if kind is None and target is not None and Path(target) == folder else kind


def own(folder: Path, raw: Mapping[str, Any]) -> tuple[Kind | None, str | None]:
    """(kind of what a target's own files hold to draft with, what they hold or what its config promises in vain).

    Raises LoadError.
    """
    names = read_entries(folder)
    (modules, promise), (count, other) = mtp.inside(names, raw), heads.inside(names, raw)
    if modules:
        short = f", where {promise}: another download of this model may hold the rest" if promise else ""
        return "mtp", f"{modules} module{'s' * (modules > 1)} for multi-token prediction{short}"
    if count:
        return "heads", f"{count} parallel head{'s' * (count > 1)}"
    return None, promise or other


def plan_network(folder: Path, raw: Mapping[str, Any], fits: Fits | None, names: tuple[str, str]) -> Network:
    """What of `folder` is to be loaded; a target's is looked at for its modules. `names` are of drafter and target.

    Raises ConfigError, WeightsError and, for another target's drafter, PairError.
    """
    return PLANS[drafter_kind(raw) or own(folder, raw)[0] or "mtp"](folder, raw, fits, names)
