"""What a process may use: files as Linux, Docker and Kubernetes write them, in a folder that stands for the root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from paceline import machine
from paceline.capacity import free_memory
from paceline.cluster.config import FleetConfig, sized
from paceline.config import EngineConfig
from paceline.ops.native import default_threads

GIB = 1 << 30
MEMINFO = "MemTotal: 33554432 kB\nMemFree: 1 kB\nMemAvailable: 16777216 kB\n"  # 16 GiB
UNIFIED = "30 23 0:27 {top} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
SPLIT = (
    "32 31 0:29 {top} /sys/fs/cgroup/cpu rw,relatime master:3 - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
)


def host(root: Path, cgroup: str, mountinfo: str, files: dict[str, str]) -> Path:
    contents = {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, "proc/self/mountinfo": mountinfo}
    for name, text in (contents | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.fixture(autouse=True)
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)


MEMORY = {
    "memory.max": str(4 * GIB),
    "memory.current": str(3 * GIB),
    "memory.stat": f"anon 1\ninactive_file {GIB}",
}
SPLIT_MEMORY = {
    "memory.limit_in_bytes": str(4 * GIB),
    "memory.usage_in_bytes": str(3 * GIB),
    "memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}",
}

NO_LIMIT = {"memory.limit_in_bytes": str(2**63 - 4096)}  # as Linux writes it


def under(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}".lstrip("/"): text for name, text in files.items()}


@pytest.mark.parametrize("inner", ["", "system.slice/paceline.service"], ids=["container", "service"])
def test_unified(tmp_path: Path, inner: str) -> None:
    files = under(inner, MEMORY | {"cpu.max": "250000 100000"})
    root = host(tmp_path, f"0::/{inner}\n", UNIFIED.format(top="/"), files)
    assert machine.processors(root) == 2
    assert machine.free_memory(root) == 2 * GIB


@pytest.mark.parametrize("top", ["/docker/abc", "/"], ids=["container", "host"])
def test_split(tmp_path: Path, top: str) -> None:
    inner = "" if top != "/" else "/docker/abc"
    files = under(f"cpu{inner}", {"cpu.cfs_quota_us": "300000", "cpu.cfs_period_us": "100000"})
    files |= under(f"memory{inner}", SPLIT_MEMORY)
    groups = "9:name=systemd:/\n4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n"
    root = host(tmp_path, groups, SPLIT.format(top=top), files)
    assert machine.processors(root) == 3
    assert machine.free_memory(root) == 2 * GIB


def test_the_least_of_the_groups_around_counts(tmp_path: Path) -> None:
    files = {"cpu.max": "max 100000", "pod/cpu.max": "150000 100000", "pod/one/cpu.max": "400000 100000"}
    files |= under("pod", MEMORY) | {"pod/one/memory.max": "max", "pod/one/memory.current": "7"}
    root = host(tmp_path, "0::/pod/one\n", UNIFIED.format(top="/"), files)
    assert machine.processors(root) == 1
    assert machine.free_memory(root) == 2 * GIB


@pytest.mark.parametrize(
    ("cgroup", "mountinfo", "files"),
    [
        ("", "", {}),
        ("0::/\n", UNIFIED.format(top="/"), {"cpu.max": "max 100000", "memory.max": "max", "memory.current": "5"}),
        ("2:cpu:/\n", SPLIT.format(top="/"), {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}),
        ("4:memory:/\n", SPLIT.format(top="/"), under("memory", SPLIT_MEMORY | NO_LIMIT)),
        ("0::/../../other\n", UNIFIED.format(top="/"), {}),
        ("0::/\n", UNIFIED.format(top="/"), {"cpu.max": "100000 0"}),
        ("0::/\n", UNIFIED.format(top="/"), {"cpu.max": "many", "memory.max": "much", "memory.current": "-"}),
        ("garbage\n", "garbage\n", {}),
    ],
    ids=["none", "unified", "no quota", "no limit", "outside", "no period", "words", "garbage"],
)  # fmt: skip
def test_without_a_limit(tmp_path: Path, cgroup: str, mountinfo: str, files: dict[str, str]) -> None:
    root = host(tmp_path, cgroup, mountinfo, files)
    assert machine.processors(root) == 8
    assert machine.free_memory(root) == 16 * GIB


def test_a_small_quota_is_one_thread_and_a_full_container_has_no_room(tmp_path: Path) -> None:
    files = {"cpu.max": "50000 100000", "memory.max": "5", "memory.current": "6"}
    root = host(tmp_path, "0::/\n", UNIFIED.format(top="/"), files)
    assert machine.processors(root) == 1
    assert machine.free_memory(root) == 0


def test_affinity_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1}, raising=False)
    root = host(tmp_path, "0::/\n", UNIFIED.format(top="/"), {"cpu.max": "400000 100000"})
    assert machine.processors(root) == 1


def test_threads_replicas_and_the_cache_follow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "processors", lambda: 6)
    monkeypatch.setattr(machine, "free_memory", lambda: 5 * GIB)
    assert default_threads() == 6
    assert sized(EngineConfig(), FleetConfig(replicas=2)).threads == 3
    assert free_memory(torch.device("cpu")) == 5 * GIB
