"""What a machine is, without measuring: its processor, its memory, its GPUs. Milliseconds, and no torch."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

from hybrid.schedule import limits
from hybrid.schedule.machine import Cpu, Gpu, Memory
from hybrid.schedule.nvml import nvidia_gpus

INSTRUCTION_SETS = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "amx_int8", "amx_bf16", "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2",
)  # fmt: skip
"""Those that matter to the kernels, as /proc/cpuinfo spells them."""


def cpu(root: Path = limits.ROOT) -> Cpu:
    """The processor."""
    model, flags = "", set[str]()
    for line in limits.read_text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        key = key.strip()
        if key == "model name":
            model = model or value.strip()
        elif key in ("flags", "Features"):
            flags |= set(value.split())
    cpus = limits.affinity()
    return Cpu(
        model=model or _mac_model() or platform.processor() or platform.machine(),
        cores=limits.usable_cores(root),
        physical_cores=limits.physical_cores(set(range(os.cpu_count() or 1)) | cpus, root),
        logical_cpus=os.cpu_count() or 1,
        quota=limits.cpu_quota(root),
        instruction_sets=tuple(name for name in INSTRUCTION_SETS if name in flags),
    )


def memory(root: Path = limits.ROOT) -> Memory:
    """RAM now."""
    return Memory(
        total_bytes=limits.physical_ram(root),
        available_bytes=limits.available_ram(root),
        limit_bytes=limits.memory_limit(root),
    )


def gpus() -> tuple[Gpu, ...]:
    """NVIDIA's, through the driver. What only torch sees (AMD, Apple) is the probe's business."""
    return nvidia_gpus()


def _mac_model() -> str:
    if sys.platform != "darwin":
        return ""
    try:
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
