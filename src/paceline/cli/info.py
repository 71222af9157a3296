"""`paceline info`: what a model is and needs, whether it will run here and how fast, without loading its weights."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import TARGET, apply, one_target, profile_dir
from paceline.errors import sized

if TYPE_CHECKING:
    import torch

    from paceline.config import EngineConfig
    from paceline.forecast.estimate import Fit
    from paceline.forecast.gpu_memory import Need
    from paceline.forecast.outlook import Outlook
    from paceline.models.inspection import Inspection
    from paceline.ops.base import Runner


@dataclass(slots=True)
class Seen:
    """What was found out. `text`: by the name of a line; `model`: how the target is named in a command."""

    models: list[Inspection]
    drafter: tuple[str, Path | None, str]  # kind, folder, why
    device: torch.device
    arithmetic: str
    pages: str | None
    text: dict[str, str]
    troubles: list[str]
    fits: list[Fit] = field(default_factory=list)
    needs: list[Need] = field(default_factory=list)  # of a GPU's memory
    card: int = 0  # bytes that a GPU has, or that one is planned to have
    bandwidth: float | None = None  # bytes a second that the GPU reads
    free: int = 0  # bytes of memory
    next: str | None = None


@click.command()
@apply(TARGET)
@click.option("--drafter", default="auto", show_default=True, help="As for `paceline run`.")
@click.option(
    "--profile-dir",
    "profiles",
    default=profile_dir,
    envvar="PACELINE_PROFILE_DIR",
    show_default="the user's cache",
    help="Folder in which earlier starts have kept what they measured.",
)
@click.option("--adapter", multiple=True, metavar="DIR", help="As for `paceline run`.")
@click.option("--measure/--no-measure", default=True, show_default=True,
              help="Decode with a slice of the model for some seconds, to estimate its speed here.")  # fmt: skip
@click.option("--gpu-memory", "card", type=click.FloatRange(min=0, min_open=True), metavar="GIB",
              help="Say what fits on a GPU of so many GiB, whether there is one here or not.")  # fmt: skip
@click.option("--context", type=click.IntRange(min=1), default=8192, show_default=True,
              help="Tokens of the text that a GPU has to hold K/V of.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    target: str | None, named: str | None, drafter: str, adapter: Any, card: float | None, as_json: bool,
    **how: Any,
) -> None:  # fmt: skip
    """Say what TARGET and its drafter are, whether they will run here, how fast, and what is unsupported and why.

    Without TARGET: what is installed here, in a form to paste into a report of a bug.

    Reads configs and file headers only; a config.json alone is enough. Of a model on the hub no weights are downloaded.
    The published Gemma 4, Qwen3, Llama 3 and SmolLM2 models are known without a network, too.
    """
    if target is None and named is None:
        from paceline.cli import doctor

        rows = doctor.facts()
        click.echo(json.dumps(rows, indent=2) if as_json else "\n".join(doctor.lines(rows)))
        return
    import tempfile

    from paceline.config import EngineConfig
    from paceline.drafters.registry import check_kind
    from paceline.errors import LoadError
    from paceline.forecast.outlook import Outlook

    config = EngineConfig(target=one_target(target, named), drafter=check_kind(drafter), adapter=adapter)
    with tempfile.TemporaryDirectory() as scratch:
        outlook = Outlook(Path(scratch), lambda line: click.echo(line, err=True))
        try:
            seen = _look(config, outlook, how["measure"])
            seen.text |= _pair(seen, config, outlook.find(config.target), Path(how["profiles"]))
            _plan(seen, config, outlook, None if card is None else round(card * 2**30), how["context"])
            click.echo(outlook.named(_as_json(seen) if as_json else _as_text(seen)))
            if seen.troubles:
                raise LoadError(seen.troubles[0])
        except LoadError as error:
            raise type(error)(outlook.named(str(error))) from error


def _look(config: EngineConfig, outlook: Outlook, measure: bool) -> Seen:
    from paceline.assembly import choose_drafter, find_adapters
    from paceline.drafter_kinds import KINDS
    from paceline.memory import why_not
    from paceline.models.inspection import inspect
    from paceline.ops.runners import pick_device, pick_runner
    from paceline.survey import describe_sampling, describe_text

    folder = outlook.find(config.target)
    drafter = choose_drafter(config, folder, outlook.look)
    kind, source, _ = drafter
    device = pick_device("auto")
    runner, arithmetic = pick_runner(config, device)
    pages = why_not() or "the system gives huge pages" if device.type == "cpu" else None
    weighed = outlook.weighed(folder)
    models = [inspect(weighed, itemsize=4 if device.type == "cpu" else 2, runner=runner)]
    if source is not None:
        models.append(inspect(source, target=folder if kind.partition("+")[0] in KINDS else None))
    if outlook.planned:
        text, troubles = describe_sampling(folder)
        text["weights"] = "not here: sizes are those of its shape in bfloat16"
    else:
        text, troubles = describe_text(folder, models[0].vocab_size)
        sampling, wrong = describe_sampling(folder)
        text, troubles = text | sampling, troubles + wrong
        if not models[0].unsupported:
            from paceline.media.build import describe_media

            media, wrong = describe_media(
                folder, rate=_multiplied if measure and device.type == "cpu" else None
            )
            text, troubles = text | media, troubles + wrong
    find_adapters(config, folder, partial(_note_adapter, text))
    troubles = [trouble for model in models for trouble in model.unsupported] + troubles
    seen = Seen(models, drafter, device, arithmetic, pages, text, troubles)
    if not models[0].unsupported and device.type == "cpu":
        _judge(seen, config, outlook, folder, runner, measure)
    return seen


def _note_adapter(text: dict[str, str], line: str) -> None:
    """A line for each, under names that differ by spaces alone."""
    name = "adapter"
    while name in text:
        name += " "
    text[name] = line.removeprefix("adapter ")


def _pair(seen: Seen, config: EngineConfig, folder: Path, profiles: Path) -> dict[str, str]:
    """What is known of the target with its drafter, or which drafters there are that nobody named."""
    from paceline.files import fingerprint
    from paceline.forecast.catalogue import drafter_for
    from paceline.hub.cache import hub_cache
    from paceline.startup.describe import describe_pair
    from paceline.startup.profile_store import machine
    from paceline.suggest import costs_too_much, suggestions, weights

    kind, source, _ = seen.drafter
    if source is None:
        suggested = suggestions(folder, [hub_cache()]) if config.drafter == "auto" else []
        if suggested or config.drafter != "auto" or (known := drafter_for(config.target)) is None:
            return {
                f"could draft{' ' * i}": suggestion.described(folder)
                for i, suggestion in enumerate(suggested)
            }
        return {"could draft": f"{known}, a smaller model of its vocabulary: --drafter {known}"}
    if seen.troubles or not weights(folder):
        return {}
    key = {"machine": machine(seen.device), "target": fingerprint(folder), "drafter": fingerprint(source)}
    name, share = kind.partition("+")[0], weights(source) / weights(folder)
    costs = costs_too_much(source, folder) if name == "model" else None
    return ({"costs": costs} if costs else {}) | describe_pair(profiles, folder, key, name, share)


def _multiplied(inputs: int, outputs: int) -> float:
    """Operations a second of a product of 1024 rows with a float32 matrix, the best of a quarter of a second."""
    import time

    import torch

    rows, matrix, best, end = (
        torch.ones(1024, inputs),
        torch.ones(outputs, inputs),
        0.0,
        time.perf_counter() + 0.25,
    )
    while time.perf_counter() < end:
        begin = time.perf_counter()
        torch.nn.functional.linear(rows, matrix)
        best = max(best, 2 * rows.numel() * outputs / (time.perf_counter() - begin))
    return best


def _plan(seen: Seen, config: EngineConfig, outlook: Outlook, card: int | None, context: int) -> None:
    """Add what a GPU of `card` bytes needs to have, or the one that is here."""
    if seen.models[0].unsupported or (card is None and seen.device.type != "cuda"):
        return
    from paceline.capacity import free_memory
    from paceline.forecast.estimate import Fit, ways
    from paceline.forecast.gpu_memory import assistant_bytes, needs, weights_of
    from paceline.forecast.rates import read_rate
    from paceline.models.config import parse_target, read_config

    folder = outlook.weighed(outlook.find(config.target))
    parsed = parse_target(read_config(folder))
    seen.card = free_memory(seen.device) if card is None else card
    sizes = ways(seen.models[0], parsed)
    drafter = seen.models[1].weight_bytes if len(seen.models) > 1 else 0
    if not drafter and config.drafter == "auto" and outlook.planned:
        drafter = assistant_bytes(parsed)
    seen.needs = needs(parsed, sizes, drafter, context, seen.card)
    if card is None:
        seen.free, seen.bandwidth = seen.card, read_rate(seen.device)
        seen.fits = [
            Fit(need.kind, replace(size, memory=weights_of(parsed, need.kind, size)), need.longest,
                seen.bandwidth / (size.layers + size.head))
            for need, size in zip(seen.needs, sizes.values(), strict=True)
        ]  # fmt: skip
        seen.next = outlook.next(config, folder, seen.fits, seen.free)


def _judge(
    seen: Seen, config: EngineConfig, outlook: Outlook, folder: Path, runner: Runner, measure: bool
) -> None:
    """Add whether it fits and how fast it is, and what to type next."""
    from paceline.capacity import free_memory
    from paceline.forecast.estimate import fits, ways
    from paceline.models.config import parse_target, read_config

    parsed = parse_target(read_config(folder))
    seen.free = free_memory(seen.device)
    if measure:
        outlook.say("measuring for some seconds (--no-measure leaves it out)")
    seen.fits = fits(parsed, ways(seen.models[0], parsed), runner, seen.free, measure=measure)
    seen.next = outlook.next(config, folder, seen.fits, seen.free)


def _as_json(seen: Seen) -> str:
    kind, _, why = seen.drafter
    facts: dict[str, Any] = {
        "drafter": kind, "reason": why, "device": str(seen.device), "arithmetic": seen.arithmetic, "pages": seen.pages,
        **seen.text,
        "models": [asdict(item) | {"path": str(item.path)} for item in seen.models],
        "free_memory": seen.free, "fits": [asdict(item) for item in seen.fits], "next": seen.next,
        "gpu_memory": seen.card or None, "gpu": [asdict(item) | {"total": item.total} for item in seen.needs],
    }  # fmt: skip
    return json.dumps(facts, indent=2)


def _as_text(seen: Seen) -> str:
    kind, _, why = seen.drafter
    lines = [_describe(model) for model in seen.models]
    lines += [f"{part:12} {what}" for part, what in seen.text.items()]
    lines += [f"drafter      {kind}: {why}", f"device       {seen.device}, {seen.arithmetic}"]
    if seen.pages is not None:
        lines.append(f"pages        {seen.pages}")
    if seen.fits:
        lines += ["", *_table(seen)]
    if seen.needs:
        lines += ["", *_gpu_table(seen)]
    if seen.next is not None:
        lines += ["", f"next         {seen.next}"]
    return "\n".join(lines)


def _table(seen: Seen) -> list[str]:
    """Whether it will run here, and how fast, for each way to keep the weights; readable at 80 columns."""
    lines = [f"{'kept as':26}{'file':>11}{'memory':>12}{'context':>10}{'tokens/s':>10}"]
    for i, fit in enumerate(seen.fits):
        name = f"{fit.kind} (as stored)" if i == 0 else f"{fit.kind} (--quantize {fit.kind})"
        sizes = f"{name:26}{sized(fit.size.file):>11}{sized(fit.size.memory):>12}"
        context = f"{fit.context:,}" if fit.context is not None else "too large"
        speed = _rate(fit.speed)
        lines.append(f"{sizes}{context:>10}{speed:>10}")
    lines.append(f"{sized(seen.free)} of memory are free here; the context is what fits beside the weights.")
    if seen.bandwidth is not None:
        lines.append(
            f"Tokens/s are the most for one text without drafts: {seen.bandwidth / 1e9:,.0f} GB/s are read here."
        )
    elif any(fit.speed is not None for fit in seen.fits):
        lines += [
            "Tokens/s are an estimate for one text without drafts, measured on a slice of it.",
            "`paceline bench --quick` on it measures both, without drafts and with them.",
        ]
    return lines


def _gpu_table(seen: Seen) -> list[str]:
    """The sum of what a GPU has to hold, for each way to keep the weights; readable at 80 columns."""
    lines = [
        f"on a GPU with {sized(seen.card)}, one text of {seen.needs[0].context:,} tokens:",
        f"{'kept as':10}{'weights':>11}{'drafter':>11}{'K/V':>11}{'beside':>10}{'sum':>11}{'longest text':>15}",
    ]
    for need in seen.needs:
        parts = f"{sized(need.weights):>11}{sized(need.drafter):>11}{sized(need.cache):>11}{sized(need.beside):>10}"
        longest = "too large" if need.longest is None else f"{need.longest:,}"
        lines.append(f"{need.kind:10}{parts}{sized(need.total):>11}{longest:>15}")
    return lines


def _rate(speed: float | None) -> str:
    return "-" if speed is None else f"{speed:,.0f}" if speed >= 10 else f"{speed:.1f}"


def _describe(model: Inspection) -> str:
    lines = [f"{model.role:12} {model.path}", f"  type       {model.model_type}"]
    if model.layers:
        lines.append(
            f"  layers     {model.layers}; vocabulary {model.vocab_size:,}; context {model.max_len:,}"
        )
    if model.parameters:
        stored = ", ".join(f"{name} x{n}" for name, n in model.dtypes.items())
        lines.append(
            f"  weights    {sized(model.weight_bytes)}: {model.parameters / 1e6:.2f} M parameters ({stored})"
        )
        lines += [f"    {part:24} {sized(size):>10}" for part, size in model.weights.items()]
    if model.quantized is not None:
        lines.append(f"  stored     {model.quantized}")
    for kind, size in model.kv_per_token.items():
        reach = model.windows.get(kind)
        lines.append(
            f"  K/V        {sized(size)} per token, {kind.replace('_', ' ')}"
            + (f", last {reach} kept" if reach else "")
            + (f" ({sized(model.kv_as_int8[kind])} with --kv-cache int8)" if kind in model.kv_as_int8 else "")
        )
    if model.state_bytes:
        lines.append(f"  state      {sized(model.state_bytes)} per text, linear attention")
    lines += [f"  not loaded {part}: {sized(size)}" for part, size in model.skipped.items()]
    lines += [f"  UNSUPPORTED {why}" for why in model.unsupported]
    return "\n".join(lines)
