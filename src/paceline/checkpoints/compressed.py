"""Matrices that compressed-tensors packed (`pack-quantized`, as Google's `-qat-w4a16-ct`), seen as paceline's own int4.

`x.weight_packed` int32 [out, in / 8] holds eight values plus 8 each, the first in the lowest bits, so its bytes are those
of `Weight`'s int4; `x.weight_scale` [out, in / 32] is widened to float32, exactly. `x.weight_shape` says what the config
says, too. What is not packed (the config's `ignore`) is stored as plain `x.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoints.card import unquantized
from paceline.checkpoints.safetensors_file import Entry
from paceline.errors import LoadError, WeightsError
from paceline.files import read_json

PACKED, SCALES, SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"
GROUP = 32
_SCALE_TYPES = ("F32", "BF16", "F16")
# what else may stand beside a packed matrix -> what it means
_BESIDE = {
    ".weight_zero_point": "asymmetric (it has zero points)",
    ".weight_g_idx": "in an order of its own (actorder)",
    ".weight_global_scale": "4-bit floats (NVFP4)",
}


def unpack(
    entries: dict[str, Entry], expected: Mapping[str, tuple[int, ...]], folder: Path
) -> dict[str, Entry]:
    """Replace each `x.weight_packed` by an int4 `x.weight`, in place; returns the scales by the name of their matrix.

    Raises WeightsError, which names what is packed in another way than symmetric int4 in groups of 32.
    """
    packed = [name.removesuffix(PACKED) for name in entries if name.endswith(PACKED)]
    other = _unlike(folder) if packed else None
    scales = {}
    for at in packed:
        name, data, scale = f"{at}.weight", entries[at + PACKED], entries.get(at + SCALES)
        inputs = expected[name][-1] if name in expected else data.shape[-1] * 8
        why = other or next((what for end, what in _BESIDE.items() if at + end in entries), None)
        why = why or _why_not(data, scale, inputs)
        if why is not None or scale is None:
            raise WeightsError(
                f"{folder}: {name}, packed by compressed-tensors, is {why}, but only symmetric int4 in groups of {GROUP} "
                f"is read: use {unquantized(folder)}, paceline quantizes while loading (--quantize int4)"
            )
        entries[name] = Entry(data.name, data.file, "U8", (*data.shape[:-1], data.shape[-1] * 4), data.nbytes)
        scales[name] = scale
        for end in (PACKED, SCALES, SHAPE):
            entries.pop(at + end, None)
    return scales


def _why_not(data: Entry, scale: Entry | None, inputs: int) -> str | None:
    """What keeps a matrix of `inputs` columns from being int4 in groups, by types and shapes; None: nothing does."""
    if data.dtype != "I32" or len(data.shape) < 2:
        return f"stored as {data.dtype} {list(data.shape)}"
    if scale is None or scale.dtype not in _SCALE_TYPES or len(scale.shape) < 2 or not scale.shape[-1]:
        return "without scales" if scale is None else f"with scales of {scale.dtype} {list(scale.shape)}"
    if data.shape[-1] * 8 != inputs:
        return f"of {data.shape[-1] * 32 / inputs:g} bits"
    if scale.shape[-1] * GROUP == inputs:
        return None
    return "with one scale a row" if scale.shape[-1] == 1 else f"in groups of {inputs / scale.shape[-1]:g}"


def _unlike(folder: Path) -> str | None:
    """What config.json says of the quantization that tensors do not show; None: nothing that matters."""
    try:
        said = (read_json(folder / "config.json") or {}).get("quantization_config")
    except LoadError as error:
        raise WeightsError(str(error)) from error
    groups = said.get("config_groups") if isinstance(said, Mapping) else None
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights: Any = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            if weights.get("symmetric") is False:
                return "asymmetric"
            if weights.get("actorder") not in (None, False, "weight", "static"):  # these two leave no trace
                return f"in an order of its own (actorder {weights['actorder']!r})"
            if weights.get("type", "int") != "int":
                return f"of type {weights['type']!r}"
            if isinstance(group.get("input_activations"), Mapping):
                return "made for quantized activations"
    return None
