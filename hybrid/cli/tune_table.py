"""What a tuning found, for people: the table of `hybrid tune` and of the chat's `/tune`."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from hybrid.cli.tables import figures, say, show
from hybrid.cli.units import size

if TYPE_CHECKING:
    from rich.console import Console

    from hybrid.report.tuning import Row, TuneReport


def print_tuning(report: TuneReport, console: Console) -> None:
    """What was asked, what there is to say about it, the table, and what follows."""
    request = report.request
    many = f", {request.n_sequences} sequences" if request.n_sequences > 1 else ""
    ttft = request.objective == "ttft"
    what = f"the first token of {report.depth} tokens" if ttft else f"a token at {report.depth} tokens"
    console.print(f"{report.model}: {request.n_ctx} tokens{many}, {what}", markup=False)
    budget = "" if report.budget.vram_bytes is None else f"{size(report.budget.vram_bytes)} of VRAM and "
    console.print(f"{budget}{size(report.budget.ram_bytes)} of RAM may be used", markup=False)
    for note in report.notes:
        say(console, note)
    unit = "s" if ttft else "tok/s"
    table = figures("-ngl", "--kv", "-t", "VRAM", "RAM", "predicted", f"measured {unit}", "runs")
    for row in _shown(report):
        table.add_row(*_cells(row, report))
    console.print()
    show(console, table)
    console.print()
    _conclude(report, console)


def tuning_text(report: TuneReport, width: int | None) -> str:
    """The same as text of lines shorter than `width` characters; None: as wide as it gets."""
    from rich.console import Console

    lines = io.StringIO()
    print_tuning(report, Console(file=lines, width=(width or 101) - 1, highlight=False, soft_wrap=True))
    return "\n".join(line.rstrip() for line in lines.getvalue().splitlines())


def _conclude(report: TuneReport, console: Console) -> None:
    left_out = sum(row.measured is None and row.verdict == "not measured" for row in report.rows)
    earlier = f" and {report.reused} earlier" if report.reused else ""
    runs = f"{len(report.trials)} measurement{'s' * (len(report.trials) != 1)}"
    within = f"; one measurement is within {100 * report.noise:.0f} %" if report.best is not None else ""
    left = f"{left_out} of {len(report.rows)} placements that fit were not measured"
    say(console, f"{runs}{earlier} in {report.elapsed_s:.0f} s; {left}{within}.")
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
    predicted = "-" if row.predicted_s is None else _speed(row.predicted_s, report)
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
        predicted,
        measured,
        str(row.n_runs) if row.n_runs else "-",
        row.verdict,
    ]
    return [style + cell for cell in cells]


def _speed(seconds: float, report: TuneReport) -> str:
    if report.request.objective == "ttft":
        return f"{seconds:.2f}"
    return f"{report.request.n_sequences / seconds:.1f}"
