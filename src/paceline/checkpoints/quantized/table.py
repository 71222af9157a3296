"""The table of layouts, and how entries of a checkpoint are seen through it.

Each row names the ends of the tensors that one linear `x` is stored as: what marks the layout, what must stand beside
it, what may, and what is not needed here. `see` says, of headers and config alone, what the matrix becomes and how.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.quantized import integers as ints
from paceline.checkpoints.quantized import matrices, small_floats
from paceline.checkpoints.quantized.config import Said
from paceline.checkpoints.quantized.integers import Packing
from paceline.checkpoints.quantized.matrices import GROUP, Matrix
from paceline.checkpoints.safetensors_file import Entry
from paceline.errors import WeightsError

FLOATS = ("F32", "BF16", "F16")
SCALE = "_scale"  # after the name of a matrix, as in `loading`


@dataclass(frozen=True, slots=True)
class Place:
    """One linear: its tensors by the ends of their names, and what is said of it."""

    folder: Path
    at: str
    parts: Mapping[str, Entry]
    settings: Said
    shape: tuple[int, ...] | None  # that the config wants, if the linear is known by this name

    def wrong(self, why: str) -> WeightsError:
        return WeightsError(
            f"{self.folder}: {self.at[:120]!a} {why}: download it again, or take another checkpoint of this model"
        )

    def need(self, end: str, types: tuple[str, ...], dims: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a part. Raises WeightsError unless it is of one of these types and numbers of dimensions."""
        entry = self.parts[end]
        if entry.dtype not in types or len(entry.shape) not in dims or 0 in entry.shape:
            shape = ", ".join(str(size) for size in entry.shape[:4])
            raise self.wrong(
                f"has {end[1:]} of {entry.dtype} [{shape}], which is not known of {self.settings.maker}"
            )
        return entry.shape

    def fits(self, right: bool, what: str) -> None:
        if not right:
            shapes = ", ".join(f"{end[1:]} {list(entry.shape)[:4]}" for end, entry in self.parts.items())
            raise self.wrong(f"has tensors that do not fit together ({what}; {shapes})")


@dataclass(frozen=True, slots=True)
class Seen:
    """What a linear becomes: `dtype` as in `Entry` (U8: int4), of `shape` as stored in it; how that is made."""

    dtype: str
    shape: tuple[int, ...]
    words: str  # for a person: "GPTQ, 4 bits, groups of 128"
    parts: tuple[str, ...]  # ends of what the functions are given
    make: Callable[..., Tensor]
    blocks: Callable[..., Tensor | None] | None = None
    scale: tuple[Callable[..., Tensor], tuple[int, ...]] | None = None  # and their shape


@dataclass(frozen=True, slots=True)
class Layout:
    maker: str
    mark: str
    needs: tuple[str, ...]
    see: Callable[[Place], Seen | None]
    stored: tuple[str, ...]  # types of the mark
    may: tuple[str, ...] = ()
    left: tuple[str, ...] = ()  # what may stand beside it and is not read
    methods: tuple[str, ...] = ()  # `quant_method`s that it is of; none: any


def _of_integers(
    place: Place,
    packing: Packing,
    parts: tuple[str, ...],
    open_: Callable[..., Matrix],
    lead: tuple[int, ...],
) -> Seen:
    """`lead`: all of the shape but the inputs."""
    form, words = ints.form_of(packing), f"{place.settings.maker}, {packing.said}"

    def through(write: Callable[..., Any], shape: tuple[int, ...], *more: Any) -> Callable[..., Any]:
        def make(*tensors: Tensor) -> Tensor | None:
            made: Tensor | None = write(open_(*tensors), *more)
            return None if made is None else made.view(shape)

        return make

    whole = (*lead, packing.inputs)
    if form == "U8":
        groups = (*lead, packing.inputs // GROUP)
        scale = through(matrices.int4_scales, groups), groups
        packed = (*lead, packing.inputs // 2)
        return Seen(form, packed, words, parts, through(matrices.int4, packed), scale=scale)
    if form == "I8":
        return Seen(
            form,
            whole,
            words,
            parts,
            through(matrices.int8, whole),
            scale=(through(matrices.int8_scales, lead), lead),
        )
    make = through(matrices.floats, whole, torch.bfloat16 if form == "BF16" else torch.float32)
    row = (*lead, -1)
    blocks = None if form == "BF16" else through(matrices.blocks, row, form)
    return Seen(form, whole, words, parts, make, blocks)


def _gptq(place: Place) -> Seen:
    rows, out = place.need(".qweight", ("I32",), (2,))
    groups, _ = place.need(".scales", FLOATS, (2,))
    rows_of_zeros, zeros = place.need(".qzeros", ("I32",), (2,))
    if ".g_idx" in place.parts:
        place.need(".g_idx", ("I32", "I64"), (1,))
    inputs = (
        place.parts[".g_idx"].shape[0]
        if ".g_idx" in place.parts
        else place.shape[-1]
        if place.shape
        else rows * 32 // place.settings.bits
    )
    bits = rows * 32 // max(1, inputs)
    known = bits in (2, 3, 4, 8) and rows * 32 == inputs * bits and place.parts[".scales"].shape[1] == out
    place.fits(
        known and inputs % groups == 0 and rows_of_zeros == groups and zeros * 32 >= out * bits, "GPTQ"
    )
    ordered = ".g_idx" in place.parts and bool(place.settings.get("desc_act", False))
    # with zero points all in the middle int4 holds the values: config.json says it, and reading sees whether it is so
    packing = Packing(
        bits, inputs, inputs // groups, bool(place.settings.get("sym", False)) or bits < 4, ordered
    )
    first = 0 if place.settings.get("checkpoint_format") == "gptq_v2" else 1
    parts = (".qweight", ".qzeros", ".scales", *((".g_idx",) if ordered else ()))
    return _of_integers(place, packing, parts, ints.of_gptq(bits, first, packing), (out,))


def _awq(place: Place) -> Seen:
    inputs, packed = place.need(".qweight", ("I32",), (2,))
    groups, out = place.need(".scales", FLOATS, (2,))
    if (
        place.settings.get("version", "gemm") not in ("gemm", "GEMM")
        or place.settings.get("bits", place.settings.get("w_bit", 4)) != 4
    ):
        raise place.wrong("is AWQ of another version than gemm with 4 bits, which is not read")
    place.need(".qzeros", ("I32",), (2,))
    place.fits(
        packed * 8 == out and place.parts[".qzeros"].shape == (groups, packed) and inputs % groups == 0, "AWQ"
    )
    packing = Packing(4, inputs, inputs // groups, False)
    return _of_integers(place, packing, (".qweight", ".qzeros", ".scales"), ints.of_awq(packing), (out,))


def _awq_or_gptq(place: Place) -> Seen:
    method = str(place.settings.get("packing_format") or place.settings.get("quant_method") or "")
    if "awq" in method and ".g_idx" not in place.parts:
        return _awq(place)
    return _gptq(place)


def _packed(place: Place) -> Seen:
    """compressed-tensors: pack-quantized, nvfp4-pack-quantized, mxfp4-pack-quantized."""
    if place.parts[".weight_packed"].dtype == "U8":
        return (
            _nvfp4(place, ".weight_packed", ".weight_global_scale")
            if ".weight_global_scale" in place.parts
            else _mxfp4(place)
        )
    out, words = place.need(".weight_packed", ("I32",), (2,))
    groups = place.need(".weight_scale", FLOATS, (2,))
    inputs = place.shape[-1] if place.shape else words * 32 // place.settings.bits
    bits = -(-words * 32 // inputs) if words * 32 % inputs == 0 else place.settings.bits
    place.fits(
        bits in (2, 3, 4, 8)
        and words == -(-inputs * bits // 32)
        and groups[0] == out
        and inputs % groups[1] == 0,
        f"{bits} bits",
    )
    ends = tuple(end for end in (".weight_zero_point", ".weight_g_idx") if end in place.parts)
    if ".weight_zero_point" in ends:
        zeros = place.need(".weight_zero_point", ("I32", "I8", "U8"), (2,))
        rows = -(-out * bits // 32) if place.parts[".weight_zero_point"].dtype == "I32" else out
        place.fits(zeros == (rows, groups[1]), "zero points")
    if ".weight_g_idx" in ends:
        place.fits(place.need(".weight_g_idx", ("I32", "I64"), (1,)) == (inputs,), "g_idx")
    packing = Packing(
        bits, inputs, inputs // groups[1], ".weight_zero_point" not in ends, ".weight_g_idx" in ends
    )
    return _of_integers(
        place,
        packing,
        (".weight_packed", ".weight_scale", *ends),
        ints.of_packed(bits, packing, ends),
        (out,),
    )


def _nvfp4(place: Place, data: str, whole: str) -> Seen:
    divided = whole == ".weight_global_scale"
    out, half = place.need(data, ("U8",), (2,))
    place.need(".weight_scale", ("F8_E4M3",), (2,))
    place.need(whole, FLOATS, (0, 1))
    place.fits(
        place.parts[".weight_scale"].shape == (out, half // 8)
        and half % 8 == 0
        and place.parts[whole].shape in ((), (1,)),
        "NVFP4",
    )
    parts, words = (
        (data, ".weight_scale", whole),
        f"{place.settings.maker}, NVFP4: 4-bit floats, groups of 16",
    )
    if half % 32:

        def rounded(*tensors: Tensor) -> Tensor:
            return small_floats.nvfp4_floats(divided)(*tensors).bfloat16()

        return Seen("BF16", (out, 2 * half), words, parts, rounded)
    beside = small_floats.nvfp4_beside(divided), (out,)
    return Seen(
        "NVFP4",
        (out, 2 * half),
        words,
        parts,
        small_floats.nvfp4_floats(divided),
        small_floats.nvfp4_blocks,
        beside,
    )


def _modelopt_nvfp4(place: Place) -> Seen:
    return _nvfp4(place, ".weight", ".weight_scale_2")


def _mxfp4(place: Place) -> Seen:
    data, scale = (
        (".weight_packed", ".weight_scale") if ".weight_packed" in place.parts else (".weight", ".scales")
    )
    shape = place.need(data, ("U8", "U32"), (2, 3))
    values = shape[-1] * (8 if place.parts[data].dtype == "U32" else 2)
    place.need(scale, ("U8",), (2, 3))
    whole, groups = (*shape[:-1], values), (*shape[:-1], values // 32)
    place.fits(place.parts[scale].shape == groups and values % 32 == 0, "MXFP4")

    def blocks(data: Tensor, scale: Tensor) -> Tensor:
        return small_floats.mxfp4_blocks(data.view(torch.uint8), scale).view(*shape[:-1], -1)

    def make(data: Tensor, scale: Tensor) -> Tensor:
        return matrices.from_blocks("MXFP4", blocks(data, scale)).bfloat16()

    return Seen(
        "MXFP4",
        whole,
        f"{place.settings.maker}, MXFP4: 4-bit floats, groups of 32",
        (data, scale),
        make,
        blocks,
    )


def _float8(place: Place) -> Seen | None:
    """8-bit floats with a scale for the matrix, a row, or a block of rows and columns."""
    out, inputs = place.need(".weight", ("F8_E4M3", "F8_E5M2"), (2,))
    end = next(
        (
            suffix
            for suffix in (".weight_scale_inv", ".weight_scale", ".qscale_weight")
            if suffix in place.parts
        ),
        "",
    )
    if not end:
        return None
    shape = place.need(end, FLOATS, (0, 1, 2))
    across = shape[1] if len(shape) == 2 else 1
    down = shape[0] if shape else 1
    block, words = (out if down == 1 else 1, inputs), "one scale a row" if down == out > 1 else "one scale"
    if across > 1 or 1 < down < out:
        block = place.settings.block
        words = f"blocks of {block[0]} x {block[1]}"
    elif end == ".weight_scale_inv" and down == 1:
        block = (max(out, place.settings.block[0]), max(inputs, place.settings.block[1]))
        place.fits(
            (out <= place.settings.block[0] and inputs <= place.settings.block[1]) or len(shape) < 2,
            "a block has one scale",
        )
    place.fits((down, across) == (-(-out // block[0]), -(-inputs // block[1])), f"8-bit floats, {words}")
    parts = (".weight", end)

    def make(data: Tensor, scale: Tensor) -> Tensor:
        return small_floats.widened(data, scale.reshape(down, across), block)

    return Seen("BF16", (out, inputs), f"{place.settings.maker}, 8-bit floats, {words}", parts, make)


def _bytes(place: Place) -> Seen:
    """int8 with a scale for the matrix, a row, or each group of it."""
    out, inputs = place.need(".weight", ("I8",), (2,))
    shape = place.need(".weight_scale", FLOATS, (0, 1, 2))
    groups = shape[1] if len(shape) == 2 else 1
    place.fits((not shape or shape[0] in (1, out)) and inputs % groups == 0, "int8")
    zero = tuple(end for end in (".weight_zero_point",) if end in place.parts)
    if zero:
        place.fits(place.need(zero[0], ("I8", "I32"), (0, 1, 2)) == shape, "zero points")
    packing = Packing(8, inputs, inputs // groups, not zero)
    return _of_integers(place, packing, (".weight", ".weight_scale", *zero), ints.of_bytes(packing), (out,))


def _bitsandbytes8(place: Place) -> Seen:
    out, inputs = place.need(".weight", ("I8",), (2,))
    place.fits(place.need(".SCB", FLOATS, (1,)) == (out,), "8 bits")
    packing = Packing(8, inputs, inputs, True)
    return _of_integers(place, packing, (".weight", ".SCB"), ints.of_bytes(packing, 1 / 127), (out,))


def _bitsandbytes4(place: Place) -> Seen:
    size = place.parts[".weight"].nbytes
    place.need(".weight", ("U8",), (2,))
    runs = place.need(".weight.absmax", ("U8", "F32"), (1,))[0]
    place.need(".weight.quant_map", ("F32",), (1,))
    state = next((end for end in place.parts if ".quant_state." in end), None)
    if state is None or place.shape is None or len(place.shape) != 2:
        raise place.wrong("is stored in 4 bits without a known shape, or without its quant_state")
    place.fits(2 * size == place.shape[0] * place.shape[1], "4 bits")
    kind = state.rpartition("__")[2]
    twice = ".weight.nested_absmax" in place.parts
    ends = tuple(end for end in place.parts if end != ".weight")
    make = small_floats.bitsandbytes_floats(place.shape, ends)
    words = f"{place.settings.maker}, {kind[:8]}: 4 bits, groups of {2 * size // runs}"
    words += ", scales quantized too" if twice else ""
    return Seen("BF16", place.shape, words, (".weight", *ends), make)


def _mlx(place: Place) -> Seen:
    if ".biases" not in place.parts:
        return _mxfp4(place)
    shape, groups = place.need(".weight", ("U32",), (2, 3)), place.need(".scales", FLOATS, (2, 3))
    size = place.settings.get("group_size", 64)
    inputs = (
        place.shape[-1]
        if place.shape
        else groups[-1] * (size if isinstance(size, int) and 0 < size <= 1024 else 64)
    )
    bits = shape[-1] * 32 // max(1, inputs)
    fit = shape[:-1] == groups[:-1] and place.parts[".biases"].shape == groups and inputs % groups[-1] == 0
    place.fits(fit and bits in (2, 3, 4, 5, 6, 8) and shape[-1] * 32 == inputs * bits, "MLX")
    packing = Packing(bits, inputs, inputs // groups[-1], False, added=True)
    return _of_integers(
        place, packing, (".weight", ".scales", ".biases"), ints.of_mlx(bits, packing), shape[:-1]
    )


def _hqq(place: Place) -> Seen:
    rows, columns = place.need(".W_q", ("U8",), (2,))
    scale = place.need(".scale", FLOATS, (2,))
    if place.shape is None or len(place.shape) != 2:
        raise place.wrong("is stored by HQQ without a known shape")
    values = place.shape[0] * place.shape[1]
    bits = 8 * rows * columns // values
    whole = (rows * 8 // bits, columns) if bits in (1, 2, 4, 8) else (0, 0)
    fit = scale in ((whole[0], 1), (1, columns)) and place.need(".zero", FLOATS, (2,)) == scale
    place.fits(fit and whole[0] * columns == values, "HQQ")
    words = f"HQQ, {bits} bits, groups of {values // max(scale)}"
    return Seen("BF16", place.shape, words, (".W_q", ".scale", ".zero"), ints.hqq_floats(bits, place.shape))


_HQQ = tuple(f".{key}" for key in (
    "nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float", "quant_scale", "quant_zero",
    "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize",
    "round_zero",
))  # fmt: skip
_STATE = tuple(f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_INPUTS = (
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".qscale_act",
)
LAYOUTS = (
    Layout("GPTQ", ".qweight", (".qzeros", ".scales"), _awq_or_gptq, ("I32",), (".g_idx",)),
    Layout("compressed-tensors", ".weight_packed", (".weight_scale",), _packed, ("I32", "U8"),
           (".weight_zero_point", ".weight_g_idx", ".weight_global_scale"), (".weight_shape", *_INPUTS)),
    Layout("ModelOpt", ".weight", (".weight_scale", ".weight_scale_2"), _modelopt_nvfp4, ("U8",), (), _INPUTS),
    Layout("fp8", ".weight", (), _float8, ("F8_E4M3", "F8_E5M2"),
           (".weight_scale_inv", ".weight_scale", ".qscale_weight"), _INPUTS),
    Layout("compressed-tensors", ".weight", (".weight_scale",), _bytes, ("I8",), (".weight_zero_point",), _INPUTS),
    Layout("bitsandbytes", ".weight", (".SCB",), _bitsandbytes8, ("I8",), (), (".weight_format",)),
    Layout("bitsandbytes", ".weight", (".weight.absmax", ".weight.quant_map"), _bitsandbytes4, ("U8",),
           (".weight.nested_absmax", ".weight.nested_quant_map", *_STATE)),
    Layout("HQQ", ".W_q", (".scale", ".zero"), _hqq, ("U8",), (), _HQQ),
    Layout("MLX", ".weight", (".scales",), _mlx, ("U32",), (".biases",)),
)  # fmt: skip


def see_quantized(
    entries: dict[str, Entry], expected: Mapping[str, tuple[int, ...]], folder: Path
) -> tuple[dict[str, Entry], Counter[str]]:
    """Put one `x.weight` in the place of the tensors of each quantized linear: (scales by the name of their matrix, how
    many matrices are stored how). Raises WeightsError for what does not fit together."""
    scales, kinds = dict[str, Entry](), Counter[str]()
    settings: Said | None = None
    for layout in LAYOUTS:
        for mark in [
            name
            for name, entry in entries.items()
            if name.endswith(layout.mark) and entry.dtype in layout.stored
        ]:
            at = mark.removesuffix(layout.mark)
            if entries[mark].make is not None or not all(at + end in entries for end in layout.needs):
                continue
            settings = settings or Said.of(folder)
            if settings.own:
                return {}, kinds
            ends = (layout.mark, *layout.needs, *(end for end in layout.may if at + end in entries))
            parts = {end: entries[at + end] for end in ends}
            name = f"{at}.weight"
            place = Place(folder, at, parts, settings.made_by(layout.maker), expected.get(name))
            seen = layout.see(place)
            if seen is None:
                continue
            for end in (*ends, *layout.left):
                entries.pop(at + end, None)
            entries[name], scale = _entries(name, parts, seen)
            kinds[f"{seen.words}; kept as {KEPT.get(seen.dtype, seen.dtype.lower())}"] += 1
            if scale is not None:
                scales[name] = scale
    return scales, kinds


KEPT = {"U8": "int4", "I8": "int8", "BF16": "bfloat16"}


def _guarded(make: Callable[..., Any], name: str, folder: Path) -> Callable[..., Any]:
    """The same, whose errors are our own: numbers that fit by their shapes alone."""

    def guarded(*tensors: Tensor) -> Any:
        try:
            return make(*tensors)
        except WeightsError as error:
            raise WeightsError(f"{folder}: {name}: {error}") from error
        except (RuntimeError, IndexError, ValueError, TypeError, KeyError) as error:
            raise WeightsError(f"{folder}: {name} cannot be unpacked: download it again") from error

    return guarded


def _entries(name: str, parts: Mapping[str, Entry], seen: Seen) -> tuple[Entry, Entry | None]:
    given = tuple(parts[end] for end in seen.parts)
    first, size = given[0], sum(part.nbytes for part in parts.values())
    guard = partial(_guarded, name=name, folder=first.file.parent)
    blocks = None if seen.blocks is None else guard(seen.blocks)
    data = Entry(name, first.file, seen.dtype, seen.shape, size, given, make=guard(seen.make), blocks=blocks)
    if seen.scale is None:
        return data, None
    make, shape = seen.scale
    return data, replace(data, dtype="F32", shape=shape, nbytes=0, make=guard(make), blocks=None)
