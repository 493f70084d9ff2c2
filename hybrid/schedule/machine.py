"""What this process may use of the machine: cores and memory, with cgroup limits and CPU affinity honoured."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63; nothing real is this large."""


def usable_cores() -> int:
    """Cores worth a compute thread: min(CPUs of our affinity mask, their physical cores, CPU quota), at least 1."""
    cpus = _affinity()
    cores = min(len(cpus), _physical_cores(cpus))
    quota = cpu_quota()
    if quota is not None:
        cores = min(cores, max(1, int(quota)))
    return max(1, cores)


def available_ram() -> int:
    """Bytes we could allocate now: the kernel's MemAvailable, or what our cgroup's limit leaves, whichever is less.

    Page cache the kernel can reclaim does not count as used.
    """
    available = int(psutil.virtual_memory().available)
    for limit, used in _memory_limits():
        available = min(available, max(0, limit - used))
    return available


def cpu_quota() -> float | None:
    """CPUs' worth of time our cgroup (or an ancestor) may use, None if unlimited."""
    quotas = []
    for folder in _cgroup_folders("cpu"):
        words = _read(folder / "cpu.max").split()  # v2: "150000 100000" or "max 100000"
        if len(words) != 2:  # v1
            words = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
        if words[0].isdigit() and words[1].isdigit() and int(words[1]):  # v1 writes -1 for none
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _memory_limits() -> list[tuple[int, int]]:
    """(limit, bytes in use less reclaimable cache) of our memory cgroup and its ancestors."""
    found = []
    for folder in _cgroup_folders("memory"):
        for limit_file, used_file, cache_key in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _read(folder / limit_file), _read(folder / used_file)
            if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED:
                stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
                found.append((int(limit), max(0, int(used) - int(stat.get(cache_key, 0)))))
    return found


def _cgroup_folders(controller: str) -> list[Path]:
    """Our cgroup's folder for `controller` and its ancestors up to the mount, v1 and v2."""
    folders = []
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = _CGROUP / "unified" if (_CGROUP / "unified").is_dir() else _CGROUP
        elif controller in controllers.split(","):
            mount = _CGROUP / controllers if (_CGROUP / controllers).is_dir() else _CGROUP / controller
        else:
            continue
        folder = mount / path.lstrip("/")
        # Inside a container the path may be the host's, which the container's mount does not show.
        folder = folder if folder.is_dir() else mount
        while True:
            folders.append(folder)
            if folder == mount or mount not in folder.parents:
                break
            folder = folder.parent
    return folders


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


@functools.cache
def _siblings(cpu: int) -> str:
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    return _read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list") or str(cpu)


def _physical_cores(cpus: set[int]) -> int:
    if Path("/sys/devices/system/cpu").is_dir():
        return len({_siblings(cpu) for cpu in cpus})
    return psutil.cpu_count(logical=False) or len(cpus)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
