"""What a check found, as a value that prints as text and as JSON. Pure: no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

INTERRUPTED = "interrupted"
Outcome = Literal["holds", "refuted", "not shown"]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where a text with a drafter left the text without one."""

    case: str
    position: int  # of the first token that differs, from the start of the answer
    plain_token: int
    other_token: int
    plain_text: str
    other_text: str
    gap: (
        float | None
    )  # of the two best scores of the plain run there, in logits, noise included; None: not one choice
    noise_floor: float  # how far logits move on this machine with the number of rows
    kind: Literal["near-tie", "bug"]
    what: str = ""  # what differs, if it is not a token


@dataclass(frozen=True, slots=True)
class Crash:
    """What was raised in the middle of a test, and over what."""

    error: str
    place: str  # the last line of ours on the way to it
    where: Mapping[str, str]  # drafter, batch, temperature, prompt
    kind: Literal["memory", "bug"]
    trace: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was tested. `counts` are what the words are worth: how much was compared."""

    name: str
    outcome: Outcome
    words: str
    counts: Mapping[str, float] = field(default_factory=dict)
    divergence: Divergence | None = None
    covered: Mapping[str, str] = field(default_factory=dict)  # over what it was tested
    crash: Crash | None = None

    def crashed(self, crash: Crash) -> Finding:
        """The same, ended by a crash. Short of memory it is not shown, everything else refutes."""
        outcome: Outcome = "refuted" if crash.kind == "bug" or self.outcome == "refuted" else "not shown"
        what = "the memory did not suffice" if crash.kind == "memory" else "the engine raised"
        before = f"{self.words}; then " if self.outcome == "refuted" else ""
        words = f"{before}{what}: only what was compared before is counted"
        return replace(self, outcome=outcome, words=words, crash=crash)

    def unfinished(self) -> Finding:
        """The same, ended early: nothing is shown by half a test, but a difference stays one."""
        if self.outcome == "refuted":
            return self
        return replace(
            self, outcome="not shown", words="incomplete: only what was compared so far is counted"
        )


@dataclass(frozen=True, slots=True)
class Certificate:
    """All findings of one check, for one target, its drafters, precision and machine."""

    subject: Mapping[str, Any]
    findings: tuple[Finding, ...]
    provenance: Mapping[str, Any]
    ended: str = ""  # why it ended early, if it did

    @property
    def contract(self) -> str:
        """The strongest promise that was shown."""
        shown = {f.name: f.outcome for f in self.findings}
        refuted = [f.name for f in self.findings if f.outcome == "refuted"]
        if refuted:
            return f"none: refuted is {', '.join(refuted)}"
        tokens = shown.get("token identity")
        if tokens == "holds" and shown.get("bit-exact forward") == "holds":
            return "bit-exact: a row's result does not depend on the rows beside it, and all texts are token-identical"
        if tokens == "holds":
            return (
                "token-identical: all texts compared were equal, though the forward is not bit-exact by rows"
            )
        return "none: token identity was not shown"

    @property
    def holds(self) -> bool:
        """Every promise was tested and none refuted. Bit-exactness is a stronger promise, not a needed one."""
        needed = [f for f in self.findings if f.name != "bit-exact forward"]
        return bool(needed) and not self.ended and all(f.outcome == "holds" for f in needed)

    @property
    def interrupted(self) -> bool:
        """Nothing was refuted until the user ended it."""
        return self.ended == INTERRUPTED and all(f.outcome != "refuted" for f in self.findings)

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = _plain({"holds": self.holds, "contract": self.contract, **asdict(self)})
        return out

    def to_text(self, *, verbose: bool = False) -> str:
        """`verbose`: with all that was counted, also of what holds. The last line is for who reads nothing else."""
        out = [f"paceline check: {self._verdict()}"]
        out += [f"  {key}: {value}" for key, value in self.subject.items()]
        out.append(f"  contract: {self.contract}")
        for finding in self.findings:
            out += ["", f"[{finding.outcome}] {finding.name}", f"  {finding.words}"]
            if finding.outcome == "holds" and not verbose:
                continue
            out += [f"  {key}: {_number(value)}" for key, value in finding.counts.items()]
            out += [f"  {key}: {value}" for key, value in finding.covered.items()]
            if finding.divergence:
                out += _describe(finding.divergence)
            if finding.crash:
                out += _tell(finding.crash)
        if self.ended:
            out += ["", f"Ended early ({self.ended}): what was not tested is not shown."]
        out += ["", self._plainly()]
        return "\n".join(out)

    def _plainly(self) -> str:
        compared = sum(f.counts.get("tokens compared", 0) for f in self.findings)
        if self.holds:
            return f"Speculation changes nothing here: {compared:,.0f} tokens were compared, and every one was the same."
        if any(f.name == "distribution of typical" for f in self.findings):
            return "This rule is lossy: leave --verify away, and the text is the model's own."
        if any(f.outcome == "refuted" for f in self.findings):
            return (
                "Speculation changes what is written here: use --drafter none, and report what stands above."
            )
        return "Nothing was found that speculation changes, but not all was tried: let it run to its end."

    def _verdict(self) -> str:
        if self.holds:
            return "HOLDS"
        if any(f.outcome == "refuted" for f in self.findings):
            return "DOES NOT HOLD: REFUTED"
        return (
            f"DOES NOT HOLD: INCOMPLETE ({self.ended})" if self.ended else "DOES NOT HOLD: not all was shown"
        )


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.3g}"


def _plain(value: Any) -> Any:
    """`value` with None for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _describe(d: Divergence) -> list[str]:
    judged = (
        "a numerical near-tie: the scores differ by less than row counts move them; use float32 or the native kernels"
        if d.kind == "near-tie"
        else "a bug: no rounding on this machine moves scores that far; please report it with this certificate"
    )
    gap = "" if d.gap is None else f"gap of the two best scores of the plain run: {d.gap:.3g}; "
    return [
        f"  first divergence: {d.case}, token {d.position}: {d.plain_token} without, {d.other_token} with the drafter",
        *([f"    {d.what}"] if d.what else []),
        f"    without: ...{d.plain_text!r}",
        f"    with:    ...{d.other_text!r}",
        f"    {gap}rows move scores by up to {d.noise_floor:.3g}",
        f"    this is {judged}",
    ]


def _tell(crash: Crash) -> list[str]:
    if crash.kind == "memory":
        then = "give it less to do: lower --max-batch or --max-model-len, or use --quantize int8"
    elif crash.where.get("drafter") == "none":
        then = (
            "plain decoding itself fails: check again with --no-native, and report it with this certificate"
        )
    else:
        then = "decode with --drafter none until it is repaired, and report it with this certificate"
    return [
        f"  raised: {crash.error}",
        *([f"    in: {crash.place}"] if crash.place else []),
        *(f"    {key}: {value}" for key, value in crash.where.items()),
        f"  next: {then} (--json FILE keeps the whole traceback)",
    ]
