"""`hybrid plan`: what fits, and what it would cost, without loading anything."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from hybrid.cli.options import (
    batch_size_option,
    ctx_size_option,
    json_option,
    kv_type_option,
    model_argument,
    vram_reserve_option,
)
from hybrid.cli.units import Bytes, Seconds, Whole, size
from hybrid.errors import BadRequestError, OutOfMemoryError

if TYPE_CHECKING:
    from hybrid.apps.plan import PlanReport
    from hybrid.model.spec import ModelSpec
    from hybrid.schedule.candidates import Candidate
    from hybrid.schedule.machine import Machine
    from hybrid.schedule.profile import Profile

ROWS = 12
"""About as many placements as a person wants to compare; --json has them all."""


@click.command()
@model_argument
@ctx_size_option
@click.option("--sequences", "n_sequences", type=Whole(min=1), default=1, show_default=True, metavar="S",
              help="Sequences at the same time; each has a context of its own.")  # fmt: skip
@batch_size_option
@kv_type_option
@click.option("--machine", metavar="NAME|FILE", help="Plan for an assumed machine (`hybrid machine --list`).")
@click.option("--device", metavar="NAME", help="The head's PyTorch device; cpu emulates a GPU.")
@click.option("--vram", type=Bytes(), metavar="BYTES", help="VRAM that may be used.  [default: what is free]")
@vram_reserve_option
@click.option("--tpot", type=Seconds(), metavar="TIME", help="The longest a token may take, e.g. 50ms.")
@click.option(
    "--shape", metavar="NAME=VALUE,…", help="Plan a model without its file: layers=32,kv_heads=8,head_dim=128."
)
@json_option
def command(model: str | None, shape: str | None, machine: str | None, as_json: bool, **options: Any) -> None:
    """Show which placements of MODEL fit, and predict time to first token and speed for each.

    Nothing is loaded; the answer takes a fraction of a second. Predictions rest on this machine's measured bandwidths
    (`hybrid machine`) or on an assumed machine's, and say how far they may be off. Where nothing fits it ends with exit
    code 2.
    """
    report, title = _report(model, shape, machine, options)
    if as_json:
        click.echo(json.dumps({"model": title, **report.to_dict()}, ensure_ascii=False))
    else:
        _print(report, title)
    if report.best is None:
        raise OutOfMemoryError(f"Nothing fits ({report.candidates[0].reason}).")


def _report(model: str | None, shape: str | None, machine: str | None, options: Any) -> tuple[PlanReport, str]:
    from hybrid.apps.plan import PlanRequest, make_plan

    spec, title, profile = _model(model, shape, remembered=machine is None)
    request = PlanRequest(
        n_ctx=options["n_ctx"],
        n_sequences=options["n_sequences"],
        n_batch=options["n_batch"],
        kv_dtype=options["kv_dtype"],
        device=options["device"],
        vram_bytes=options["vram"],
        vram_reserve=options["vram_reserve"],
        tpot_s=options["tpot"],
    )
    return make_plan(spec, _machine(machine), request, profile), title


def _model(model: str | None, shape: str | None, remembered: bool) -> tuple[ModelSpec, str, Profile | None]:
    """The model, what to call it, and what is remembered of it on this machine."""
    if shape is not None:
        from hybrid.schedule.shape import parse_shape, shape_spec

        if model is not None:
            raise BadRequestError("Give a model or a --shape, not both.")
        return shape_spec(parse_shape(shape)), f"shape {shape}", None
    from hybrid.model.architectures import read_spec
    from hybrid.model.catalog import resolve_model
    from hybrid.model.file import ModelFile
    from hybrid.schedule.identity import identify
    from hybrid.schedule.profile import ProfileStore

    with ModelFile(resolve_model(model)) as file:
        profile = ProfileStore(identify(file)).load() if remembered else None
        return read_spec(file), str(file.path), profile


def _machine(name: str | None) -> Machine:
    from hybrid.schedule.machine_store import this_machine, unmeasured_machine
    from hybrid.schedule.presets import assumed_machine

    return assumed_machine(name) if name is not None else this_machine() or unmeasured_machine()


# -- for people --------------------------------------------------------------------------------------------------------


def _print(report: PlanReport, title: str) -> None:
    from rich.console import Console

    from hybrid.cli.tables import figures, say, show

    console = Console(highlight=False, soft_wrap=True)
    request, machine = report.request, report.machine
    many = f", {request.n_sequences} sequences" if request.n_sequences > 1 else ""
    console.print(f"{title}: {request.n_ctx} tokens{many}", markup=False)
    where = "assumed" if machine.assumed else "measured" if machine.measured_at else "not measured"
    vram = "" if report.budget.vram_bytes is None else f"{size(report.budget.vram_bytes)} of VRAM and "
    console.print(f"{machine.name} ({where}): {vram}{size(report.budget.ram_bytes)} of RAM may be used", markup=False)
    for note in report.notes:
        say(console, note)
    half = request.n_ctx // 2
    columns = ["-ngl", "--kv", "VRAM", "RAM", f"TTFT {half}", "t/s empty", "half", "full"]
    columns += ["longest"] if request.tpot_s is not None else []
    table = figures(*columns)
    for candidate in _chosen(report):
        table.add_row(*_row(candidate, report))
    console.print()
    show(console, table)
    console.print()
    longest = "; `longest` is the context that still meets --tpot" if request.tpot_s is not None else ""
    say(console, f"Predicted speeds may be off by {100 * report.uncertainty:.0f} %{longest}.")
    if report.flags:
        console.print(f"Use: {report.flags}", markup=False)
    for line in report.advice:
        say(console, line)


def _chosen(report: PlanReport) -> list[Candidate]:
    """The best, both ends, those about where memory runs out, some between, and every KV strategy."""
    found = list(report.candidates)
    splits = [c for c in found if c.placement.kv == "device"]
    last = max((i for i, c in enumerate(splits) if c.fits), default=0)
    keep = {0, len(splits) - 1, last, min(last + 1, len(splits) - 1)}
    keep |= {round(i * (len(splits) - 1) / (ROWS - 5)) for i in range(ROWS - 4)}
    chosen = [splits[i] for i in sorted(keep)]
    if report.best is not None and report.best not in chosen:
        chosen = sorted([*chosen, report.best], key=lambda c: c.placement.n_gpu_layers)
    return chosen + [c for c in found if c.placement.kv != "device"]


def _row(candidate: Candidate, report: PlanReport) -> list[str]:
    p, n_ctx = candidate.placement, report.request.n_ctx
    style = "" if candidate.fits else "[dim]"
    speeds = [p.n_sequences / candidate.tpot_s[depth] for depth in (0, n_ctx // 2, n_ctx)]
    cells = [
        str(p.n_gpu_layers),
        p.kv if p.n_gpu_layers else "-",
        size(candidate.ledger.vram_bytes) if p.n_gpu_layers else "-",
        size(candidate.ledger.ram_bytes),
        _seconds(candidate.ttft_s[n_ctx // 2]),
        *(f"{speed:.1f}" for speed in speeds),
    ]
    if report.request.tpot_s is not None:
        cells.append(_tokens(candidate.longest_context or 0))
    return [style + cell for cell in [*cells, _mark(candidate, report)]]


def _mark(candidate: Candidate, report: PlanReport) -> str:
    if candidate is report.best:
        return "best"
    if not candidate.fits:
        return f"{candidate.lacks} short"
    if not candidate.available:
        return "not in this version"
    return "emulated" if candidate.ledger.emulated else ""


def _tokens(n: int) -> str:
    return f"{n / 2**20:.0f}M" if n >= 10 << 20 else f"{n / 2**10:.0f}k" if n >= 10 << 10 else str(n)


def _seconds(seconds: float) -> str:
    for unit, n, most in (("s", 1, 100), ("min", 60, 100), ("h", 3600, 100)):
        if seconds < n * most:
            return f"{seconds / n:.{n == 1:d}f} {unit}"
    return f"{seconds / 86400:.0f} d"
