"""NVIDIA GPUs through the driver's own library (NVML): names, VRAM, who uses it. No CUDA context, no torch.

Function names and structures are those of NVIDIA's `nvml.h`, whose ABI is stable by promise; only what is needed.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path
from typing import Any

from hybrid.schedule.machine import Gpu, GpuUser

LIBRARIES = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
NAME_BYTES = 96
MANY = 256
UNKNOWN = (1 << 64) - 1
"""What NVML writes where it may not tell a process's memory."""


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t, version 3 of the call."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


def load_nvml() -> Any | None:
    """The library, initialised; None where there is no NVIDIA driver."""
    for name in LIBRARIES:
        with suppress(OSError):
            library = ctypes.CDLL(name)
            return library if library.nvmlInit_v2() == 0 else None
    return None


def nvidia_gpus(library: Any | None = None, proc: Path = Path("/proc")) -> tuple[Gpu, ...]:
    """Every NVIDIA GPU, numbered as NVML does (by PCI bus); empty where there is none or the driver does not answer.

    Devices are named `cuda:0`, …: right unless CUDA_VISIBLE_DEVICES or CUDA_DEVICE_ORDER reorder them.
    """
    library = library if library is not None else load_nvml()
    if library is None:
        return ()
    count = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return ()
    found = []
    for index in range(count.value):
        handle, memory = ctypes.c_void_p(), _Memory()
        if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
            continue
        if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
            continue
        name = ctypes.create_string_buffer(NAME_BYTES)
        library.nvmlDeviceGetName(handle, name, ctypes.c_uint(NAME_BYTES))
        found.append(
            Gpu(
                device=f"cuda:{index}",
                name=name.value.decode(errors="replace") or "NVIDIA GPU",
                total_bytes=int(memory.total),
                free_bytes=int(memory.free),
                users=_users(library, handle, proc),
                pcie=_link(library, handle),
            )
        )
    return tuple(found)


def _users(library: Any, handle: ctypes.c_void_p, proc: Path) -> tuple[GpuUser, ...]:
    users: dict[int, GpuUser] = {}
    for call in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3"):
        function = getattr(library, call, None)
        count, processes = ctypes.c_uint(MANY), (_Process * MANY)()
        if function is None or function(handle, ctypes.byref(count), processes) != 0:
            continue
        for process in processes[: min(count.value, MANY)]:
            used = None if process.used == UNKNOWN else int(process.used)
            users[process.pid] = GpuUser(pid=process.pid, name=_process_name(process.pid, proc), n_bytes=used)
    return tuple(sorted(users.values(), key=lambda user: -(user.n_bytes or 0)))


def _process_name(pid: int, proc: Path) -> str:
    try:
        return (proc / str(pid) / "comm").read_text().strip()
    except OSError:
        return "?"


def _link(library: Any, handle: ctypes.c_void_p) -> str:
    generation, lanes = ctypes.c_uint(), ctypes.c_uint()
    if library.nvmlDeviceGetMaxPcieLinkGeneration(handle, ctypes.byref(generation)) != 0:
        return ""
    if library.nvmlDeviceGetMaxPcieLinkWidth(handle, ctypes.byref(lanes)) != 0:
        return ""
    return f"{generation.value}.0 x{lanes.value}"
