"""`hybrid tune`: find the split that is quickest here, by measuring."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybrid.cli import INTERRUPTED
from hybrid.cli.measuring import measuring
from hybrid.cli.options import (
    batch_size_option,
    ctx_size_option,
    json_option,
    kv_type_option,
    model_argument,
    vram_reserve_option,
)
from hybrid.cli.units import Bytes, Seconds, Whole, size
from hybrid.schedule.placement import ENGINES

if TYPE_CHECKING:
    from hybrid.report.tuning import Row, TuneReport

OBJECTIVES = {"latency": "tok/s", "ttft": "TTFT", "throughput": "tok/s"}


def _threads(ctx: click.Context, param: click.Parameter, value: str | None) -> int | str | None:
    if value is None or value == "auto":
        return value
    if not (value.isascii() and value.isdecimal() and len(value) < 10 and int(value)):
        raise click.BadParameter(f"{value!r} is not a number of threads or 'auto'", ctx, param)
    return int(value)


@click.command()
@model_argument
@ctx_size_option
@click.option("--depth", type=Whole(min=1), metavar="D",
              help="Tokens in the context while speed is measured.  [default: half the context]")  # fmt: skip
@click.option("--sequences", "n_sequences", type=Whole(min=1), default=1, show_default=True, metavar="S",
              help="Sequences decoded together.")  # fmt: skip
@click.option("--objective", type=click.Choice(list(OBJECTIVES)), default="latency", show_default=True,
              help="What to be quick at: tokens one by one, the first token of a prompt of D tokens, or the tokens of "
                   "all sequences together.")  # fmt: skip
@click.option("--vram-budget", "vram_bytes", type=Bytes(), metavar="BYTES",
              help="VRAM that may be used.  [default: what is free, less the reserve]")  # fmt: skip
@vram_reserve_option
@click.option("--budget", "budget_s", type=Seconds(), default="120s", show_default=True, metavar="SECONDS",
              help="The longest it may take.")  # fmt: skip
@click.option("--threads", "-t", "threads", metavar="N|auto", callback=_threads,
              help="CPU threads; auto tries a few numbers.  [default: all cores]")  # fmt: skip
@batch_size_option
@kv_type_option
@click.option("--engine", type=click.Choice(ENGINES), default="auto", show_default=True,
              help="Whose GPU layers: hybrid's, llama.cpp's own (where it was built with a GPU), or both.")  # fmt: skip
@click.option("--device", metavar="NAME", help="The head's PyTorch device; cpu emulates a GPU.")
@click.option("--exhaustive", is_flag=True, help="Measure everything that fits, twice, however long it takes.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Draw speed and memory over the layers (PNG, SVG or PDF; needs matplotlib).")  # fmt: skip
@json_option
def command(model: str | None, plot: Path | None, as_json: bool, **options: Any) -> None:
    """Measure which split of MODEL is quickest on this machine, and remember it.

    What cannot fit is left out; of the rest the few that matter are run, each in a process of its own. `-ngl auto` then
    goes by what was measured. Ctrl-C keeps what is there; another tune goes on from it.
    """
    from hybrid.apps.tune import TuneRequest, tune
    from hybrid.model.catalog import DEFAULT_MODEL, resolve_model

    if plot is not None:
        from hybrid.report.plot import check_plot

        check_plot(plot)
    request, name = TuneRequest(**options), model or DEFAULT_MODEL
    ends = time.monotonic() + request.budget_s

    def left() -> str:
        seconds = ends - time.monotonic()
        if seconds > 0:
            return f"{'about' if request.exhaustive else 'at most'} {seconds:.0f} s left"
        return "longer than expected" if request.exhaustive else f"the {request.budget_s:.0f} s are over; finishing"

    with measuring(left) as show:

        def on_progress(what: str, spent: float, left: float) -> None:
            nonlocal ends
            ends = time.monotonic() + left
            show(what, spent / max(spent + left, 1e-9))

        report = tune(resolve_model(model), request, name=name, on_progress=on_progress)
    if as_json:
        click.echo(json.dumps(report.to_dict(), ensure_ascii=False))
    else:
        _print(report)
    if plot is not None:
        from hybrid.report.plot import plot_tuning

        plot_tuning(report, plot)
    if report.interrupted:
        sys.exit(INTERRUPTED)


# -- for people --------------------------------------------------------------------------------------------------------


def _print(report: TuneReport) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = max(console.width, 100)  # a file has room
    request = report.request
    many = f", {request.n_sequences} sequences" if request.n_sequences > 1 else ""
    ttft = request.objective == "ttft"
    what = f"the first token of {report.depth} tokens" if ttft else f"a token at {report.depth} tokens"
    console.print(f"{report.model}: {request.n_ctx} tokens{many}, {what}", markup=False)
    budget = "" if report.budget.vram_bytes is None else f"{size(report.budget.vram_bytes)} of VRAM and "
    console.print(f"{budget}{size(report.budget.ram_bytes)} of RAM may be used", markup=False)
    for note in report.notes:
        console.print(note, markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    unit = "s" if ttft else "tok/s"
    for name in ("-ngl", "--kv", "-t", "VRAM", "RAM", "predicted", f"measured {unit}", "runs"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in _shown(report):
        table.add_row(*_cells(row, report))
    console.print()
    console.print(table)
    console.print()
    _conclude(report, console)


def _conclude(report: TuneReport, console: Any) -> None:
    left_out = sum(row.measured is None and row.verdict == "not measured" for row in report.rows)
    earlier = f" and {report.reused} earlier" if report.reused else ""
    runs = f"{len(report.trials)} measurement{'s' * (len(report.trials) != 1)}"
    console.print(
        f"{runs}{earlier} in {report.elapsed_s:.0f} s; {left_out} of {len(report.rows)} "
        f"placements that fit were not measured; one measurement is within {100 * report.noise:.0f} %.",
        markup=False,
    )
    for message in dict.fromkeys(row.message for row in report.rows if row.message):
        where = ", ".join(_name(row) for row in report.rows if row.message == message)
        console.print(f"Failed at {where}: {message}", markup=False)
    ties = [row for row in report.rows if row.verdict == "tie"]
    if report.best is not None and ties:
        others = ", ".join(_name(row) for row in ties)
        console.print(f"Not told apart from the best: {others}.", markup=False)
    if report.command:
        emulated = " (emulated)" if report.emulated and report.rows[report.best or 0].placement.n_gpu_layers else ""
        console.print(f"Use{emulated}: {report.command}", markup=False)
    else:
        console.print("Nothing was measured.", markup=False)


def _name(row: Row) -> str:
    p = row.placement
    return f"-ngl {p.n_offloaded}" + (f" ({p.strategy})" if p.strategy != "device" else "")


def _shown(report: TuneReport) -> list[Row]:
    """What was measured or failed, and both ends."""
    last = len(report.rows) - 1
    return [row for i, row in enumerate(report.rows) if row.verdict != "not measured" or i in (0, last)]


def _cells(row: Row, report: TuneReport) -> list[str]:
    p = row.placement
    measured = "-"
    if row.measured is not None:
        middle = _speed(row.measured.median, report)
        ends = sorted(float(_speed(s, report)) for s in (row.measured.least, row.measured.most))
        measured = f"{middle} ± {(ends[1] - ends[0]) / 2:.{2 if report.request.objective == 'ttft' else 1}f}"
    style = "[bold]" if row.verdict == "best" else ""
    cells = [
        str(p.n_offloaded),
        p.strategy if p.n_offloaded else "-",
        str(p.n_threads_tail),
        size(row.vram_bytes) if p.n_offloaded else "-",
        size(row.ram_bytes),
        _speed(row.predicted_s, report),
        measured,
        str(row.n_runs) if row.n_runs else "-",
        row.verdict,
    ]
    return [style + cell for cell in cells]


def _speed(seconds: float, report: TuneReport) -> str:
    if report.request.objective == "ttft":
        return f"{seconds:.2f}"
    return f"{report.request.n_sequences / seconds:.1f}"
