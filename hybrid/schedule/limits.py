"""What this process may use of the machine: cores and memory, with cgroup limits and CPU affinity honoured.

Every function takes the root of the file system, so that tests can lay out a machine of their own.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

ROOT = Path("/")
BUSY = 0.75
"""A load average of so many times the cores, before anything is measured, is worth a word."""
UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63; nothing real is this large."""
MEMORY_FILES = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)
"""Limit, use, and the keys of reclaimable page cache in memory.stat: cgroup v2, then v1."""


def busy_load() -> float | None:
    """The load average (of a minute), where other programs' work will show in what is measured; else None."""
    try:
        load = os.getloadavg()[0]
    except OSError:
        return None
    return load if load > BUSY * usable_cores() else None


def usable_cores(root: Path = ROOT) -> int:
    """Cores worth a compute thread: min(CPUs of our affinity mask, their physical cores, CPU quota), at least 1.

    A quota of 150 % is one core: two threads that share it would wait for each other at every barrier.
    """
    cpus = affinity()
    cores = min(len(cpus), physical_cores(cpus, root))
    quota = cpu_quota(root)
    if quota is not None:
        cores = min(cores, int(quota))
    return max(1, cores)


def affinity() -> set[int]:
    """The CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def physical_cores(cpus: set[int], root: Path = ROOT) -> int:
    """How many physical cores those CPUs are; their number where the system does not say."""
    return len({_siblings(cpu, root) for cpu in cpus})


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPUs' worth of time our cgroup (or an ancestor) may use, None if unlimited."""
    quotas = []
    for folder in _cgroup_folders("cpu", root):
        words = read_text(folder / "cpu.max").split()  # v2: "150000 100000" or "max 100000"
        if len(words) != 2:  # v1
            words = [read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us")]
        if words[0].isdigit() and words[1].isdigit() and int(words[1]):  # v1 writes -1 for none
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def memory_limit(root: Path = ROOT) -> int | None:
    """The lowest memory limit of our cgroup and its ancestors, None if there is none."""
    return min((limit for limit, _ in _memory_limits(root)), default=None)


def physical_ram(root: Path = ROOT) -> int:
    """Bytes of RAM in the machine."""
    return _meminfo(root)[0]


def total_ram(root: Path = ROOT) -> int:
    """Bytes of RAM, or our cgroup's limit where that is less."""
    limit = memory_limit(root)
    return physical_ram(root) if limit is None else min(physical_ram(root), limit)


def available_ram(root: Path = ROOT) -> int:
    """Bytes we could allocate now: the kernel's MemAvailable, or what the limits of our cgroup and of this process
    leave, whichever is least.

    Page cache the kernel can reclaim does not count as used.
    """
    available = _meminfo(root)[1]
    for limit, used in (*_memory_limits(root), *_own_limits(root)):
        available = min(available, max(0, limit - used))
    return available


def _meminfo(root: Path) -> tuple[int, int]:
    """Total and available bytes."""
    values = {}
    for line in read_text(root / "proc/meminfo").splitlines():
        key, _, rest = line.partition(":")
        values[key] = int(rest.split()[0]) << 10 if rest.split() and rest.split()[0].isdigit() else 0
    if "MemTotal" in values and "MemAvailable" in values:
        return values["MemTotal"], values["MemAvailable"]
    import psutil  # macOS

    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def _memory_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, bytes in use less reclaimable cache) of our memory cgroup and its ancestors."""
    found = []
    for folder in _cgroup_folders("memory", root):
        for limit_file, used_file, cache_keys in MEMORY_FILES:
            limit, used = read_text(folder / limit_file), read_text(folder / used_file)
            if limit.isdigit() and used.isdigit() and int(limit) < UNLIMITED:
                lines = (line.split() for line in read_text(folder / "memory.stat").splitlines())
                stat = {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}
                cache = sum(stat.get(key, 0) for key in cache_keys)
                found.append((int(limit), max(0, int(used) - cache)))
    return found


def _own_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, bytes in use) of this process alone (`ulimit -v` and `-d`), where it has such limits."""
    words = read_text(root / "proc/self/statm").split()  # in pages: all of it, resident, shared, code, 0, data, 0
    if len(words) != 7 or not all(word.isdigit() for word in words):
        return []
    used = {resource.RLIMIT_AS: int(words[0]), resource.RLIMIT_DATA: int(words[5])}
    limits = [(resource.getrlimit(kind)[0], pages * resource.getpagesize()) for kind, pages in used.items()]
    return [(limit, n_bytes) for limit, n_bytes in limits if limit != resource.RLIM_INFINITY]


def _cgroup_folders(controller: str, root: Path) -> list[Path]:
    """Our cgroup's folder for `controller` and its ancestors up to the mount, v1 and v2."""
    folders = []
    base = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, controllers, path = parts
        if controllers == "":
            mount = base / "unified" if (base / "unified").is_dir() else base
        elif controller in controllers.split(","):
            mount = base / controllers if (base / controllers).is_dir() else base / controller
        else:
            continue
        folder = mount / path.lstrip("/")
        # Inside a container the path may be the host's, which the container's mount does not show.
        folder = folder if folder.is_dir() and ".." not in path.split("/") else mount
        while True:
            folders.append(folder)
            if folder == mount or mount not in folder.parents:
                break
            folder = folder.parent
    return folders


def _siblings(cpu: int, root: Path) -> str:
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    return read_text(topology / "core_cpus_list") or read_text(topology / "thread_siblings_list") or str(cpu)


def read_text(path: Path) -> str:
    """A small file of the kernel, stripped; empty where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
