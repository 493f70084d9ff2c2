"""This machine as it was measured, remembered in the user's cache directory. Facts are always fresh; rates are kept."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybrid.files import replacing
from hybrid.schedule import facts
from hybrid.schedule.limits import busy_load
from hybrid.schedule.machine import Cpu, Gpu, Machine, Memory

VERSION = 1
"""Of the file and of how rates are measured; another one's file is measured anew."""


def this_machine(cache: Path | None = None) -> Machine | None:
    """The measured machine with today's free memory; None where it was not measured yet, or has changed since."""
    cpu, memory, gpus = facts.cpu(), facts.memory(), facts.gpus()
    machine = _load(cache or cache_dir(), fingerprint(cpu, memory, gpus))
    if machine is None:
        return None
    if not gpus and machine.gpus:  # what only torch can see is as it was when it was measured
        gpus = machine.gpus
    return replace(machine, cpu=cpu, memory=memory, gpus=gpus)


def unmeasured_machine() -> Machine:
    """This machine's facts with rates assumed from the default preset, until it is measured."""
    from hybrid.schedule.presets import assumed_machine

    gpus = facts.gpus()
    default = assumed_machine("rtx3060" if gpus else "cpu")
    return replace(
        default,
        name="this machine",
        gpus=gpus,
        cpu=facts.cpu(),
        memory=facts.memory(),
        emulated=not gpus,
        notes=("This machine was not measured yet; speeds are assumed. `hybrid machine` measures it.",),
    )


def measure(models: Path | None, cache: Path | None = None) -> Machine:
    """Measure this machine and remember it. A cache that cannot be written costs only the next start."""
    from hybrid.schedule.probe import probe

    load = busy_load()
    machine = probe(models)
    if load is not None:
        said = f"These rates were measured beside other programs (a load of {load:.1f} on {machine.cpu.cores} cores)"
        machine = replace(machine, notes=(*machine.notes, f"{said}: `hybrid machine --refresh` measures again."))
    gpus = facts.gpus()
    save(machine, cache or cache_dir(), fingerprint(machine.cpu, machine.memory, gpus))
    return machine


def fingerprint(cpu: Cpu, memory: Memory, gpus: tuple[Gpu, ...]) -> str:
    """A short key of what makes rates differ: processor, usable cores, amount of RAM, GPUs."""
    parts: list[Any] = [VERSION, cpu.model, cpu.cores, cpu.logical_cpus, cpu.quota, memory.total_bytes >> 28]
    parts += [(gpu.name, gpu.total_bytes) for gpu in gpus]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def cache_dir() -> Path:
    """Where measurements are remembered."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("hybrid"))


def save(machine: Machine, cache: Path, key: str) -> None:
    """Write the machine whole or not at all."""
    with suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        with replacing(cache / f"machine-{key}.json") as file:
            json.dump({"version": VERSION, "machine": machine.to_dict()}, file, indent=2)


def _load(cache: Path, key: str) -> Machine | None:
    """What was saved; None for a file that is not there, damaged, or another version's."""
    try:
        stored = json.loads((cache / f"machine-{key}.json").read_text())
        return Machine.from_dict(stored["machine"]) if stored["version"] == VERSION else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
