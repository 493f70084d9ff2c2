"""Measuring a machine: bandwidths and matmul rates, in a few seconds.

The best of several short runs is kept: what disturbs a run only ever makes it slower.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid import _native
from hybrid.schedule import facts
from hybrid.schedule.launch import LaunchCost, launch_cost
from hybrid.schedule.limits import available_ram
from hybrid.schedule.machine import Gpu, Machine, Rates

if TYPE_CHECKING:
    pass

READ_BYTES = 1 << 30
"""Several times the last cache of most processors (a server's may hold 300 MiB)."""
COPY_BYTES = 64 << 20
DISK_BYTES = 512 << 20
DISK_BLOCK = 8 << 20
DISK_S = 0.6
SLICE_S = 0.25
"""Time for each rate."""


@dataclass(frozen=True)
class DiskRead:
    """How fast a file was read, and whether the page cache was kept out of it."""

    bytes_per_s: float | None
    note: str


def probe(models: Path | None) -> Machine:
    """Measure this machine: facts and rates. `models` is the folder whose disk counts; the largest file in it is read.

    Imports torch only where there is a GPU; elsewhere the device is the CPU, and `emulated` says so.
    """
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    cpu, memory = facts.cpu(), facts.memory()
    gpus = facts.gpus() or _torch_gpus()
    host = host_rates(cpu.cores)
    device, notes = _device_rates(gpus, host)
    disk = read_disk(largest_file(models))
    return Machine(
        name="this machine",
        assumed=False,
        gpus=gpus,
        cpu=cpu,
        memory=memory,
        rates=replace(device, disk_bytes_per_s=disk.bytes_per_s),
        emulated=not gpus,
        measured_at=started,
        notes=(*notes, *([disk.note] if disk.note else [])),
    )


# -- host --------------------------------------------------------------------------------------------------------------


def host_rates(cores: int) -> Rates:
    """Memory reads by all cores and by one, and a float32 matrix product."""
    import numpy as np

    size = min(READ_BYTES, available_ram() // 8)
    one = _native.read_bandwidth(size, 1, SLICE_S)
    every = _native.read_bandwidth(size, cores, SLICE_S) if cores > 1 else one
    side = 1024
    a = np.ones((side, side), np.float32)
    return Rates(
        host_bytes_per_s=max(every, one),
        host_bytes_per_s_one_core=one,
        host_flop_per_s=_rate(2 * side**3, lambda: a @ a),
    )


def _rate(amount: float, work: Callable[[], object], seconds: float = SLICE_S) -> float:
    """amount a second, from the quickest run of those that fit into `seconds` (two at least)."""
    best = float("inf")
    end = time.perf_counter() + seconds
    runs = 0
    while runs < 2 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
        runs += 1
    return amount / best


# -- device ------------------------------------------------------------------------------------------------------------


def _torch_gpus() -> tuple[Gpu, ...]:
    """GPUs that only torch can name: AMD's (which it calls cuda) and Apple's. None without a sign of one."""
    amd, apple = Path("/dev/kfd").exists(), sys.platform == "darwin"
    if not amd and not apple:
        return ()
    import torch

    if torch.cuda.is_available():
        found = []
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            found.append(Gpu(device=f"cuda:{index}", name=name, total_bytes=total, free_bytes=free))
        return tuple(found)
    if apple and torch.backends.mps.is_available():
        free = available_ram()
        return (Gpu(device="mps", name="Apple GPU (shares the RAM)", total_bytes=free, free_bytes=free),)
    return ()


def _device_rates(gpus: tuple[Gpu, ...], host: Rates) -> tuple[Rates, tuple[str, ...]]:
    if not gpus:
        copy = _host_copy()
        rates = replace(
            host,
            device_bytes_per_s=host.host_bytes_per_s,
            device_flop_per_s=host.host_flop_per_s,
            h2d_bytes_per_s=copy,
            h2d_pageable_bytes_per_s=copy,
            d2h_bytes_per_s=copy,
            d2h_pageable_bytes_per_s=copy,
        )
        return rates, ("There is no GPU: the device's figures are those of an emulated one (--device cpu), in RAM.",)
    return _gpu_rates(gpus[0].device, host), ()


def _host_copy() -> float:
    """Bytes copied a second from one place in RAM to another, by one core."""
    import numpy as np

    source, target = np.ones(COPY_BYTES, np.uint8), np.zeros(COPY_BYTES, np.uint8)
    return _rate(COPY_BYTES, lambda: np.copyto(target, source))


def _gpu_rates(name: str, host: Rates) -> Rates:
    import torch

    device = torch.device(name)
    synchronize: Callable[[], Any] = torch.cuda.synchronize if device.type == "cuda" else torch.mps.synchronize
    pageable = torch.ones(COPY_BYTES, dtype=torch.uint8)
    pinned = pageable.pin_memory() if device.type == "cuda" else pageable
    source, target = (torch.ones(4 * COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    part = target[:COPY_BYTES]
    side = 4096
    launches = _launch_cost(device, synchronize)
    a = torch.ones(side, side, dtype=torch.float16, device=device)

    def timed(amount: float, work: Callable[[], Any]) -> float:
        def whole() -> None:
            work()
            synchronize()

        whole()
        return _rate(amount, whole)

    return replace(
        host,
        device_bytes_per_s=timed(2 * source.nbytes, lambda: target.copy_(source)),
        device_flop_per_s=timed(2.0 * side**3, lambda: a @ a),
        h2d_bytes_per_s=timed(COPY_BYTES, lambda: part.copy_(pinned, non_blocking=True)),
        h2d_pageable_bytes_per_s=timed(COPY_BYTES, lambda: part.copy_(pageable)),
        d2h_bytes_per_s=timed(COPY_BYTES, lambda: pinned.copy_(part, non_blocking=True)),
        d2h_pageable_bytes_per_s=timed(COPY_BYTES, lambda: pageable.copy_(part)),
        launch_s=launches.launch_s,
        replay_s=launches.replay_s,
    )


def _launch_cost(device: Any, synchronize: Callable[[], Any]) -> LaunchCost:
    """Of a torch device; graphs are CUDA's."""
    import torch

    number = torch.zeros(1, device=device)

    def record(run: Callable[[], object]) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    return launch_cost(lambda: number.add_(1), synchronize, record if device.type == "cuda" else None)


# -- disk --------------------------------------------------------------------------------------------------------------


def largest_file(folder: Path | None) -> Path | None:
    """The largest file in `folder` (not in folders below it), None if there is none."""
    if folder is None or not folder.is_dir():
        return None
    files = [path for path in folder.iterdir() if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size, default=None)


def read_disk(path: Path | None) -> DiskRead:
    """Sequential read of a file past the page cache (O_DIRECT); where the file system cannot, what the kernel was asked
    to drop from its cache beforehand, which the note says."""
    if path is None or path.stat().st_size < DISK_BLOCK:
        return DiskRead(None, "The disk was not measured: there is no model file on it yet (hybrid models pull).")
    try:
        if hasattr(os, "O_DIRECT"):
            return DiskRead(_read_blocks(path, os.O_DIRECT), "")
    except OSError:
        pass
    try:
        rate = _read_blocks(path, 0)
    except OSError as error:
        return DiskRead(None, f"The disk was not measured: {path} cannot be read ({error.strerror}).")
    return DiskRead(rate, "The disk was read through the page cache (this file system has no direct reads).")


def _read_blocks(path: Path, flags: int) -> float:
    fd = os.open(path, os.O_RDONLY | flags)
    try:
        if not flags and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        buffer = mmap.mmap(-1, DISK_BLOCK)  # page-aligned, as direct reads want it
        size = min(path.stat().st_size // DISK_BLOCK * DISK_BLOCK, DISK_BYTES)
        start, done = time.perf_counter(), 0
        while done < size and time.perf_counter() - start < DISK_S:
            read = os.preadv(fd, [buffer], done)
            if read <= 0:
                break
            done += read
        return done / (time.perf_counter() - start)
    finally:
        os.close(fd)
