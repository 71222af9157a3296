"""What an earlier start has kept of a pair, in lines for people: prices, acceptance, and what auto would do."""

from __future__ import annotations

from pathlib import Path

from paceline.control.cost_model import CostTable
from paceline.control.outlook import by_bytes, outlook, pays_from
from paceline.startup import profile_store
from paceline.startup.calibration_file import Known
from paceline.startup.profile_store import Kept

POSITIONS = 4


def describe_pair(
    folder: Path, target: Path, key: profile_store.Key, drafter: str, share: float
) -> dict[str, str]:
    """By the name of a line. `key`: what a profile in `folder` has to be of. `share`: of the target's bytes."""
    newest = profile_store.newest(folder, target, key)
    if newest is None:
        from_bytes = pays_from(by_bytes(share), "model")
        return {
            "prices": f"not measured yet, the first run does; by its bytes a drafted token takes {share:.2f} of a step",
            "auto": f"begins with drafts, to see what is kept: {_pays(from_bytes)}",
        }
    path, stored = newest
    out = {"prices": f"{_prices(stored.table, drafter)}; {path}"}
    if drafter not in stored.table.drafts:
        return out
    if stored.known is None:
        out["auto"] = f"begins with drafts, to see what is kept: {_pays(pays_from(stored.table, drafter))}"
        return out
    for name, known in (("greedy", stored.known), ("sampled", stored.known.sampled)):
        if known is not None:
            out[f"{name}"] = _promise(stored, known, drafter)
    return out


def _pays(share: float) -> str:
    return "nothing would pay for them" if share > 1.0 else f"they pay where more than {share:.0%} are"


def _prices(table: CostTable, drafter: str) -> str:
    steps = ", ".join(f"{1e3 * seconds:.1f}" for seconds in table.seconds)
    rows = ", ".join(map(str, table.rows))
    words = f"steps of {rows} rows take {steps} ms"
    if drafter in table.drafts:
        base, call, token = table.drafts[drafter]
        words += f", a drafted token {1e3 * (call + token):.1f}" + (
            f" and {1e3 * base:.1f} a round" if base > 1e-5 else ""
        )
    return words + ("" if table.trusted else "; NOT trusted, the next start measures again")


def _promise(stored: Kept, known: Known, drafter: str) -> str:
    promise = outlook(stored.table, drafter, known.acceptance)
    share = " ".join(f"{a:.2f}" for a in known.acceptance[:POSITIONS])
    does = (
        f"{promise.tokens} tokens a step, {promise.gain:.2f} times plain"
        if promise.tokens
        else "drafts nothing but bets"
    )
    return f"{share} kept by position, from {stored.drafts} drafts: {does}"
