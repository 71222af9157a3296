"""What the machine says of itself: read bandwidth, energy, memory, versions. Missing meters are None, never
zero.
"""

from __future__ import annotations

import platform
import resource
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RAPL = Path("/sys/class/powercap")


def read_bandwidth(megabytes: int = 256, seconds: float = 0.6) -> float:
    """Bytes per second that a sum over a large float32 array reads, the best of what fits in `seconds`."""
    data = torch.ones(megabytes * 262144, dtype=torch.float32)
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        data.sum()
        best = max(best, data.nbytes / (time.perf_counter() - begin))
    return best


def peak_memory(device: torch.device) -> int:
    """Bytes: of the process on CPU, of the allocator on a GPU, since the start."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True, slots=True)
class EnergyMeter:
    """Cumulative joules of this machine's processor packages (RAPL), or of one GPU (NVML)."""

    source: str
    files: tuple[Path, ...] = ()
    handle: Any = None  # NVML device

    @property
    def resolution(self) -> float:
        """Seconds that a measurement should last: the counters move at every millisecond, or only ten times a second."""
        return 0.02 if self.handle is None else 0.5

    @classmethod
    def find(cls, device: torch.device) -> EnergyMeter | None:
        """The meter of `device`, or None where nothing readable reports."""
        if device.type == "cuda":
            return cls._nvml(device)
        files = tuple(sorted(RAPL.glob("intel-rapl:[0-9]/energy_uj")))
        try:
            for file in files:
                int(file.read_text())
        except (OSError, ValueError):
            return None
        return cls("RAPL package", files) if files else None

    @classmethod
    def _nvml(cls, device: torch.device) -> EnergyMeter | None:
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(device.index or 0)
            pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except pynvml.NVMLError:
            return None
        return cls("NVML", handle=handle)

    def read(self) -> list[float]:
        """Joules now, per counter."""
        if self.handle is not None:
            import pynvml

            return [pynvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1e3]
        return [int(file.read_text()) / 1e6 for file in self.files]

    def since(self, before: list[float]) -> float:
        """Joules since `before`; a counter that wrapped meanwhile is put right by its range."""
        total = 0.0
        for i, (old, new) in enumerate(zip(before, self.read(), strict=True)):
            wrap = 0.0
            if new < old and self.files:
                wrap = int(self.files[i].with_name("max_energy_range_uj").read_text()) / 1e6
            total += new - old + wrap
        return total


def provenance(command: str) -> dict[str, Any]:
    """What a number was measured with."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "paceline": _version("paceline"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()
