"""`hybrid machine`: what this computer is, and how fast its memories are."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import click

from hybrid.cli.options import json_option
from hybrid.schedule.launch import KERNELS

if TYPE_CHECKING:
    from hybrid.schedule.machine import Machine


@click.command()
@click.option("--refresh", is_flag=True, help="Measure again instead of using what was measured before.")
@click.option("--machine", "assumed", metavar="NAME|FILE", help="Show an assumed machine instead of this one.")
@click.option("--list", "names", is_flag=True, help="List the assumed machines.")
@json_option
def command(refresh: bool, assumed: str | None, names: bool, as_json: bool) -> None:
    """Show GPUs, cores and memory as this process may use them, and the bandwidths between them, measured.

    Measuring takes a few seconds, once; plans use the result. Assumed machines are for `hybrid plan --machine`.
    """
    if names:
        _list(as_json)
        return
    started = time.perf_counter()
    machine, cached = _machine(refresh, assumed)
    facts = {**machine.to_dict(), "cached": cached, "probe_s": None if cached else time.perf_counter() - started}
    if as_json:
        click.echo(json.dumps(facts, ensure_ascii=False))
    else:
        _print(machine)


def _machine(refresh: bool, assumed: str | None) -> tuple[Machine, bool]:
    """The machine to show, and whether its rates were there already."""
    from hybrid.model.catalog import models_dir
    from hybrid.schedule import machine_store
    from hybrid.schedule.presets import assumed_machine

    if assumed is not None:
        return assumed_machine(assumed), True
    known = None if refresh else machine_store.this_machine()
    if known is not None:
        return known, True
    return machine_store.measure(models_dir()), False


def _list(as_json: bool) -> None:
    from hybrid.schedule.presets import describe_preset, preset_names

    described = {name: describe_preset(name) for name in preset_names()}
    if as_json:
        click.echo(json.dumps(described))
        return
    for name, text in described.items():
        click.echo(f"{name:14} {text}")


def _print(machine: Machine) -> None:
    from rich.console import Console
    from rich.table import Table

    from hybrid.cli.tables import say

    console = Console(highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in _rows(machine):
        table.add_row(name, value)
    console.print(f"[bold]{machine.name}[/bold]" + (" (assumed)" if machine.assumed else ""))
    console.print(table)
    for note in machine.notes:
        say(console, note)
    if machine.measured_at:
        console.print(f"Measured {machine.measured_at}; --refresh measures again.", markup=False)


def _rows(machine: Machine) -> list[tuple[str, str]]:
    cpu, memory, rates = machine.cpu, machine.memory, machine.rates
    rows = [("GPU", "none that can be used")] if not machine.gpus else []
    for gpu in machine.gpus:
        link = f", PCIe {gpu.pcie}" if gpu.pcie else ""
        rows.append(("GPU", f"{gpu.name}: {_gib(gpu.free_bytes)} of {_gib(gpu.total_bytes)} free{link}"))
        rows += [("", f"{user.name} ({user.pid}) holds {_held(user.n_bytes)}") for user in gpu.users]
    quota = f", a quota of {cpu.quota:.0%} of one" if cpu.quota is not None else ""
    rows.append(("CPU", f"{cpu.model}: {cpu.cores} of {cpu.physical_cores} cores usable{quota}"))
    if cpu.instruction_sets:
        rows.append(("", " ".join(cpu.instruction_sets)))
    limit = f", limited to {_gib(memory.limit_bytes)}" if memory.limit_bytes is not None else ""
    rows.append(("RAM", f"{_gib(memory.available_bytes)} of {_gib(memory.total_bytes)} available{limit}"))
    device = "emulated device" if machine.emulated else "GPU memory"
    for name, rate, unit in (
        ("RAM, all cores", rates.host_bytes_per_s, "B/s"),
        ("RAM, one core", rates.host_bytes_per_s_one_core, "B/s"),
        ("CPU matmul", rates.host_flop_per_s, "FLOP/s"),
        (device, rates.device_bytes_per_s, "B/s"),
        (f"{device.split()[0]} matmul", rates.device_flop_per_s, "FLOP/s"),
        ("host to device", rates.h2d_bytes_per_s, "B/s"),
        ("  pageable", rates.h2d_pageable_bytes_per_s, "B/s"),
        ("device to host", rates.d2h_bytes_per_s, "B/s"),
        ("  pageable", rates.d2h_pageable_bytes_per_s, "B/s"),
        ("disk", rates.disk_bytes_per_s, "B/s"),
    ):
        if rate is not None:
            rows.append((name, _rate(rate, unit)))
    for name, seconds in (("kernel launch", rates.launch_s), (f"graph of {KERNELS}", rates.replay_s)):
        if seconds is not None:
            rows.append((name, f"{1e6 * seconds:.1f} µs"))
    return rows


def _rate(rate: float, unit: str) -> str:
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if rate >= factor:
            return f"{rate / factor:.1f} {prefix}{unit}"
    return f"{rate:.0f} {unit}"


def _gib(n_bytes: int | None) -> str:
    return "?" if n_bytes is None else f"{n_bytes / 2**30:.1f} GiB"


def _held(n_bytes: Any) -> str:
    return "some of it" if n_bytes is None else f"{n_bytes / 2**20:,.0f} MiB"
