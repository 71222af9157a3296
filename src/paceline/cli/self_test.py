"""`paceline self-test`: whether this installation works. The first thing to run, and the first to ask of a bug report."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from paceline.ops.base import Graph, Ops, Value, Weight

PROMPT, TOKENS = "def parse(", 64
SETS = ("generic", "avx2", "avx512", "floats", "neon")


@click.command()
@click.option("--skip-check", is_flag=True, help="Leave out the quick check, which takes most of the time.")
def command(skip_check: bool) -> None:
    """Test this installation: the kernels, the quick check of losslessness, and an answer of the bundled pair.

    Needs no network. Prints first what it runs on, to be pasted into a report. The exit code is 0 if all is well, 1 if
    something is not.
    """
    from paceline.cli import doctor

    begin = time.perf_counter()
    click.echo("\n".join(doctor.lines(doctor.facts())) + "\n")
    parts: dict[str, Callable[[], Iterator[str]]] = {"kernels": _kernels, "answer": _answer}
    if not skip_check:
        parts["check"] = _check
    wrong = 0
    for name, part in parts.items():
        start = time.perf_counter()
        try:
            words, well = "; ".join(part()), True
        except Exception as error:  # noqa: BLE001
            words, well = " ".join(f"{type(error).__name__}: {error}".split()), False
            wrong += 1
        click.echo(
            f"{'passed' if well else 'FAILED'}  {name:8} {time.perf_counter() - start:5.1f} s  {words}"
        )
    took = f"in {time.perf_counter() - begin:.1f} s"
    if wrong:
        click.echo(f"\nself-test: {wrong} of {len(parts)} failed {took}: report it with all of the above")
        sys.exit(1)
    click.echo(f"\nself-test: passed {took}")


def _kernels() -> Iterator[str]:
    """Products of each instruction set that this processor has, beside float64."""
    from paceline.ops import native

    if (reason := native.why_not()) is not None:
        yield f"plain PyTorch instead, slower: {reason}"
        return
    extension = native._extension()
    if wrong := native.left_out():
        raise ValueError(
            f"kernels that compute wrongly on this processor are not used: {wrong}. Reinstall paceline with another "
            "compiler; if that changes nothing, update the machine's firmware, its hypervisor or its emulator"
        )
    try:
        for name in SETS:
            if extension.choose_isa(name):
                error, bits = _worst()
                yield f"{native.isa()} off by {error:.1e}, bits {bits}"
    finally:
        extension.choose_isa("best")


def _product(weight: Weight) -> Graph:
    def graph(ops: Ops) -> tuple[Value, ...]:
        return (ops.linear(ops.given("x", weight.in_features), weight),)

    return graph


def _worst() -> tuple[float, str]:
    """(the largest error of products relative to the largest value, a digest of their bits). Raises ValueError above 2%.

    Two builds with the same digest compute the same. What goes in are quotients of integers: the same on any machine.
    """
    import hashlib

    import torch

    from paceline.core import ForwardBatch
    from paceline.ops.base import Weight
    from paceline.ops.native import NativeRunner
    from paceline.ops.quantize import quantize
    from paceline.ops.reference import dequantize

    made = torch.Generator().manual_seed(0)
    x, data = (torch.randint(-999, 1000, (rows, 96), generator=made) / 333 for rows in (5, 200))
    weights = [
        Weight(data, "float32"),
        Weight(data.bfloat16(), "bfloat16"),
        quantize(data, "int8"),
        quantize(data, "int4"),
    ]
    zeros, worst, bits = torch.zeros(5, dtype=torch.int32), 0.0, hashlib.sha256()
    for weight in weights:
        exact = x.double() @ dequantize(weight, None, torch.float64).T
        rows = ForwardBatch(zeros.long(), zeros, zeros, [0, 5])
        (got,) = NativeRunner().run(_product(weight), rows, None, {"x": x})
        error = float((got.double() - exact).abs().max() / exact.abs().max())
        if not error < 0.02:
            raise ValueError(f"{weight.kind} products are wrong by {error:.1e} of the largest")
        worst = max(worst, error)
        bits.update(got.contiguous().numpy().tobytes())
    return worst, bits.hexdigest()[:8]


def _answer() -> Iterator[str]:
    """The bundled pair writes a text, once with its drafter and once without."""
    import hashlib

    from paceline.llm import LLM

    texts = []
    for drafter in ("none", "auto"):
        with LLM("demo", drafter=drafter, max_model_len=256, profile_dir="none") as llm:
            (done,) = llm.generate([PROMPT], max_tokens=TOKENS, temperature=0.8, seed=1, logprobs=0)
            texts.append(done.text)
            used = llm.info["drafter"]
    if texts[0] != texts[1] or not texts[0]:
        raise ValueError("the text with a drafter is not the one without")
    bits = hashlib.sha256(
        repr([(entry.token, entry.raw) for entry in done.logprobs or ()]).encode()
    ).hexdigest()
    yield f"{len(done.token_ids)} tokens, the same with {used} as without a drafter, bits {bits[:8]}"
    yield f"{done.stats.tokens_per_step:.2f} tokens per step (1.00: no draft was kept, or none paid here)"


def _progress() -> Callable[[str, float], None]:
    """Says on standard error how far the check is, a line for each fifth: also where nobody looks at a terminal."""
    fifths = [-1]

    def show(what: str, share: float) -> None:
        if (now := int(share * 5)) > fifths[0]:
            fifths[0] = now
            click.echo(f"        check    {share:4.0%}  {what}", err=True)

    return show


def _check() -> Iterator[str]:
    """`paceline check --quick` of the bundled pair."""
    from paceline.check import loading
    from paceline.check.proof import QUICK, prove
    from paceline.cli.check import workload
    from paceline.provenance import provenance

    options = {"max_model_len": 1536, "profile_dir": "none"}
    subject = loading.load("demo", ("auto", "model+ngram"), lambda line: None, options, workload)
    certificate = prove(subject, QUICK, provenance("paceline self-test"), _progress())
    if not certificate.holds:
        raise ValueError("speculation changes the text here: `paceline check --quick -v` says where")
    yield certificate.contract
