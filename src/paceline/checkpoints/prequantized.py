"""Which tool quantized a checkpoint, recognised by the names and types of its tensors, which a config may leave out."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.checkpoints.safetensors_file import Entry

# end of a tensor's name -> what writes such tensors; the first that is found counts
_BY_NAME = (
    (".g_idx", "GPTQ"), (".qzeros", "AWQ or GPTQ"), (".qweight", "AWQ or GPTQ"),
    (".weight_packed", "compressed-tensors (packed integers)"), (".absmax", "bitsandbytes (4 bit)"),
    (".SCB", "bitsandbytes (8 bit)"), (".weight_scale_2", "ModelOpt (NVFP4)"),
    (".weight._data", "quanto"), (".W_q", "HQQ"), (".weight_blocks", "MXFP4"), (".weight_scales", "EETQ"),
)  # fmt: skip


def kind_of(entries: Mapping[str, Entry]) -> str | None:
    """Name of the quantization of these tensors, None for plain ones and for paceline's own."""
    for end, kind in _BY_NAME:
        if any(name.endswith(end) for name in entries):
            return kind
    if any(name.endswith(".scales") for name in entries):
        return "MLX"
    if any(entry.dtype.startswith("F8_") for entry in entries.values()):
        return "FP8 without scales"
    return (
        "int8"
        if any(name.endswith(".weight_scale") and entry.dtype != "F32" for name, entry in entries.items())
        else None
    )
