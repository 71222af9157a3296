"""Which mmproj file belongs to a GGUF model: the one that is given, else the one beside it that fits."""

from __future__ import annotations

from pathlib import Path

from paceline.checkpoints.gguf.projector import ARCHITECTURE, Projector
from paceline.checkpoints.gguf.reader import SPLIT, Gguf, is_gguf
from paceline.errors import LoadError, WeightsError

PREFERRED = ("BF16", "F32", "F16", "Q8_0")  # of files that differ in precision only


def projector_of(model: Path, given: str | None, hidden_size: int) -> Projector | str | None:
    """The towers of a model; why none can be chosen; None where no file is there. Raises LoadError for a given one."""
    if given is not None:
        projector = Projector(Path(given).expanduser())
        if not fits(projector, hidden_size):
            raise WeightsError(
                f"{given} was made for another model, of width {_widths(projector)} where {hidden_size} is needed: "
                "give the "
                "one that was published beside this model"
            )
        return projector
    if not is_gguf(model):
        return None
    fitting = [
        candidate
        for candidate in map(_opened, _candidates(model))
        if candidate is not None and fits(candidate, hidden_size)
    ]
    kinds = {_kind(candidate): candidate for candidate in fitting}
    if not fitting:
        return None
    names = ", ".join(sorted(candidate.path.name for candidate in fitting))
    if (
        len(kinds) < len(fitting)
        or len({(candidate.types["vision"], candidate.types["audio"]) for candidate in fitting}) > 1
    ):
        return f"several mmproj files fit ({names}): name one with --mmproj"
    best = next((kinds[kind] for kind in PREFERRED if kind in kinds), None)
    return best or (
        fitting[0] if len(fitting) == 1 else f"several mmproj files fit ({names}): name one with --mmproj"
    )


def fits(projector: Projector, hidden_size: int) -> bool:
    return all(projector.width(part) == hidden_size for part, kind in projector.types.items() if kind)


def _widths(projector: Projector) -> str:
    return " and ".join(str(projector.width(part)) for part, kind in projector.types.items() if kind)


def _candidates(model: Path) -> list[Path]:
    """The files beside a model whose header says that they are towers."""
    split = SPLIT.fullmatch(model.name)
    own = "" if split is None else split["stem"]
    return [
        path
        for path in sorted(model.parent.iterdir())
        if is_gguf(path) and path != model and not (own and path.name.startswith(own)) and _is_towers(path)
    ]


def _is_towers(path: Path) -> bool:
    try:
        return Gguf(path).get("general.architecture") == ARCHITECTURE
    except LoadError:
        return False  # another file that is broken is not this model's fault


def _opened(path: Path) -> Projector | None:
    try:
        return Projector(path)
    except WeightsError:
        return None  # the towers of another model


def _kind(projector: Projector) -> str:
    """The kind of most of its matrices."""
    kinds = [tensor.kind for tensor in projector.model.tensors.values() if len(tensor.shape) == 2]
    return max(sorted(set(kinds)), key=kinds.count) if kinds else "F32"
