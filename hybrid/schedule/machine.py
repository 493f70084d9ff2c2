"""Machine: what is known of a computer, measured or assumed. Data only; the probe and the presets make it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hybrid.schedule.limits import available_ram, cpu_quota, usable_cores

__all__ = ["Cpu", "Gpu", "GpuUser", "Machine", "Memory", "Rates", "available_ram", "cpu_quota", "usable_cores"]


@dataclass(frozen=True, kw_only=True)
class GpuUser:
    """A process that holds VRAM."""

    pid: int
    name: str
    n_bytes: int | None
    """None where the driver does not say."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator."""

    device: str
    """Its torch device, e.g. `cuda:0`."""
    name: str
    total_bytes: int
    free_bytes: int
    users: tuple[GpuUser, ...] = ()
    pcie: str = ""
    """Generation and lanes of its link at most, e.g. `4.0 x16`; empty where unknown."""


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """The processor, as far as this process may use it."""

    model: str
    cores: int
    """min(affinity, quota, physical cores)."""
    physical_cores: int
    logical_cpus: int
    quota: float | None
    instruction_sets: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Memory:
    """RAM in bytes."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None
    """Of our cgroup."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes (or floating-point operations) a second, in one direction; None where it was not measured."""

    host_bytes_per_s: float | None = None
    """All usable cores read the RAM."""
    host_bytes_per_s_one_core: float | None = None
    host_flop_per_s: float | None = None
    """Matrix product in float32 on all usable cores."""
    device_bytes_per_s: float | None = None
    """The device reads (or writes) its own memory: bytes read and written by a copy, over its time."""
    device_flop_per_s: float | None = None
    """Dense matrix product in half precision (float32 on an emulated device)."""
    h2d_bytes_per_s: float | None = None
    """From pinned host memory to the device."""
    h2d_pageable_bytes_per_s: float | None = None
    d2h_bytes_per_s: float | None = None
    d2h_pageable_bytes_per_s: float | None = None
    disk_bytes_per_s: float | None = None
    """Sequential read where the models lie."""
    launch_s: float | None = None
    """Not a rate: seconds of launching one kernel that has nothing to do (`hybrid.schedule.launch`)."""
    replay_s: float | None = None
    """Seconds of replaying a graph of `launch.KERNELS` of them."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A computer."""

    name: str
    """`this machine`, or the assumed one's name."""
    assumed: bool
    gpus: tuple[Gpu, ...]
    cpu: Cpu
    memory: Memory
    rates: Rates
    emulated: bool = False
    """The "device" whose rates are given is the CPU."""
    measured_at: str = ""
    """ISO date and time; empty where rates were not measured."""
    notes: tuple[str, ...] = ()
    """What a reader should know about the figures, a sentence each."""
    sources: Mapping[str, str] | None = None
    """Of an assumed machine's figures, by name."""

    @property
    def gpu(self) -> Gpu | None:
        """The one that is used: the first."""
        return self.gpus[0] if self.gpus else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Machine:
        """The inverse of `to_dict`. Raises TypeError, KeyError or ValueError for what is none."""
        if not all(_sound(rate) for rate in values["rates"].values()):
            raise ValueError("rates that cannot be")
        if not all(isinstance(text, str) for text in (values["name"], values["measured_at"], *values["notes"])):
            raise TypeError("words that are none")
        gpus = tuple(Gpu(**{**gpu, "users": tuple(GpuUser(**user) for user in gpu["users"])}) for gpu in values["gpus"])
        cpu = Cpu(**{**values["cpu"], "instruction_sets": tuple(values["cpu"]["instruction_sets"])})
        parts = {
            "gpus": gpus,
            "cpu": cpu,
            "memory": Memory(**values["memory"]),
            "rates": Rates(**values["rates"]),
            "notes": tuple(values["notes"]),
        }
        return cls(**{**values, **parts})


def _sound(rate: object) -> bool:
    """Whether a rate may be so: none, or what a memory or a processor can reach."""
    return rate is None or (isinstance(rate, (int, float)) and not isinstance(rate, bool) and 0 < rate < 1e18)
