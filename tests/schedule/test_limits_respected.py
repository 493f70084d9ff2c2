"""`taskset`, a CPU quota and a memory cgroup change what is planned, not only what is known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid.errors import OutOfMemoryError
from hybrid.schedule import budget, limits, scheduler
from hybrid.schedule.budget import Budget, ram_budget
from hybrid.schedule.candidates import tunable
from hybrid.schedule.scheduler import Request, plan
from hybrid.schedule.shape import parse_shape, shape_spec
from tests.schedule.test_limits import GIB, V2, lay, topology

SPEC = shape_spec(parse_shape("layers=8,kv_heads=2,head_dim=64,embd=512,ff=1024,vocab=1000"))
THREADS = ("n_threads_head", "n_threads_tail", "n_threads_tail_batch", "n_threads_attend")


def test_taskset_leaves_a_thread_a_core() -> None:
    code = (
        "import json; from tests.schedule.test_limits_respected import SPEC;"
        "from hybrid.schedule.scheduler import Request, plan;"
        "print(json.dumps(plan(SPEC, Request(n_gpu_layers=4, device='cpu', n_ctx=64)).placement.to_dict()))"
    )
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system has no affinity")
    one = min(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{one}}}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    placement = json.loads(done.stdout)
    assert {placement[name] for name in THREADS} == {1}


def test_a_quota_of_150_percent_is_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    root = lay(tmp_path, {**V2, **topology(16, 1), "sys/fs/cgroup/user/job/cpu.max": "150000 100000"})
    monkeypatch.setattr(scheduler, "usable_cores", lambda: limits.usable_cores(root))
    placement = plan(SPEC, Request(n_gpu_layers=0, n_ctx=64)).placement
    assert {getattr(placement, name) for name in THREADS} == {1}


def test_a_memory_cgroup_of_1_gib_bounds_every_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = "sys/fs/cgroup/user/job"
    cgroup = {f"{folder}/memory.max": str(GIB), f"{folder}/memory.current": str(100 << 20)}
    root = lay(tmp_path, {**V2, **cgroup})
    for name in ("available_ram", "total_ram"):
        monkeypatch.setattr(budget, name, lambda name=name: getattr(limits, name)(root))
    left = ram_budget()
    assert left == GIB - (100 << 20) - (128 << 20)
    with pytest.raises(OutOfMemoryError, match="RAM"):
        plan(SPEC, Request(n_gpu_layers=0, n_ctx=1 << 20))
    small = plan(SPEC, Request(n_gpu_layers=0, n_ctx=1024)).placement
    large = replace(small, n_ctx=1 << 20)
    assert tunable(SPEC, replace(small, device="cpu"), Budget(ram_bytes=left), threads=[1])
    assert tunable(SPEC, replace(large, device="cpu"), Budget(ram_bytes=left), threads=[1]) == []
