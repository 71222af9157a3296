"""A model folder -> named tensors, each used exactly once, and `Weight`s made of them.

Only safetensors and GGUF files are read, memory-mapped; of a GGUF model the "folder" is its file. Pickles are
refused, and code named by `auto_map` is never looked at. What a checkpoint holds beyond the language model (vision and
audio towers, K/V of layers that share another's) is skipped by name and listed in `Tensors.skipped`; anything else that
is not expected is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.checkpoints.card import unquantized
from paceline.checkpoints.experts import fuse
from paceline.checkpoints.foreign import OTHER_FILES, PICKLES, incomplete
from paceline.checkpoints.gguf.blocks import DEQUANTIZERS
from paceline.checkpoints.gguf.reader import is_gguf
from paceline.checkpoints.gguf.source import GgufCheckpoint
from paceline.checkpoints.interleaved import put_in_order
from paceline.checkpoints.quantized.table import see_quantized
from paceline.checkpoints.safetensors_file import Entry, broken, read_header
from paceline.checkpoints.spellings import usual
from paceline.drafter_kinds import KINDS as DRAFTER_KINDS
from paceline.errors import LoadError, WeightsError
from paceline.files import read_json
from paceline.ops.base import LowRank, Weight, WeightKind
from paceline.ops.blocks import BLOCKS as BLOCK_KINDS
from paceline.ops.reference import dequantize

Shapes = dict[str, tuple[int, ...]]
Transform = Callable[[str, Weight], Weight]
Rename = Callable[[str], str | None]  # what a tensor is called; None: it is not looked at

WHOLE = "model.safetensors"
PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "backbone.")
MIDLAYER = "midlayer."  # how EAGLE-3 names its only layer
# towers of other modalities, and the rotary frequencies that old versions of transformers stored
SKIPPED = re.compile(
    r"(visual|vision_tower|vision_adapter|vision_projection|audio_tower|embed_vision|embed_audio|vision_embedder|multi_modal_projector)\."
    r"|layers\.\d+\.self_attn\.rotary_emb\.inv_freq$|verifier_(norm|lm_head)\."
)
# what only a drafter inside of a target's own files has, beside its other tensors
_INSIDE = "|".join(re.escape(begin) for kind in DRAFTER_KINDS.values() for begin in kind.tensors)
MODULE = re.compile(rf"({_INSIDE}|layers\.\d+\.(?=enorm\.|hnorm\.|eh_proj\.|shared_head\.)).+")
SHARED_KV = re.compile(r"layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.weight$")
FLOATS = ("F32", "BF16", "F16")
INTEGERS = {
    "token_ordering": ("I64", "I32"),
    "d2t": ("I64", "I32"),
    "t2d": ("BOOL", "U8", "I64"),
}  # by a name's end
BLOCKS = (*(kind for kind in DEQUANTIZERS if kind not in FLOATS), "mixed")  # of GGUF files
QUANTIZED = (
    "I8",
    "U8",
)  # int8, and int4 two values a byte; stored beside `<name>_scale`, see convert/quantized.py
SCALE = "_scale"
KINDS: Mapping[torch.dtype, WeightKind] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
INT4_GROUP = 32
NAMED_AT_MOST = 4  # tensors listed in one message


def find_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: the whole one, else those that the index names, or the single one.

    A whole file beside an index comes first, as transformers takes it: the index may be left over.
    """
    index, whole = folder / "model.safetensors.index.json", folder / WHOLE
    if whole.is_file():
        return [whole]
    if index.is_file():
        return [folder / name for name in sorted(set(_read_index(index).values()))]
    files = [p for p in sorted(folder.glob("*.safetensors")) if not p.name.startswith("adapter_")]
    if len(files) == 1:
        return files
    if files:
        raise WeightsError(
            f"{folder} has {len(files)} safetensors files and no {index.name}: download the index too"
        )
    pickles = sorted(p.name for pattern in PICKLES for p in folder.glob(pattern))
    if pickles:
        raise WeightsError(
            f"{folder} has only pickled weights ({pickles[0]}), which can run code when opened: where you "
            "trust them, convert them with AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    raise WeightsError(f"{folder} has no .safetensors file: {_why_no_weights(folder)}")


def has_no_weights(folder: Path) -> bool:
    """Whether a folder has a config and nothing that could be weights, not even the beginning of a download."""
    patterns = ("*.safetensors*", *PICKLES, *(pattern for pattern, _ in OTHER_FILES))
    return folder.is_dir() and not incomplete(folder) and not any(any(folder.glob(p)) for p in patterns)


def _why_no_weights(folder: Path) -> str:
    """What may have happened to a folder that has a config but no weights, and what to do."""
    if incomplete(folder):
        return "the download is not complete, run `hf download` again, it goes on where it stopped"
    return "download the weights too, for instance with `hf download`"


def _read_index(path: Path) -> dict[str, str]:
    try:
        names: Any = (read_json(path) or {}).get("weight_map")
    except LoadError as error:
        raise WeightsError(str(error)) from error
    ok = isinstance(names, dict) and all(
        isinstance(f, str) and f.endswith(".safetensors") for f in names.values()
    )
    if not ok or any(Path(f).name != f for f in names.values()):
        raise broken(path, "its weight_map does not name safetensors files beside it")
    return dict(names)


def read_entries(folder: Path) -> dict[str, Entry]:
    """Canonical name -> tensor, over all files. WeightsError for damage, duplicates and a wrong index."""
    if is_gguf(folder):
        held = GgufCheckpoint(folder)
        return {
            name: Entry(name, folder, held.kind(name), piece.shape, held.nbytes(name))
            for name, piece in held.pieces.items()
        }
    entries: dict[str, Entry] = {}
    stored: dict[str, Path] = {}
    for path in find_files(folder):
        if not path.exists():
            raise WeightsError(
                f"{path} is named in the index but missing: the download is not complete, run `hf download` again"
            )
        for entry in read_header(path):
            name = canonical(entry.name)
            if name in entries:
                other = entries[name]
                raise WeightsError(
                    f"the tensor {name} is there twice: as {other.name} in {other.file.name} and as "
                    f"{entry.name} in {path.name}; remove one"
                )
            entries[name], stored[entry.name] = entry, path
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / WHOLE).is_file():
        for name, file in _read_index(index).items():
            if stored.get(name) != folder / file:
                raise WeightsError(f"{index} puts {name} into {file}, where it is not: download both again")
    return entries


def canonical(name: str) -> str:
    """Name without the prefix that depends on how the language model is nested, in the usual spelling."""
    prefix = next((p for p in PREFIXES if name.startswith(p)), "")
    name = name[len(prefix) :]
    return usual(name if not name.startswith(MIDLAYER) else f"layers.0.{name[len(MIDLAYER) :]}")


class Tensors:
    """The checked tensors of one model. `take` hands each out once; `finish` insists that none is left."""

    def __init__(
        self,
        folder: Path,
        expected: Shapes,
        shared_layers: Iterable[int] = (),
        tied: bool = False,
        rename: Rename | None = None,
    ) -> None:
        """Raises WeightsError unless the folder holds exactly `expected`, besides what may be skipped."""
        entries = read_entries(folder)
        modules = modules_of(entries) if rename is None else ()
        if rename is not None:
            entries = {new: entry for name, entry in entries.items() if (new := rename(name)) is not None}
        self.folder, shared = folder, set(shared_layers)
        # `quantized`: how many matrices another tool stored how
        self.scales, self.quantized = see_quantized(entries, expected, folder)
        self.scales |= {
            name: entries.pop(name + SCALE)
            for name, entry in list(entries.items())
            if entry.dtype in QUANTIZED and name + SCALE in entries
        }
        put_in_order(entries, folder)
        for some in (entries, self.scales):
            fuse(some, expected)
        self.skipped = {
            n: e
            for n, e in entries.items()
            if n not in expected and (may_skip(n, shared) or n.startswith(modules))
        }
        self.entries = {n: e for n, e in entries.items() if n not in self.skipped}
        self._files: dict[Path, Any] = {}
        head = self.entries.pop("lm_head.weight", None) if tied else None
        if head is not None and "embed_tokens.weight" not in self.entries:
            self.entries["embed_tokens.weight"], head = head, None  # one of the two names is enough
        self._check(expected)
        if head is not None:
            self._check_tied(head)

    @property
    def _said(self) -> str:
        return "its metadata" if is_gguf(self.folder) else "config.json"

    @property
    def _again(self) -> str:
        return "get another GGUF file" if is_gguf(self.folder) else "download both again, from one revision"

    def _check(self, expected: Shapes) -> None:
        missing = [n for n in expected if n not in self.entries]
        extra = [n for n in self.entries if n not in expected]
        quantized = kind_of(self.entries)
        if quantized is not None:
            raise WeightsError(
                f"{self.folder}: weights quantized by {quantized} are not supported: use {unquantized(self.folder)}, "
                "paceline quantizes while loading (--quantize int4)"
            )
        if missing or extra:
            parts = [f"{len(names)} {what} ({_some(names)})" for what, names in
                     (("missing", missing), ("that it does not describe", extra)) if names]  # fmt: skip
            raise WeightsError(
                f"{self.folder}: the weights do not fit {self._said}: {' and '.join(parts)}; {self._again}"
            )
        for name, shape in expected.items():
            entry = self.entries[name]
            if name in self.scales:
                self._check_quantized(name, entry, shape)
                continue
            if entry.shape != shape:
                raise WeightsError(
                    f"{self.folder}: {name} has shape {list(entry.shape)} where {self._said} needs {list(shape)}: "
                    f"{self._again}"
                )
            wanted = next(
                (kinds for key, kinds in INTEGERS.items() if name.endswith(key)), (*FLOATS, *BLOCKS)
            )
            if entry.dtype not in wanted:
                raise WeightsError(
                    f"{self.folder}: {name} has dtype {entry.dtype}, not one of {', '.join(wanted)}"
                )

    def _check_quantized(self, name: str, entry: Entry, shape: tuple[int, ...]) -> None:
        packed = entry.dtype == "U8"  # two a byte; others have a scale for each row
        stored = (*shape[:-1], shape[-1] // 2) if packed else shape
        scales = (*shape[:-1], shape[-1] // INT4_GROUP) if packed else shape[:-1]
        if (
            entry.shape != stored
            or self.scales[name].shape != scales
            or self.scales[name].dtype not in FLOATS
        ):
            raise WeightsError(
                f"{self.folder}: {name} is quantized as {list(entry.shape)} with scales "
                f"{list(self.scales[name].shape)} where config.json needs {list(stored)} with {list(scales)}: "
                "the folder is of another model, or was quantized in another way: quantize the original again"
            )

    def _check_tied(self, head: Entry) -> None:
        table = self.entries["embed_tokens.weight"]
        if head.shape != table.shape or not torch.equal(self._read(head), self._read(table)):
            raise WeightsError(
                f"{self.folder}: {self._said} ties lm_head to the embedding, but the two tensors differ: "
                'set "tie_word_embeddings": false if the head was trained apart'
            )

    def take(self, name: str) -> Tensor:
        """The tensor, memory-mapped, on the CPU. A name can be taken once."""
        return self._read(self.entries.pop(name))

    def take_scale(self, name: str) -> Tensor | None:
        """The scales of a quantized tensor that `take` gives as integers, as float32; None for any other."""
        if name not in self.scales or self.entries[name].dtype not in QUANTIZED:
            return None
        return self._read(self.scales[name]).float()

    def _read(self, entry: Entry) -> Tensor:
        from safetensors import SafetensorError, safe_open

        if entry.parts:
            parts = [self._read(part) for part in entry.parts]
            if entry.make is not None:
                return entry.make(*parts)
            return (parts[0] if len(parts) == 1 else torch.cat(parts, entry.axis)).view(entry.shape)
        if is_gguf(entry.file):
            return self._gguf(entry.file).tensor(entry.name)
        try:
            if entry.file not in self._files:
                self._files[entry.file] = safe_open(entry.file, framework="pt", device="cpu")
            data: Tensor = self._files[entry.file].get_tensor(entry.name)
            return data if data.dtype != torch.int32 or entry.dtype != "U8" else data.view(torch.uint8)
        except (OSError, SafetensorError) as error:
            raise broken(entry.file, str(error)) from error

    def take_blocks(self, name: str) -> tuple[Tensor, WeightKind, Tensor | None] | None:
        """(blocks as files hold them, uint8 [..., out, bytes of a row], their kind, what the scales of each row are
        multiplied with); None if it has other values, or some that such blocks cannot hold."""
        entry = self.entries[name]
        kind: Any = entry.dtype.lower()
        if kind not in BLOCK_KINDS:
            return None
        made = self._blocks(entry)
        if made is None:
            return None
        del self.entries[name]
        if is_gguf(entry.file):
            beside = self._gguf(entry.file).beside(entry.name)
            return made, kind, None if beside is None else torch.from_numpy(beside)
        return made, kind, self._read(self.scales[name]) if name in self.scales else None

    def _blocks(self, entry: Entry) -> Tensor | None:
        if is_gguf(entry.file):
            return torch.from_numpy(self._gguf(entry.file).blocks(entry.name))
        if entry.blocks is not None:
            return entry.blocks(*(self._read(part) for part in entry.parts))
        parts = [self._blocks(part) for part in entry.parts]
        whole = [part for part in parts if part is not None]
        return (
            torch.cat(whole, entry.axis).view(*entry.shape[:-1], -1)
            if whole and len(whole) == len(parts)
            else None
        )

    def _gguf(self, path: Path) -> GgufCheckpoint:
        if path not in self._files:
            self._files[path] = GgufCheckpoint(path)
        return self._files[path]  # type: ignore[no-any-return]

    def finish(self) -> None:
        assert not self.entries, f"never used: {_some(list(self.entries))}"


def may_skip(name: str, shared_layers: set[int]) -> bool:
    shared = SHARED_KV.fullmatch(name)
    return SKIPPED.match(name) is not None or (shared is not None and int(shared[1]) in shared_layers)


def modules_of(names: Iterable[str]) -> tuple[str, ...]:
    """The beginnings of names of what predicts further tokens, in the files of a target."""
    return tuple({match[1] for name in names if (match := MODULE.fullmatch(name))})


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMED_AT_MOST]) + (", ..." if len(names) > NAMED_AT_MOST else "")


class TensorSource(Protocol):
    """What `Weights` takes tensors of: a checkpoint's `Tensors`, or those that are held already."""

    @property
    def folder(self) -> Path: ...

    @property
    def skipped(self) -> dict[str, Entry]: ...

    @property
    def entries(self) -> Mapping[str, object]: ...

    def take(self, name: str) -> Tensor: ...

    def take_scale(self, name: str) -> Tensor | None: ...

    def take_blocks(self, name: str) -> tuple[Tensor, WeightKind, Tensor | None] | None: ...


class Weights:
    """Takes tensors as `Weight`s and float32 vectors on one device."""

    def __init__(
        self,
        tensors: TensorSource,
        device: torch.device,
        dtype: torch.dtype | None = None,
        transform: Transform | None = None,
        blocks: bool = False,
    ) -> None:
        """`dtype` None keeps matrices as stored. `transform(name, weight)` may quantize or repack each.

        `blocks`: those of a GGUF file stay as they are if nothing is done to them, else they are float32.
        """
        self.device, self.folder, self.skipped = device, tensors.folder, tensors.skipped
        self._tensors, self._dtype, self._transform = tensors, dtype, transform
        self.adapted: Mapping[str, tuple[LowRank | None, ...]] = {}  # what adapters add, by matrix
        self._blocks = blocks and transform is None and (dtype is None or device.type == "cuda")

    def matrix(self, name: str) -> Weight:
        weight, adapted = self._plain(name), self.adapted.get(name, ())
        return replace(weight, adapted=adapted) if adapted else weight

    def _plain(self, name: str) -> Weight:
        if self._blocks and (blocks := self._tensors.take_blocks(f"{name}.weight")):
            return self._of_blocks(*blocks)
        scale = self._tensors.take_scale(f"{name}.weight")
        return self._weight(name, self._tensors.take(f"{name}.weight"), scale)

    def stack(self, name: str) -> tuple[Weight, ...]:
        """[E, out, in] as E matrices, named `name.0` and so on."""
        if self._blocks and (blocks := self._tensors.take_blocks(name)):
            data, kind, beside = blocks
            return tuple(
                self._of_blocks(part, kind, None if beside is None else beside[i])
                for i, part in enumerate(data)
            )
        scale, parts = self._tensors.take_scale(name), self._tensors.take(name)
        scales = [None] * len(parts) if scale is None else list(scale)
        return tuple(
            self._weight(f"{name}.{i}", part, own_scale)
            for i, (part, own_scale) in enumerate(zip(parts, scales))
        )

    def unpacked(self, name: str) -> Weight:
        """A matrix as floats, in whatever form it is stored: for what takes it apart."""
        scale, data = self._tensors.take_scale(f"{name}.weight"), self._tensors.take(f"{name}.weight")
        if scale is not None:
            kind: WeightKind = "int8" if data.dtype == torch.int8 else "int4"
            data = dequantize(Weight(data, kind, scale), None, torch.float32)
        return self._weight(name, data, None)

    def _of_blocks(self, data: Tensor, kind: WeightKind, beside: Tensor | None) -> Weight:
        return Weight(
            data.to(self.device), kind, None if beside is None else beside.to(self.device, torch.float32)
        )

    def _weight(self, name: str, data: Tensor, scale: Tensor | None) -> Weight:
        if scale is not None:
            kind: WeightKind = "int8" if data.dtype == torch.int8 else "int4"
            weight = Weight(data.to(self.device), kind, scale.to(self.device))
        else:
            data = data.to(self.device, self._dtype or data.dtype)
            weight = Weight(data, KINDS[data.dtype])
        return weight if self._transform is None else self._transform(name, weight)

    def remade(self, name: str, weight: Weight) -> Weight:
        """A matrix of another model as one of that `name` would be loaded, if it is of floats."""
        if self._transform is None or weight.kind not in KINDS.values():
            return weight
        return self._transform(name, weight)

    def vector(self, name: str) -> Tensor:
        """A scale as float32, rounded to the weights' dtype first if one is forced."""
        data = self._tensors.take(name)
        return data.to(self._dtype or data.dtype).to(self.device, torch.float32)

    def exact(self, name: str) -> Tensor:
        """As float32, whatever dtype is forced: what choices hang on."""
        return self._tensors.take(name).to(self.device, torch.float32)

    def table(self, name: str) -> Tensor:
        """As stored, mapped and on the host: of which few rows are read at a time."""
        return self._tensors.take(name)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name that has not been taken."""
        return name in self._tensors.entries

    def norm(self, name: str) -> Tensor:
        return self.vector(f"{name}.weight")

    def ids(self, name: str) -> Tensor:
        return self._tensors.take(name).to(self.device, torch.int64)


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
