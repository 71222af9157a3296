"""`paceline check`: the proof of losslessness for this target, drafter, precision and machine."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli import INTERRUPTED
from paceline.cli.options import (
    FROM_ENVIRONMENT,
    TARGET,
    Command,
    apply,
    engine_options,
    engine_values,
    one_target,
    sampling_options,
)
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.check.certificate import Certificate
    from paceline.check.proof import Plan
    from paceline.check.state_file import StateFile
    from paceline.core import SamplingParams
    from paceline.llm import LLM


class Seconds(click.FloatRange):
    """More than 0; `nan` is no time, and would compare nothing."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is no number of seconds", param, ctx)
        return number


@click.command(
    cls=Command,
    own="More of the proof",
    first=("drafters", "quick", "tokens", "seconds", "verbose", "json_path", "quantize", "max_model_len"),
    epilog=FROM_ENVIRONMENT,
)
@apply(TARGET)
@click.option(
    "--drafter",
    "drafters",
    multiple=True,
    metavar="NAME",
    help="What to check, as for `paceline run`; may be given several times. Default: auto, on demo also model+ngram.",
)
@click.option("--quick", is_flag=True, help="Under a minute on demo: fewer tokens and texts.")
@click.option(
    "--tokens", type=click.IntRange(min=1), help="Compare at least that many tokens (default 100,000)."
)
@click.option("--seconds", type=Seconds(min=0, min_open=True), help="Give token identity at most that long.")
@click.option(
    "--state",
    "state_path",
    metavar="FILE",
    help="Keep there how far token identity has come, and go on from it: so --tokens can be the work of several nights.",
)
@click.option(
    "--processes",
    type=click.IntRange(min=2),
    metavar="N",
    help="Also start N processes, one after the other, that load the models anew, and compare their bits; 11 go through "
    "all circumstances. Needs memory for two loaded targets.",
)
@click.option(
    "--verify",
    type=click.Choice(["match", "typical"]),
    default="match",
    help="typical: measure how far this lossy rule is from the target; it is never certified.",
)
@apply(sampling_options("check"))
@click.option("-v", "--verbose", is_flag=True, help="All that was counted, also of what holds.")
@click.option("--json", "json_path", metavar="FILE", help="Also write the certificate as JSON.")
@apply(engine_options("check"))
def command(
    target: str | None, named: str | None, drafters: tuple[str, ...], quick: bool, tokens: int | None,
    seconds: float | None, state_path: str | None, processes: int | None, json_path: str | None, verbose: bool,
    verify: str, typical_epsilon: float | None, typical_delta: float | None, **values: Any,
) -> None:  # fmt: skip
    """Prove, or refute, on this machine that speculation with TARGET changes no token.

    \b
    1. Bits: is a row's result independent of the rows and chunks it is computed with?
    2. Token identity (match): every text with a drafter against the one without, token by token.
    3. Drafts: does every drafter draft as from a clean start?
    4. Distribution (reject, block): chi-squared of sampled texts against the target's exact distribution.
    5. Processes (--processes 11): do fresh processes compute the same bits of logits, soft tokens, drafts and texts:
       with other threads, under load, after pictures, preemption and a killed one, and after a stop?

    Prints a certificate, in short or with -v, also of a check that broke or was interrupted (Ctrl-C). The exit code is 0
    only if everything that was promised was shown, 1 if something was refuted or not shown, 130 after Ctrl-C.
    """
    target = one_target(target, named)
    for path in (json_path, state_path):
        _writable(path)
    names = drafters or (("auto", "model+ngram") if target == "demo" else ("auto",))
    lossy = _lossy(verify, {"typical_epsilon": typical_epsilon, "typical_delta": typical_delta})
    if lossy is not None and processes is not None:
        raise UsageError("--processes compares what match writes: leave it out, or --verify typical")
    plan = _plan(quick, tokens, seconds)
    plan = replace(plan, lossy=lossy, processes=processes or 0, state=_state(state_path, lossy))
    certificate = _check(target, names, plan, values)
    click.echo(certificate.to_text(verbose=verbose))
    if state_path is not None and certificate.interrupted:
        click.echo(f"Give the same command again: it goes on from {state_path}.", err=True)
    if json_path is not None:
        from paceline.bench.report import write

        write(
            Path(json_path),
            json.dumps([certificate.to_json()], indent=1, default=str, allow_nan=False) + "\n",
        )
    if not certificate.holds:
        sys.exit(INTERRUPTED if certificate.interrupted else 1)


def _writable(name: str | None) -> None:
    """Raise UsageError before the work is done, not after it."""
    if name is None:
        return
    path = Path(name).resolve()
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {name}: its folder does not exist")
    if path.exists() and not path.is_file():
        raise UsageError(f"cannot write {name}: it is no file, name one in a folder")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"cannot write {name}: its folder may not be written to")


def _state(path: str | None, lossy: SamplingParams | None) -> StateFile | None:
    from paceline.check.state_file import StateFile

    if path is None:
        return None
    if lossy is not None:
        raise UsageError("--state keeps what match compares: leave it out, or --verify typical")
    return StateFile(Path(path))


def _lossy(verify: str, values: dict[str, float | None]) -> SamplingParams | None:
    """What is measured instead of the proofs. Raises UsageError for thresholds without their rule."""
    from paceline.core import SamplingParams

    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    if verify == "typical":
        return SamplingParams(verify="typical", **given)
    if given:
        raise UsageError(f"{', '.join(given)} belongs to the rule typical: give --verify typical, too")
    return None


def _plan(quick: bool, tokens: int | None, seconds: float | None) -> Plan:
    from paceline.check.proof import FULL, QUICK

    plan = QUICK if quick else FULL
    effort = replace(plan.effort, tokens=tokens or plan.effort.tokens, seconds=seconds or plan.effort.seconds)
    return replace(plan, effort=effort)


def _check(target: str, drafters: tuple[str, ...], plan: Plan, values: dict[str, Any]) -> Certificate:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from paceline.check import loading
    from paceline.check.again import Order
    from paceline.check.proof import prove
    from paceline.provenance import provenance

    options = {"max_model_len": 1536} | engine_values(values)
    subject = loading.load(target, drafters, lambda line: click.echo(line, err=True), options, workload)
    order = Order(target, drafters, options, subject.prompts[:4])
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("loading", total=1.0)
        command = "paceline " + " ".join(sys.argv[1:])
        say = _percents(plan.state) if not progress.console.is_terminal else lambda what, share: None

        def report(what: str, share: float) -> None:
            progress.update(task, description=what, completed=share)
            say(what, share)

        return prove(subject, plan, provenance(command), report, order)


def _percents(state: StateFile | None) -> Callable[[str, float], None]:
    """A line for each percent of a check over nights, where nobody sees a bar. Others are over soon, and say nothing."""
    told: set[tuple[str, int]] = set()

    def say(what: str, share: float) -> None:
        now = (what, int(share * 100))
        if state is not None and now not in told:
            told.add(now)
            click.echo(f"{what} {share:4.0%}", err=True)

    return say


def workload(llm: LLM, name: str, longest: int) -> list[list[int]]:
    """Six prompts of a workload, at most `longest` tokens long."""
    from paceline.bench.workloads import Bounds, prompts

    bounds = Bounds(llm.engine.state.target.vocab_size, longest, llm.tokenizer.special_ids)
    return [prompt.tokens for prompt in prompts(name, llm.tokenizer, bounds, 6)]
