"""`paceline quantize`: store a model with int8 or int4 weights, and say what that costs."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from paceline.cli.convert import progress
from paceline.cli.options import TARGET, apply, one_target
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.convert.quantized import Loss
    from paceline.ops.quantize import QuantKind


@click.command()
@apply(TARGET)
@click.option(
    "--to", "kind", type=click.Choice(["int8", "int4"]), required=True, help="Kind of the stored weights."
)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="A new folder."
)
@click.option(
    "--text",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Held-out text to measure the loss on; default: a bundled one.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=0),
    default=1024,
    show_default=True,
    help="Tokens of the text to score; 0 measures nothing.",
)
@click.option("--threads", type=click.IntRange(1, 256), help="CPU threads; default: one per core.")
def command(
    target: str | None, named: str | None, kind: QuantKind, out: Path, text: Path | None, tokens: int,
    threads: int | None,
) -> None:  # fmt: skip
    """Quantize TARGET (a folder, a hub id, a GGUF file, `demo` or `smollm2`) into the folder --out, and print the loss of
    quality. What is stored in blocks of a GGUF file is unpacked first, and runs as it is, too.
    """
    from paceline.hub.resolve import resolve

    source = resolve(one_target(target, named, None), "target")
    sizes = _quantized(source, out, kind)
    before, after = sizes["before"] / 2**20, sizes["after"] / 2**20
    click.echo(f"{out}: {kind}, {after:.1f} MiB of {before:.1f} MiB ({after / before:.0%})")
    if tokens:
        click.echo(describe(_measure(source, out, text, tokens, threads)))


def _quantized(source: Path, out: Path, kind: QuantKind) -> dict[str, int]:
    """Bytes before and after. A GGUF file goes by a folder of its float32 weights, which lies beside `out` meanwhile."""
    from paceline.checkpoints.gguf.reader import is_gguf
    from paceline.convert.quantized import save_quantized
    from paceline.convert.to_folder import write_folder

    if not is_gguf(source):
        return save_quantized(source, out, kind)
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty: name a new folder")
    place = out.resolve().parent
    place.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}-", dir=place) as scratch:
        unpacked = Path(scratch) / "unpacked"
        with progress(f"unpacking {source.name}") as report:
            write_folder(source, unpacked, "f32", report=report)
        return save_quantized(unpacked, out, kind) | {"before": source.stat().st_size}


def _measure(source: Path, out: Path, text: Path | None, tokens: int, threads: int | None) -> Loss:
    import torch

    from paceline.cli.options import read_text
    from paceline.config import EngineConfig
    from paceline.convert.quantized import measure_loss
    from paceline.models.registry import load_target
    from paceline.ops.runners import pick_runner
    from paceline.text.tokenizer import Tokenizer

    content = read_text(str(text)) if text else _bundled_text()
    runner, _ = pick_runner(EngineConfig(threads=threads, activations="float32"), torch.device("cpu"))
    unquantized, quantized = load_target(source, runner=runner), load_target(out, runner=runner)
    tokenizer = Tokenizer.load(source)
    ids = tokenizer.encode(content)[:tokens]
    return measure_loss(unquantized, quantized, ids, len(tokenizer.decode(ids).encode()))


def _bundled_text() -> str:
    from importlib.resources import files

    return files("paceline.bench").joinpath("data/prose.txt").read_text(encoding="utf-8")


def describe(loss: Loss) -> str:
    """One line: the loss of quality as measured."""
    return (
        f"loss over {loss.positions} positions: KL {loss.kl:.5f} bits per token, same top token {loss.agree:.2%}, "
        f"bits per byte {loss.bits_per_byte:.4f} -> {loss.quantized_bits_per_byte:.4f}"
    )
