"""Cores and memory under affinity, quotas and cgroups, on machines laid out in a folder."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from hybrid.schedule import limits

GIB = 1 << 30


def lay(root: Path, files: dict[str, str]) -> Path:
    """Write a tree of the kernel's files; 16 GiB of RAM with 12 available unless `files` says otherwise."""
    base = {
        "proc/meminfo": f"MemTotal: {16 << 20} kB\nMemFree: 100 kB\nMemAvailable: {12 << 20} kB\nHugePages_Total: 0"
    }
    for name, text in {**base, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


V2 = {"proc/self/cgroup": "0::/user/job"}
V1 = {"proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n1:name=systemd:/x"}


def topology(n_cores: int, n_threads: int) -> dict[str, str]:
    """CPUs 0, 1, … of which n_threads share a core."""
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list": f"core{cpu // n_threads}"
        for cpu in range(n_cores * n_threads)
    }


@pytest.fixture
def sixteen_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


@pytest.mark.usefixtures("sixteen_cpus")
def test_hyperthreads_are_not_cores(tmp_path: Path) -> None:
    assert limits.usable_cores(lay(tmp_path, topology(8, 2))) == 8


def test_taskset_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = lay(tmp_path, topology(8, 2))
    for cpus, cores in (({0}, 1), ({0, 1}, 1), ({0, 2}, 2), ({0, 1, 2, 3, 4}, 3)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cpus=cpus: cpus)
        assert limits.usable_cores(root) == cores


@pytest.mark.usefixtures("sixteen_cpus")
@pytest.mark.parametrize(("quota", "cores"), [("150000 100000", 1), ("400000 100000", 4), ("50000 100000", 1)])
def test_a_cpu_quota_is_respected(tmp_path: Path, quota: str, cores: int) -> None:
    root = lay(tmp_path, {**V2, **topology(16, 1), "sys/fs/cgroup/user/job/cpu.max": quota})
    assert limits.usable_cores(root) == cores
    assert limits.cpu_quota(root) == int(quota.split()[0]) / 100_000


@pytest.mark.usefixtures("sixteen_cpus")
def test_an_ancestors_quota_counts_and_max_is_none(tmp_path: Path) -> None:
    root = lay(
        tmp_path,
        {
            **V2,
            **topology(16, 1),
            "sys/fs/cgroup/user/job/cpu.max": "max 100000",
            "sys/fs/cgroup/user/cpu.max": "300000 100000",
        },
    )
    assert limits.cpu_quota(root) == 3.0
    assert limits.usable_cores(root) == 3


@pytest.mark.usefixtures("sixteen_cpus")
def test_version_1_quotas(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/cpu,cpuacct/job"
    files = {**V1, **topology(16, 1), f"{folder}/cpu.cfs_quota_us": "250000", f"{folder}/cpu.cfs_period_us": "100000"}
    assert limits.usable_cores(lay(tmp_path / "a", files)) == 2
    files[f"{folder}/cpu.cfs_quota_us"] = "-1"
    assert limits.usable_cores(lay(tmp_path / "b", files)) == 16


def test_without_cgroups_memory_is_what_the_kernel_says(tmp_path: Path) -> None:
    root = lay(tmp_path, {})
    assert limits.available_ram(root) == 12 * GIB
    assert limits.total_ram(root) == 16 * GIB
    assert limits.memory_limit(root) is None


def test_a_memory_cgroup_of_1_gib_is_respected_and_its_cache_is_not_counted_as_used(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/user/job"
    root = lay(
        tmp_path,
        {
            **V2,
            f"{folder}/memory.max": str(GIB),
            f"{folder}/memory.current": str(700 << 20),
            f"{folder}/memory.stat": f"anon {100 << 20}\ninactive_file {400 << 20}\nactive_file {200 << 20}\nfile 1",
        },
    )
    assert limits.memory_limit(root) == limits.total_ram(root) == GIB
    assert limits.available_ram(root) == GIB - (100 << 20)


def test_version_1_memory_limits(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/job"
    files = {
        **V1,
        f"{folder}/memory.limit_in_bytes": str(2 * GIB),
        f"{folder}/memory.usage_in_bytes": str(GIB),
        f"{folder}/memory.stat": f"cache 5\ntotal_inactive_file {GIB // 2}\ntotal_active_file 0",
    }
    assert limits.available_ram(lay(tmp_path / "a", files)) == 2 * GIB - GIB // 2
    files[f"{folder}/memory.limit_in_bytes"] = "9223372036854771712"
    assert limits.available_ram(lay(tmp_path / "b", files)) == 12 * GIB


def test_the_tightest_of_nested_limits_counts(tmp_path: Path) -> None:
    root = lay(
        tmp_path,
        {
            **V2,
            "sys/fs/cgroup/user/memory.max": str(3 * GIB),
            "sys/fs/cgroup/user/memory.current": str(GIB),
            "sys/fs/cgroup/user/job/memory.max": str(8 * GIB),
            "sys/fs/cgroup/user/job/memory.current": str(GIB // 2),
        },
    )
    assert limits.available_ram(root) == 2 * GIB
    assert limits.memory_limit(root) == 3 * GIB


@pytest.mark.parametrize(("kind", "used"), [(resource.RLIMIT_AS, 300), (resource.RLIMIT_DATA, 100)])
def test_the_process_own_limits_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int, used: int) -> None:
    root = lay(tmp_path, {"proc/self/statm": "300 50 9 2 0 100 0"})
    limit = 1000 * resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (limit if asked == kind else resource.RLIM_INFINITY,) * 2)
    assert limits.available_ram(root) == limit - used * resource.getpagesize()


def test_a_path_that_only_the_host_knows_means_the_containers_root(tmp_path: Path) -> None:
    for path in ("/docker/abc", "/../.."):
        root = lay(
            tmp_path / path.strip("/").replace("/", "_"),
            {
                "proc/self/cgroup": f"0::{path}",
                "sys/fs/cgroup/memory.max": str(GIB),
                "sys/fs/cgroup/memory.current": "0",
                "sys/fs/cgroup/cpu.max": "max 100000",
            },
        )
        assert limits.memory_limit(root) == GIB


def test_nonsense_in_the_kernels_files_limits_nothing(tmp_path: Path) -> None:
    root = lay(
        tmp_path,
        {
            "proc/self/cgroup": "garbage\n0::/job",
            "sys/fs/cgroup/job/memory.max": "lots",
            "sys/fs/cgroup/job/memory.current": "",
            "sys/fs/cgroup/job/cpu.max": "x y",
        },
    )
    assert limits.available_ram(root) == 12 * GIB
    assert limits.cpu_quota(root) is None


def test_this_machine_has_a_core_and_memory() -> None:
    assert 1 <= limits.usable_cores() <= (os.cpu_count() or 1)
    assert 0 < limits.available_ram() <= limits.total_ram()
