"""Rows about time: forwards against the floor, whole steps with drafts, linears beside those of the vendor's library."""

from __future__ import annotations

from dataclasses import replace

import torch
from forwards import Forwards, launches
from journal import Journal
from subjects import Place, Wanted, forced, prompts
from subjects import engine as made
from torch.nn import functional as F

from paceline.bench.meters import EnergyMeter
from paceline.bench.roofline import weight_bytes
from paceline.bench.runner import Bench, Cell, Setting, run_beside
from paceline.config import EngineConfig
from paceline.core import ForwardBatch, SamplingParams
from paceline.drafters.assistant import MTPDrafter
from paceline.engine.engine import Engine
from paceline.forecast.random_target import random_weight, random_weights
from paceline.forecast.rates import read_rate, seconds_alone, seconds_each
from paceline.models.drafters.base import HeadOutput
from paceline.models.target import GraphTarget
from paceline.ops.base import Ops, Runner, Value, Weight, WeightKind
from paceline.ops.reference import EagerRunner
from paceline.ops.runners import pick_runner

USUAL = (0.85, 0.60, 0.40, 0.27)  # chance that each drafted token is kept, if those before it are
ACCEPTANCE = {"26b": (0.844, 0.599, 0.385, 0.271)}
CONTEXT = {"31b": 1000, "12b": 1000, "e4b": 500, "e2b": 500, "26b": 1000}
SHARES = {"31b": 0.90, "12b": 0.85, "e4b": 0.80, "e2b": 0.70}  # of the read floor, wanted
KINDS: tuple[WeightKind, ...] = ("bfloat16", "int8", "int4")
LAYER = (
    (43008, 5376),
    (5376, 21504),
    (16384, 5376),
    (5376, 8192),
)  # [out, in] of the linears of a layer of 31B


def bandwidth(place: Place, journal: Journal) -> None:
    rate = read_rate(place.torch)
    journal.add("bandwidth", f"{rate / 1e9:,.0f} GB/s read", bytes_per_second=rate)


def shape(place: Place, journal: Journal, wanted: Wanted, batches: tuple[int, ...] = ()) -> None:
    """All rows of one target: forwards of 1, 5 and 9 rows, steps with drafts, a prompt, batches."""
    name = wanted.shape if wanted.kind == "bfloat16" else f"{wanted.shape}-{wanted.kind}"
    with made(place, wanted) as (engine, arithmetic):
        journal.add(f"{name} loaded", _memory(place, arithmetic), arithmetic=arithmetic)
        forwards(place, journal, name, engine)
        drafted(place, journal, name, engine, 1)
        parts(place, journal, name, engine)
        reads(place, journal, name, engine)
        if batches and journal.left > 15:
            energy(place, journal, name, engine)
        if wanted.kind == "bfloat16":
            prompt(place, journal, name, engine)
        for batch in batches:
            if journal.left > 15:
                drafted(place, journal, name, engine, batch)
        del engine


def _memory(place: Place, arithmetic: str) -> str:
    if place.torch.type != "cuda":
        return arithmetic
    return f"{arithmetic}; {torch.cuda.memory_allocated(place.torch) / 2**30:.1f} GiB in use"


def _target(engine: Engine) -> GraphTarget:
    assert isinstance(engine.state.target, GraphTarget), "what random_parts makes"
    return engine.state.target


def forwards(place: Place, journal: Journal, name: str, engine: Engine) -> None:
    """Steps of 1, 5 and 9 rows of one text, logits of all of them included."""
    shape = name.partition("-")[0]
    context = 40 if place.dry else CONTEXT[shape]
    texts = Forwards(engine, context)
    rate = journal.value("bandwidth", "bytes_per_second") or read_rate(place.torch)
    floor = weight_bytes(_target(engine)) / rate
    budget, one = (0.02, 0.0) if place.dry else (0.4, 0.0)
    try:
        for rows in (1, 5, 9):
            call = texts.step(rows)
            alone = seconds_alone(call, place.torch, budget)
            each = seconds_each(call, place.torch, budget)
            one = one or each
            said = f"{each * 1e3:.3f} ms, {floor / each:.1%} of the floor"
            said += f" ({floor * 1e3:.3f} ms)" if rows == 1 else f", {each / one:.3f} of 1 row"
            journal.add(
                f"{name} {rows} rows", f"{said}; waited for {alone * 1e3:.3f} ms", ms=each * 1e3, alone_ms=alone * 1e3,
                floor_ms=floor * 1e3, share=floor / each, over_one=each / one, context=context,
                target=SHARES.get(shape) if rows == 1 else None,
            )  # fmt: skip
        found = launches(texts.step(1), place.torch)
        if found is not None:
            layers = _target(engine).layer_count
            journal.add(
                f"{name} launches", f"{found.kernels} kernels, {found.kernels / layers:.1f} a layer of {layers}",
                kernels=found.kernels, a_layer=found.kernels / layers, target=10,
            )  # fmt: skip
    finally:
        texts.close()


def drafted(place: Place, journal: Journal, name: str, engine: Engine, batch: int) -> None:
    """Whole steps with 4 drafted tokens, beside plain ones, as an engine makes them when it has made them before."""
    chances = ACCEPTANCE.get(name.partition("-")[0], USUAL)
    bench = _bench(place, engine, chances)
    cell, setting = Cell("synthetic", batch, 0.0), Setting("mtp", 4)
    run_beside(
        replace(bench, least=0.0), cell, setting, 0
    )  # all graphs of such texts are captured afterwards
    run, plain = run_beside(bench, cell, setting, 1)
    kept = 1 + sum(run.accepted_by_position) / max(run.steps, 1)
    step = kept / run.speed * batch if run.speed else float("nan")
    beside = batch / plain.speed if plain.speed else float("nan")
    journal.add(
        f"{name} drafts, batch {batch}",
        f"{run.speed:,.0f} tokens/s, {run.ratio:.2f} of plain ({plain.speed:,.0f}); {kept:.2f} tokens a step of "
        f"{step * 1e3:.2f} ms, plain {beside * 1e3:.2f} ms",
        tokens_per_second=run.speed, plain=plain.speed, ratio=run.ratio, tokens_a_step=kept, step_ms=step * 1e3,
        plain_step_ms=beside * 1e3, batch=batch, acceptance=chances,
    )  # fmt: skip


def reads(place: Place, journal: Journal, name: str, engine: Engine) -> None:
    """What a whole step with 4 drafted tokens launches, and how often the host waits for the device."""
    writer = forced(engine, (0.5,) * 4)
    params = SamplingParams(max_tokens=100, ignore_eos=True, seed=0, drafter="mtp", draft_tokens=4)
    writer.add("reads", prompts(engine.state.target.vocab_size, 1)[0].tokens, params)
    try:
        for _ in range(6):  # the prompt, then steps that compile and capture
            writer.step()
        found = launches(writer.step, place.torch)
    finally:
        writer.cancel("reads")
    if found is not None:
        journal.add(
            f"{name} whole step", f"{found.kernels} kernels, {found.reads} reads by the host",
            kernels=found.kernels, reads=found.reads, target=1,
        )  # fmt: skip


def energy(place: Place, journal: Journal, name: str, engine: Engine) -> None:
    """Joules a token, where the card counts them."""
    meter = EnergyMeter.find(place.torch)
    if meter is None:
        return
    bench = replace(_bench(place, engine, USUAL), least=2.0, energy=meter)
    run, plain = run_beside(bench, Cell("synthetic", 1, 0.0), Setting("mtp", 4), 1)
    if run.joules and plain.joules:
        own, beside = run.joules / run.tokens, plain.joules / plain.tokens
        journal.add(f"{name} energy", f"{own:.2f} J a token with drafts, {beside:.2f} without ({meter.source})",
                    joules=own, plain_joules=beside)  # fmt: skip


def _bench(place: Place, engine: Engine, chances: tuple[float, ...]) -> Bench:
    writer, vocab = forced(engine, chances), engine.state.target.vocab_size
    return Bench(
        writer, writer.twin(), lambda workload, count: prompts(vocab, count), (), (), tokens=24 if place.dry else 160,
        rounds=1, least=0.0 if place.dry else 0.8, forced=True,
    )  # fmt: skip


def parts(place: Place, journal: Journal, name: str, engine: Engine) -> None:
    """What a step with 4 drafted tokens is made of, each measured alone: four calls of the assistant, 5 rows verified."""
    drafter = engine.state.drafters["mtp"]
    assert isinstance(drafter, MTPDrafter)
    net, target = drafter.net, _target(engine)
    texts, budget = Forwards(engine, 40), 0.02 if place.dry else 0.3
    try:
        one = texts.rows(1)
        hidden = torch.randn(1, target.hidden_size, device=target.device, dtype=target.dtype)

        def call() -> HeadOutput:
            return net.step(one, hidden, engine.state.cache)

        draft = seconds_each(call, place.torch, budget)
        verify = (
            journal.value(f"{name} 5 rows", "ms") or seconds_each(texts.step(5), place.torch, budget) * 1e3
        )
        step = journal.value(f"{name} drafts, batch 1", "step_ms")
        total = 4 * draft * 1e3 + verify
        ratio = step / total if step else float("nan")
        journal.add(
            f"{name} step over parts",
            f"{ratio:.3f}: 4 draft calls of {draft * 1e3:.3f} ms and 5 rows of {verify:.3f} ms, step {step or 0:.3f} ms",
            ratio=ratio, draft_call_ms=draft * 1e3, verify_ms=verify, step_ms=step, target=1.05,
        )  # fmt: skip
    finally:
        texts.close()


def prompt(place: Place, journal: Journal, name: str, engine: Engine) -> None:
    """A prompt of 512 tokens, beside plain torch over the same weights where it can read them."""
    count, target = 24 if place.dry else 512, _target(engine)
    texts, budget = Forwards(engine, 16), 0.02 if place.dry else 0.4
    try:
        own = seconds_each(texts.prompt(count), place.torch, budget)
        words, other = f"{own * 1e3:.1f} ms, {count / own:,.0f} tokens/s", None
        if target.head.data.device.type == target.layers[0].attention.o.data.device.type != "meta":
            eager, rows = EagerRunner(target.dtype), texts.rows(count)
            other = seconds_each(
                lambda: eager.run(target.hidden_graph, rows, engine.state.cache, {}), place.torch, budget / 2
            )
            words += f"; plain torch {other * 1e3:.1f} ms, ratio {own / other:.2f}"
        theirs, ratio = (None, None) if other is None else (other * 1e3, own / other)
        journal.add(
            f"{name} prompt of {count}", words, ms=own * 1e3, plain_torch_ms=theirs, ratio=ratio, target=1.5
        )
    finally:
        texts.close()


def tax(place: Place, journal: Journal) -> None:
    """Linears of a layer of 31B with 1, 5 and 512 rows, beside those of the vendor's library."""
    device = place.torch
    sizes = tuple((o // 128, i // 128) for o, i in LAYER) if place.dry else LAYER
    source = random_weights({}, "bfloat16", device)
    runner, _ = pick_runner(EngineConfig(device=place.device), device)
    weights = [random_weight(source, size, "bfloat16") for size in sizes]
    for rows in (1, 5, 512):
        own, other = 0.0, 0.0
        for weight in weights:
            mine, theirs = _linears(runner, weight, rows, 0.02 if place.dry else 0.15)
            own, other = own + mine, other + theirs
        journal.add(
            f"tax of bits, {rows} rows", f"{own * 1e3:.3f} ms, library {other * 1e3:.3f} ms: {own / other - 1:+.1%}",
            ms=own * 1e3, library_ms=other * 1e3, tax=own / other - 1, target=0.5 if rows == 512 else 0.03,
        )  # fmt: skip


def linears(place: Place, journal: Journal) -> None:
    """Linears of 31B and E2B by how their weights are kept, over the time that reading them takes."""
    device, rate = place.torch, journal.value("bandwidth", "bytes_per_second") or read_rate(place.torch)
    source = random_weights({}, "bfloat16", device)
    runner, _ = pick_runner(EngineConfig(device=place.device), device)
    budget = 0.02 if place.dry else 0.1
    for out, width in (*LAYER[:2], (6144, 1536), (1536, 6144)):
        size = (out // 128, max(32, width // 128 // 32 * 32)) if place.dry else (out, width)
        for kind in KINDS:
            weight = random_weight(source, size, kind)
            floor = weight.nbytes / rate
            seconds = {rows: _own(runner, weight, rows, budget) for rows in (1, 5, 16)}
            times = ", ".join(f"{rows} rows {each * 1e6:,.1f} us" for rows, each in seconds.items())
            journal.add(
                f"linear {size[1]}x{size[0]} {kind}", f"{times}; 1 row {floor / seconds[1]:.0%} of the floor",
                ms={rows: each * 1e3 for rows, each in seconds.items()}, floor_ms=floor * 1e3, share=floor / seconds[1],
            )  # fmt: skip


def _own(runner: Runner, weight: Weight, rows: int, budget: float) -> float:
    """Seconds of a linear of ours."""
    device, width = weight.data.device, weight.in_features
    x = torch.randn(rows, width, device=device, dtype=torch.float32)
    zeros = torch.zeros(rows, dtype=torch.int64, device=device)
    batch = ForwardBatch(zeros, zeros.int(), zeros.int(), [0, rows])

    def graph(ops: Ops) -> tuple[Value, ...]:
        return (ops.linear(ops.given("x", width), weight),)

    return seconds_each(lambda: runner.run(graph, batch, None, {"x": x}), device, budget)


def _linears(runner: Runner, weight: Weight, rows: int, budget: float) -> tuple[float, float]:
    """Seconds of a linear of ours, and of the library's."""
    device = weight.data.device
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    x = torch.randn(rows, weight.in_features, device=device, dtype=dtype)
    data = weight.data.to(dtype)
    return _own(runner, weight, rows, budget), seconds_each(lambda: F.linear(x, data), device, budget)
