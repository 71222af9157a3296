"""`paceline bench`: whether speculation helps on this machine, for this target, its drafters, lengths and batches."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import (
    FROM_ENVIRONMENT,
    TARGET,
    Command,
    Value,
    apply,
    engine_options,
    engine_values,
    one_target,
)
from paceline.config import EngineConfig
from paceline.errors import UsageError
from paceline.options import rows_of

if TYPE_CHECKING:
    from paceline.bench.runner import Bench, Run
    from paceline.bench.table import Line
    from paceline.bench.workloads import Prompt
    from paceline.engine.engine import Engine
    from paceline.engine.forced import ForcedAcceptance

LENGTH = next(row for row in rows_of(EngineConfig) if row.name == "draft_tokens")
WORKLOADS = ("code", "prose", "edit", "dictated", "json", "random", "long")
TOUCHED = 1 << 30  # bytes of the K/V cache that are backed with memory before anything is measured
QUICK: dict[str, Any] = {
    "workloads": ("code", "json", "random"), "batches": (1, 4), "temperatures": (0.0,), "lengths": (4, "auto"),
    "rounds": 4, "tokens": 64, "seconds": 40.0, "min_seconds": 0.25, "within": float("inf"),
}  # fmt: skip
FULL: dict[str, Any] = {
    "workloads": WORKLOADS, "batches": (1, 4, 16), "temperatures": (0.0, 0.8), "lengths": (1, 2, 4, 7, "auto"),
    "rounds": 6, "tokens": 96, "seconds": float("inf"), "min_seconds": 0.5,
    "within": float("inf"),
}  # fmt: skip


@click.command(
    cls=Command,
    own="More of what is measured",
    first=("drafter", "quick", "workloads", "batches", "temperatures", "lengths", "rounds", "html_path"),
    epilog=FROM_ENVIRONMENT,
)
@apply(TARGET)
@click.option(
    "--drafter", default="auto", show_default=True, help="What is held against none, as for `paceline run`."
)
@click.option(
    "-w", "--workload", "workloads", multiple=True, type=click.Choice(WORKLOADS), help="Default: all of them."
)
@click.option(
    "-b", "--batch", "batches", multiple=True, type=click.IntRange(1, 256), help="Default: 1, 4 and 16."
)
@click.option(
    "-t",
    "--temperature",
    "temperatures",
    multiple=True,
    type=click.FloatRange(0, 100),
    help="Default: 0, 0.8.",
)
@click.option(
    "-k",
    "--draft-tokens",
    "lengths",
    multiple=True,
    type=Value(LENGTH, "0..16|auto"),
    help="Default: 1, 2, 4, 7 and auto.",
)
@click.option("--rounds", type=click.IntRange(min=1), help="Repeats of every cell, interleaved (default 6).")
@click.option(
    "--tokens", type=click.IntRange(min=2), help="Tokens of a text: half as many to all of them (default 96)."
)
@click.option(
    "--min-seconds",
    type=click.FloatRange(min=0),
    help="Where a text is done the next begins, until a measurement has lasted that long (default 0.5, --quick: 0.25).",
)
@click.option(
    "--within",
    type=click.FloatRange(min=0, max=1, min_open=True),
    help="Further rounds of what is not known that well, at most 20 times --rounds. 0.01: ratios to within 1% (95%).",
)
@click.option(
    "--seconds", type=click.FloatRange(min=0, min_open=True), help="Begin nothing new after that long."
)
@click.option(
    "--quick", is_flag=True, help="Under a minute on demo: three workloads, two batch sizes, greedy."
)
@click.option(
    "--shape",
    metavar="NAME",
    help="Instead of TARGET: random weights of gemma-4-e2b, -e4b, -12b, -26b-a4b or -31b and of its assistant. "
    "Needs --synthetic-acceptance.",
)
@click.option(
    "--synthetic-acceptance",
    metavar="P,P,...",
    help="With --shape: the chance that the first, second, ... drafted token is kept if those before it are.",
)
@click.option("--json", "json_path", metavar="FILE", help="Write all measurements with their provenance.")
@click.option("--html", "html_path", metavar="FILE", help="Write a report with plots.")
@apply(engine_options("bench"))
def command(
    target: str | None, named: str | None, drafter: str, quick: bool, json_path: str | None, html_path: str | None,
    shape: str | None, synthetic_acceptance: str | None, **values: Any,
) -> None:  # fmt: skip
    """Measure what speculation brings on this machine for TARGET.

    Everything is written beside plain decoding (drafter none), in turns of a few tokens, and held against it; none
    beside itself shows the noise. Prompts are read before, so the first token is that of a prompt in the prefix cache.
    Ctrl-C keeps what is measured.

    \b
    paceline bench --quick
    paceline bench -w code -b 1 -k 4 -k auto --rounds 9 --html report.html
    paceline bench --shape gemma-4-e2b --quantize int4 --synthetic-acceptance 0.85,0.60,0.40,0.27
    """
    target = one_target(target, named)
    for path in (json_path, html_path):
        if path is not None and not Path(path).resolve().parent.is_dir():
            raise UsageError(f"cannot write {path}: its folder does not exist")
    given = {k: values.pop(k) for k in FULL}
    plan = (QUICK if quick else FULL) | {k: v for k, v in given.items() if v is not None and v != ()}
    from paceline.bench.meters import EnergyMeter
    from paceline.bench.runner import measure, unsure
    from paceline.bench.table import lines, to_json, verdict
    from paceline.provenance import provenance

    chances = _chances(click.get_current_context(), shape, synthetic_acceptance, plan)
    if shape is not None and chances is not None:
        subject = _synthetic(shape, chances, _options(plan, values | {"drafter": drafter}))
    else:
        subject = _load(target, drafter, plan, values)
    energy = EnergyMeter.find(subject.engine.state.target.device)
    bench = _bench(subject, plan, energy)
    total = len(bench.cells) * len(bench.settings) * bench.rounds
    runs, ended = _with_progress(lambda report: measure(bench, report), total)
    table = lines(runs)
    _print(table)
    facts = _facts(subject.engine, runs)
    sentences = [*subject.says, *verdict(table).say(), facts.pop("roofline_says")]
    if vague := unsure(runs, plan["within"]):
        sentences.append(f"{len(vague)} of {len(table)} ratios are not known to within {plan['within']:.2%}.")
    sentences += [f"Ended early: {ended}."] if ended else []
    click.echo("\n" + "\n".join(sentences))
    extra = facts | {"provenance": provenance("paceline " + " ".join(sys.argv[1:])), "ended": ended}
    record = to_json(runs, extra)
    record["verdict"] = [*subject.says, *record["verdict"]]
    _write(json_path, lambda: json.dumps(record, indent=1, default=str) + "\n")
    _write(html_path, lambda: _page(table, sentences, extra))


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: an engine, its prompts by (workload, how many), and what has to be said first."""

    engine: Engine
    prompts: Callable[[int], Callable[[str, int], list[Prompt]]]  # for texts of so many tokens
    says: tuple[str, ...] = ()


def _chances(
    ctx: click.Context, shape: str | None, acceptance: str | None, plan: dict[str, Any]
) -> ForcedAcceptance | None:
    """The forced chances of a shape; settles its workload in `plan`. Raises UsageError for what does not go together."""
    if shape is None and acceptance is None:
        return None
    if shape is None or acceptance is None:
        raise UsageError("--shape and --synthetic-acceptance belong together: give both, or neither")
    from click.core import ParameterSource

    from paceline.bench.synthetic import WORKLOAD
    from paceline.engine.forced import ForcedAcceptance

    for name, option in (("target", "a TARGET"), ("workloads", "--workload")):
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise UsageError(f"--shape has random weights and prompts: leave {option} out")
    plan["workloads"] = (WORKLOAD,)
    if ctx.get_parameter_source("temperatures") is not ParameterSource.COMMANDLINE:
        plan["temperatures"] = (0.0,)  # what is kept does not depend on it
    return ForcedAcceptance.parse(acceptance)


def _options(plan: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Options of the engine: room for all texts, and as many of the baseline."""
    options = engine_values(values)
    options["max_batch"] = 2 * max(options.get("max_batch", EngineConfig().max_batch), *plan["batches"])
    options.setdefault("max_model_len", 1024)
    return options


def _synthetic(shape: str, chances: ForcedAcceptance, options: dict[str, Any]) -> Subject:
    from paceline.bench.synthetic import random_prompts, said, synthetic_engine

    options["draft_tokens"] = "auto"
    engine = synthetic_engine(shape, chances, options, lambda line: click.echo(line, err=True))
    vocab = engine.state.target.vocab_size
    note = (
        f"SYNTHETIC: random weights of the shape {shape}; drafts are kept with the chances {said(chances)}, whatever the "
        "models say. Times are those of real computation."
    )
    return Subject(engine, lambda tokens: lambda name, count: random_prompts(vocab, count), (note,))


def _load(target: str, drafter: str, plan: dict[str, Any], values: dict[str, Any]) -> Subject:
    from paceline.bench.workloads import Bounds, prompts
    from paceline.llm import LLM
    from paceline.memory import freeze_objects

    options = _options(plan, values)
    llm = LLM(
        target, drafter=drafter, draft_tokens="auto", say=lambda line: click.echo(line, err=True), **options
    )
    llm.engine.state.cache.touch(TOUCHED)
    freeze_objects()
    vocab, special, tokenizer = llm.engine.state.target.vocab_size, llm.tokenizer.special_ids, llm.tokenizer

    def sources(longest: int) -> Callable[[str, int], list[Prompt]]:
        bounds = Bounds(vocab, longest, special)
        return lambda name, count: prompts(name, tokenizer, bounds, count)

    return Subject(llm.engine, sources)


def _bench(subject: Subject, plan: dict[str, Any], energy: Any) -> Bench:
    from paceline.bench.runner import NONE, Bench, Cell, Setting

    engine = subject.engine
    longest = engine.max_len - plan["tokens"] - 1
    if longest < 16:
        raise UsageError(
            f"--tokens {plan['tokens']} leaves no room for prompts: lower it or raise --max-model-len"
        )
    kind = engine.info["drafter"]
    cells = tuple(
        Cell(workload, batch, temperature)
        for workload in plan["workloads"]
        for batch in plan["batches"]
        for temperature in plan["temperatures"]
    )
    settings = (NONE, *(Setting(kind, k) for k in plan["lengths"])) if kind != "none" else (NONE,)
    return Bench(
        engine,
        engine.twin(),
        subject.prompts(longest),
        cells,
        settings,
        plan["tokens"],
        plan["rounds"],
        plan["seconds"],
        plan["min_seconds"],
        plan["within"],
        energy,
        engine.state.forced is not None,
    )


def _with_progress(run: Any, total: int) -> tuple[list[Run], str]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("warming up", total=total)

        def report(run: Run) -> None:
            done = progress.tasks[task].completed + 1  # more than were asked for, with --within
            progress.update(
                task,
                completed=done,
                total=max(total, done),
                description=f"{run.cell.workload} x{run.cell.batch} {run.setting.label}",
            )

        out: tuple[list[Run], str] = run(report)
        return out


def _print(table: list[Line]) -> None:
    from rich.console import Console

    from paceline.bench.report import terminal_table

    console = Console() if sys.stdout.isatty() else Console(width=170)
    console.print(terminal_table(table, console.width))


def _facts(engine: Engine, runs: list[Run]) -> dict[str, Any]:
    """What else was measured: the machine's limit for this target, memory, and the cost staircase."""
    from statistics import median

    from paceline.bench.meters import peak_memory
    from paceline.bench.roofline import Roofline, weight_bytes
    from paceline.forecast.rates import read_rate
    from paceline.models.target import GraphTarget

    state = engine.state
    assert isinstance(state.target, GraphTarget), "what an assembled engine loads"
    roof = Roofline(read_rate(state.target.device), weight_bytes(state.target))
    plain = [r.speed for r in runs if r.setting.drafter == "none" and r.cell.batch == 1]
    facts: dict[str, Any] = {
        "info": dict(engine.info),
        "peak_memory_bytes": peak_memory(state.target.device),
        "roofline_says": roof.say(median(plain) if plain else None),
        "roofline": roof.as_json(),
        "staircase_seconds": _staircase(engine),
    }
    return facts


def _staircase(engine: Engine) -> dict[int, float]:
    """What steps of so many rows cost as measured at start-up: how long the last texts were is no matter of rows."""
    from paceline.control.adaptive import AdaptivePolicy

    policy = engine.state.policy
    if not isinstance(policy, AdaptivePolicy):
        return {}
    table = policy.table.dense()
    return {n: table[n - 1] for n in (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24, 32)}


def _page(table: list[Line], sentences: list[str], extra: dict[str, Any]) -> str:
    from paceline.bench.report import page

    return page(table, sentences, extra, extra["staircase_seconds"])


def _write(path: str | None, make: Any) -> None:
    if path is not None:
        from paceline.bench.report import write

        write(Path(path), make())
        click.echo(f"wrote {path}", err=True)
