"""Models to talk to on this machine: those that are here, and well-known ones with what they take and what drafts.

`paceline` alone, `paceline list` and `paceline info` read this one table. Nothing is loaded and nothing is asked of a
network: sizes follow from headers of files, or from the published config of a model that is not here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.assembly import choose_drafter
from paceline.config import EngineConfig
from paceline.errors import PacelineError
from paceline.forecast.estimate import USEFUL, Fit, Size, chosen, fits, size_of, ways
from paceline.forecast.gpu_memory import assistant_bytes, needs
from paceline.forecast.published import published
from paceline.hub.cache import Cached
from paceline.models.config import parse_target, read_config
from paceline.suggest import suggestions

if TYPE_CHECKING:
    import torch

    from paceline.models.inspection import Inspection
    from paceline.models.spec import ModelConfig
    from paceline.ops.base import Runner, WeightKind

NGRAM = "n-gram"


@dataclass(frozen=True, slots=True)
class Known:
    """A well-known model that chats. `drafter`: hub id of a smaller model with its vocabulary; None: its own, if any."""

    name: str
    drafter: str | None = None


KNOWN = (
    Known("HuggingFaceTB/SmolLM2-360M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    Known("Qwen/Qwen3-0.6B"),
    Known("HuggingFaceTB/SmolLM2-1.7B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    Known("google/gemma-4-E2B-it"),
    Known("meta-llama/Llama-3.2-3B-Instruct"),
    Known("Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B"),
    Known("google/gemma-4-E4B-it"),
    Known("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"),
    Known("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"),
    Known("google/gemma-4-12B-it"),
    Known("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-0.6B"),
    Known("google/gemma-4-26B-A4B-it"),
    Known("google/gemma-4-31B-it"),
    Known("Qwen/Qwen3-32B", "Qwen/Qwen3-0.6B"),
    Known("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"),
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model would run. `free`: bytes of memory there."""

    device: torch.device
    runner: Runner
    free: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the table. `target` and `given`: as they are typed for TARGET and --drafter."""

    name: str
    target: str
    drafts: str  # what drafts for it, in words
    download: int  # bytes, 0 for a model that is here
    memory: int  # bytes of its weights, kept as `quantize` says
    context: int | None  # tokens that fit beside it; None: it does not fit
    quantize: WeightKind | None = None
    given: str | None = None

    @property
    def words(self) -> list[str]:
        """Of `paceline run`."""
        drafter = [] if self.given is None else ["--drafter", self.given]
        return [self.target, *drafter, *([] if self.quantize is None else ["--quantize", self.quantize])]


def local(models: Iterable[Cached], place: Place, caches: Seq[Path]) -> list[Entry]:
    """Of the models that are on this machine those that can be run, in their order. `caches`: where drafters may lie."""
    out = []
    for model in models:
        if model.inspection is not None and model.why is None and model.role == "target":
            try:
                out.append(_local(model, model.inspection, place, caches))
            except (PacelineError, OSError):
                continue  # `paceline info` on it says what is wrong
    return out


def _local(model: Cached, seen: Inspection, place: Place, caches: Seq[Path]) -> Entry:
    folder = seen.path
    config = parse_target(read_config(folder))
    kind, _, _ = choose_drafter(EngineConfig(target=model.target), folder)
    drafts, given = kind.removesuffix("+ngram").replace("ngram", NGRAM), None
    if drafts == NGRAM and (smaller := suggestions(folder, caches)):
        given, drafts = str(smaller[0].path), _short(smaller[0].path)
    options = fits_at(config, ways(seen, config), place)
    best = chosen(options, place.free)
    quantize = None if best is options[0] else best.kind
    return Entry(model.name, model.target, drafts, 0, best.size.memory, best.context, quantize, given)


def well_known(place: Place, names: Iterable[str] = ()) -> list[Entry]:
    """The models of `KNOWN` but `names`, which are here, by the memory that they take."""
    left_out = set(names)
    entries = [_known(known, place) for known in KNOWN if known.name not in left_out]
    return sorted(entries, key=lambda entry: entry.memory)


def _known(known: Known, place: Place) -> Entry:
    config = _config(known.name)
    own = assistant_bytes(config)
    smaller = 0 if known.drafter is None else size_of(_config(known.drafter), "bfloat16").file
    sizes = {kind: size_of(config, kind) for kind in _KINDS}
    options = fits_at(config, sizes, place, own + smaller)
    best = chosen(options, place.free)
    return Entry(
        known.name, known.name,
        drafts="its own drafter" if own else NGRAM if known.drafter is None else known.drafter.split("/")[-1],
        download=sizes["bfloat16"].file + own + smaller, memory=best.size.memory, context=best.context,
        quantize=None if best is options[0] else best.kind, given=known.drafter,
    )  # fmt: skip


_KINDS: tuple[WeightKind, ...] = ("bfloat16", "int8", "int4")


def drafter_for(name: str) -> str | None:
    """The hub id of a smaller model that drafts for the well-known model `name`."""
    return next((known.drafter for known in KNOWN if known.name == name), None)


def fits_at(
    config: ModelConfig, sizes: Mapping[WeightKind, Size], place: Place, drafter: int = 0
) -> list[Fit]:
    """For each way to keep the weights, whether they fit beside a drafter of so many bytes."""
    if place.device.type == "cpu":
        return fits(config, sizes, place.runner, place.free - drafter, measure=False)
    rows = needs(config, sizes, drafter, USEFUL, place.free)
    return [Fit(need.kind, sizes[need.kind], need.longest) for need in rows]


def _config(name: str) -> ModelConfig:
    shape = published(name)
    assert shape is not None, f"the config of {name} is in the table of published ones"
    return parse_target(shape[1])


def _short(path: Path) -> str:
    """How a drafter is called: its file, or the repository that its folder is a snapshot of."""
    if path.parent.name == "snapshots":
        return path.parents[1].name.split("--")[-1]
    return path.stem
