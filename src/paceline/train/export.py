"""A finished drafter as a folder.

All files are written beside their places first and renamed together at the end: a full disk or a crash leaves
what was there before.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.train.calibration import FILE_NAME as CALIBRATION_FILE
from paceline.train.checkpoint import check_space, disk_errors
from paceline.train.methods.base import Exported, Method
from paceline.train.parallel import DraftModule

WEIGHTS_FILE = "model.safetensors"


def export(method: Method, module: DraftModule, folder: Path, exported: Exported) -> None:
    """Write the drafter into `folder`. CapacityError on a full disk; what was there before then stays as
    it was.
    """
    tensors, configs = method.files(module, exported)
    weights = {name: _stored(tensor, exported.dtype) for name, tensor in tensors.items()}
    check_space(folder, sum(t.nbytes for t in weights.values()) + (8 << 20))
    files: dict[str, Callable[[Path], object]] = {
        WEIGHTS_FILE: lambda path: save_file(weights, path, metadata={"format": "pt"}),
        **{name: _text(_json(config)) for name, config in configs.items()},
    }
    if exported.calibration is not None:
        files[CALIBRATION_FILE] = _text(_json(exported.calibration))
    files |= {name: _text(text) for name, text in exported.texts.items()}
    for name in method.copies if exported.target else ():
        source = exported.target / name  # type: ignore[operator]
        if source.exists():
            files[name] = lambda path, source=source: shutil.copyfile(source, path)  # type: ignore[misc]
    write_folder(folder, files)


def _stored(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (tensor.to(dtype) if tensor.is_floating_point() else tensor).detach().cpu().contiguous()


def publish(source: Path, folder: Path, texts: Mapping[str, str]) -> None:
    """Put the files of an exported drafter and some more texts into `folder`, all or nothing."""
    files: dict[str, Callable[[Path], object]] = {name: _text(text) for name, text in texts.items()}
    for path in source.iterdir():
        files[path.name] = lambda to, path=path: shutil.copyfile(path, to)  # type: ignore[misc]
    write_folder(folder, files)
    shutil.rmtree(source)


def write_folder(folder: Path, files: Mapping[str, Callable[[Path], object]]) -> None:
    """Fill files in a temporary folder inside `folder`, then rename each into place."""
    temporary = folder / f".export-{os.getpid()}"
    with disk_errors(folder, "what was there before is untouched"):
        temporary.mkdir(parents=True, exist_ok=True)
        try:
            for name, write in files.items():
                write(temporary / name)
                with (temporary / name).open("rb") as written:
                    os.fsync(written.fileno())
            for name in files:
                os.replace(temporary / name, folder / name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content, encoding="utf-8")


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
