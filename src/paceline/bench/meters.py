"""What the machine says of itself while it runs: energy and memory. Missing meters are None, never zero."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

RAPL = Path("/sys/class/powercap")


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
