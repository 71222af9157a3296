"""Adapters that a request names: by its `model`, as in vLLM, or by `lora`, also in llama.cpp's form."""

from __future__ import annotations

from paceline.server.errors import ApiError
from paceline.server.params import refuse
from paceline.server.schema import Sampling

_SHOWN = 80  # characters of a name that is not known


def settle_adapters(body: Sampling, names: tuple[str, ...]) -> None:
    """Make `lora` a factor by name, of the adapters `names` in the order of their ids. Raises ApiError 400."""
    wanted = body.lora
    if isinstance(wanted, str):
        wanted = {wanted: 1.0}
    if isinstance(wanted, list):
        pairs = [(_named(item.id, names), item.scale) for item in wanted]
        wanted = dict(pairs)
        if len(wanted) < len(pairs):
            raise refuse("lora", "an adapter is there twice: give each one factor")
    for name in wanted or ():
        if name not in names:
            raise _unknown(name, names)
    if body.model in names:
        if wanted:
            raise refuse(
                "lora", f"the model {body.model!r} is an adapter already: name adapters in one place"
            )
        wanted = {body.model: 1.0} if body.model is not None else None
    body.lora = wanted or None


def _named(wanted: int | str, names: tuple[str, ...]) -> str:
    if isinstance(wanted, str):
        return wanted
    if not 0 <= wanted < len(names):
        raise _unknown(wanted, names)
    return names[wanted]


def _unknown(wanted: int | str, names: tuple[str, ...]) -> ApiError:
    shown_name = repr(wanted)[:_SHOWN]
    known = ", ".join(f"{i}: {name}" for i, name in enumerate(names)) or "none, see --adapters"
    return refuse("lora", f"no adapter {shown_name} is loaded: there is {known}", code="adapter_not_found")
