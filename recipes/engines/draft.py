"""The files that the engines read: a GGUF file and the same weights as a folder, and a draft model for them.

SmolLM2 has no smaller sibling in a package. Its draft model here is SmolLM2 itself with all matrices rounded to 4
bits, in groups of 32: it has the vocabulary, agrees often and not always. That is what a test of losslessness
needs; a draft model that pays would be smaller.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file

from paceline.chat.options import asked_of
from paceline.chat.road import Chats
from paceline.hub.resolve import smollm2
from paceline.text.formats.choose import load_tokenizer

REAL = {"coder": ("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf")}
GROUP, LEVELS = 32, 7
Kind = Literal["gguf", "q8_0", "folder"]


@dataclass(frozen=True)
class Files:
    """Where target and draft lie, as a GGUF file and as a folder of the same weights in float32."""

    gguf: Path
    folder: Path
    draft_gguf: Path
    draft_folder: Path
    plain_blocks: Path  # a GGUF file in q8_0, for engines that do not read the target's own blocks rightly
    foreign: Path = Path(
        str(resources.files("paceline") / "demo" / "draft")
    )  # a small model of another vocabulary

    def target(self, kind: Kind) -> Path:
        return {"gguf": self.gguf, "q8_0": self.plain_blocks, "folder": self.folder}[kind]

    def draft(self, kind: Kind) -> Path:
        return self.draft_folder if kind == "folder" else self.draft_gguf


class Talk:
    """A model's template and tokenizer, without its weights: prompts as tokens, and tokens as words."""

    def __init__(self, gguf: Path) -> None:
        self.tokenizer = load_tokenizer(gguf, "auto")
        self._chats = Chats.of(self.tokenizer)

    def prompt(self, text: str) -> list[int]:
        return [*self._chats.prompt(asked_of(self._chats, [{"role": "user", "content": text}], {})).ids]


def convert(source: Path, to: Path, *flags: str) -> Path:
    """`paceline convert`, unless it was done before."""
    if not to.exists():
        to.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "paceline", "convert", str(source), "-o", str(to), *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return to


def round_matrices(source: Path, to: Path) -> Path:
    """A copy of a folder whose matrices have 15 values in each group of 32 columns.

    The weights are written last, so half a copy is made again.
    """
    if not (to / "model.safetensors").exists():
        to.mkdir(parents=True, exist_ok=True)
        for path in source.iterdir():
            if path.suffix != ".safetensors":
                (to / path.name).write_bytes(path.read_bytes())
        weights = load_file(source / "model.safetensors")
        rounded = {
            name: _rounded(w) if w.ndim == 2 and "embed" not in name else w for name, w in weights.items()
        }
        save_file(rounded, to / "model.safetensors", metadata={"format": "pt"})
    return to


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    groups = weight.float().reshape(weight.shape[0], -1, GROUP)
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / LEVELS
    return ((groups / scale).round() * scale).reshape(weight.shape).to(weight.dtype).contiguous()


def prepare(model: str, work: Path) -> Files | None:
    """All files of a model, made where they are missing. None: its weights are not on this machine."""
    files = work / "files"
    if model == "smollm2":
        gguf = smollm2()
        folder = convert(gguf, files / "smollm2-f32", "--to", "f32")
        draft = round_matrices(folder, files / "smollm2-rounded")
        small = convert(draft, files / "smollm2-rounded.gguf", "--to", "q8_0")
        return Files(gguf, folder, small, draft, convert(folder, files / "smollm2-q8_0.gguf", "--to", "q8_0"))
    target, draft_file = (Path.home() / ".cache" / "paceline" / "real" / name for name in REAL[model])
    if not (target.exists() and draft_file.exists()):
        return None
    return Files(
        target,
        convert(target, files / target.stem, "--to", "f32"),
        draft_file,
        convert(draft_file, files / draft_file.stem),
        target,
    )
