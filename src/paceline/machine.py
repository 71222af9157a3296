"""What of this machine the process may use: processors by affinity and quota, memory by the limits around it.

A container's limits stand in control groups (Linux: cgroup v1 and v2), its own and those around it. The least counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

HOST = Path("/")


def processors(root: Path = HOST) -> int:
    """How many threads can compute at once, at least 1. A quota is rounded down: one more thread would be stopped."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([allowed, *_quotas(root)])))


def free_memory(root: Path = HOST) -> int:
    """Bytes that can be had without swapping or being killed."""
    try:
        meminfo = (root / "proc/meminfo").read_text(encoding="ascii")
        line = next(line for line in meminfo.splitlines() if line.startswith("MemAvailable"))
        free = int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return max(0, min([free, *_rooms(root)]))


def _quotas(root: Path) -> Iterator[float]:
    """Processors' worth of time."""
    for group in _groups("cpu", root):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if not quota:
            quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):  # "max" and -1 are none
            yield int(quota) / int(period)


def _rooms(root: Path) -> Iterator[int]:
    """Bytes below each limit. Files that were read and are not in use go when memory is needed, as Kubernetes counts."""
    for group in _groups("memory", root):
        for limit, usage, idle in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, used = _text(group / limit), _text(group / usage)
            if most.isdecimal() and used.isdecimal():
                stat = dict(
                    line.split(" ", 1) for line in _text(group / "memory.stat").splitlines() if " " in line
                )
                given = stat.get(idle, "0")
                yield int(most) - int(used) + (int(given) if given.isdecimal() else 0)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of this process's group and of those around it."""
    paths: dict[str, str] = {}  # a controller, or "" for all of version 2 -> the group's path
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        paths |= dict.fromkeys(names.split(","), path)
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, options = after.split(" ")[0], after.split(" ")[-1].split(",")
        name = "" if kind == "cgroup2" else controller
        ours = kind == "cgroup2" or (kind == "cgroup" and controller in options)
        if ours and name in paths:
            top, mount = before.split(" ")[3:5]
            group = PurePosixPath(paths[name])
            inside = group.relative_to(top) if group.is_relative_to(top) else PurePosixPath()
            steps = () if ".." in inside.parts else inside.parts
            for count in range(len(steps), -1, -1):
                yield root.joinpath(mount.lstrip("/"), *steps[:count])


def _text(path: Path) -> str:
    """Nothing where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
