"""Pictures of what was measured. matplotlib is imported when one is drawn, and may be missing."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid.errors import BadRequestError, UnsupportedError

if TYPE_CHECKING:
    from hybrid.report.tuning import Row, TuneReport

FORMATS = (".png", ".svg", ".pdf")
MIB = 1 << 20
TITLE = 70
"""Characters that fit the width of a picture."""


def check_plot(path: Path) -> None:
    """Raise, before anything is measured, where a picture could not be drawn afterwards."""
    if path.suffix.lower() not in FORMATS:
        raise BadRequestError(f"A plot is one of {', '.join(FORMATS)} by its name, which {path.name} is not.")
    if not path.absolute().parent.is_dir():
        raise BadRequestError(f"There is no folder {path.absolute().parent} to put the plot into.")
    pyplot()


def plot_tuning(report: TuneReport, path: Path) -> None:
    """Speed and memory over the layers on the device, with the budget's line; written whole or not at all."""
    plt = pyplot()
    figure, (speed, memory) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 7), height_ratios=(3, 2), layout="constrained"
    )
    _draw_speed(speed, report)
    _draw_memory(memory, report)
    emulated = " (the GPU is emulated on the CPU)" if report.emulated else ""
    figure.suptitle(title(f"{Path(report.model).name}, {report.request.n_ctx} tokens of context{emulated}"))
    save_figure(figure, path)


def title(text: str) -> str:
    """The text in lines that fit; a file's name may be of any length."""
    return "\n".join(textwrap.wrap(text, TITLE))


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure whole or not at all, and forget it. Raises BadRequestError where the file cannot be written."""
    temporary = path.with_name(f".{path.name}.part{path.suffix}")
    try:
        figure.savefig(temporary, dpi=120)
        temporary.replace(path)
    except OSError as e:
        raise BadRequestError(f"The plot {path} cannot be written: {e.strerror}.") from e
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        pyplot().close(figure)


def _draw_speed(axes: Any, report: TuneReport) -> None:
    ttft, n = report.request.objective == "ttft", report.request.n_sequences

    def value(seconds: float) -> float:
        return seconds if ttft else n / seconds

    for colour, key, rows in _curves(report):
        guessed = [(row.placement.n_offloaded, value(row.predicted_s)) for row in rows if row.predicted_s is not None]
        ks, predicted = [k for k, _ in guessed], [speed for _, speed in guessed]
        # Points, for each was predicted from what was known before it was measured: a line would join what differs.
        axes.plot(ks, predicted, ".", markersize=4, color=colour, alpha=0.6, label=f"{key}: predicted")
        timed = [(row.placement.n_offloaded, row.measured) for row in rows if row.measured is not None]
        middles = [value(spread.median) for _, spread in timed]
        ends = [sorted((value(spread.least), value(spread.most))) for _, spread in timed]
        below = [middle - low for middle, (low, _) in zip(middles, ends, strict=True)]
        above = [high - middle for middle, (_, high) in zip(middles, ends, strict=True)]
        at, name = [k for k, _ in timed], f"{key}: measured, least to most"
        if timed:
            axes.errorbar(at, middles, [below, above], fmt="o-", color=colour, capsize=3, label=name)
        for row in rows:
            if row.verdict not in ("not measured", "best", "tie") and row.measured is None:
                axes.plot([row.placement.n_offloaded], [0], "x", color=colour)
    if report.best is not None and (best := report.rows[report.best]).measured is not None:
        point = best.placement.n_offloaded, value(best.measured.median)
        axes.plot(*point, "*", markersize=12, color="gold", markeredgecolor="black", label="best", zorder=5)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("seconds to the first token" if ttft else "tokens per second")
    what = f"a prompt of {report.depth} tokens" if ttft else f"at {report.depth} tokens of context"
    axes.set_title(f"{report.request.objective}, {what}", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small", framealpha=0.5, ncols=2)


def _draw_memory(axes: Any, report: TuneReport) -> None:
    for colour, key, rows in _curves(report):
        ks = [row.placement.n_offloaded for row in rows]
        axes.plot(
            ks,
            [row.vram_bytes / MIB for row in rows],
            ".-",
            markersize=3,
            color=colour,
            label=f"{key}: VRAM, by the ledger",
        )
        axes.plot(
            ks, [row.ram_bytes / MIB for row in rows], ".--", markersize=3, color=colour, alpha=0.6, label=f"{key}: RAM"
        )
        seen = [row for row in rows if row.device_bytes is not None]
        axes.plot([r.placement.n_offloaded for r in seen], [(r.device_bytes or 0) / MIB for r in seen], "o",
                  color=colour, markersize=4, label="VRAM, most seen" if seen else None)  # fmt: skip
    if report.budget.vram_bytes is not None:
        line = report.budget.vram_bytes / MIB
        axes.axhline(line, color="red", linewidth=1.2, label=f"VRAM budget, {line:,.0f} MiB")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("layers on the device (-ngl)")
    axes.set_ylabel("MiB")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small", framealpha=0.5, ncols=2)


def _curves(report: TuneReport) -> Iterator[tuple[str, str, list[Row]]]:
    """A colour, a name and the rows by their layers, for each KV strategy and number of threads that was tried."""
    several = len({row.placement.n_threads_tail for row in report.rows}) > 1

    def name(row: Row) -> str:
        p = row.placement
        kv = p.strategy if p.llama_gpu_layers else f"--kv {p.strategy}"
        return f"{kv} -t {p.n_threads_tail}" if several else kv

    for number, key in enumerate(dict.fromkeys(name(row) for row in report.rows)):
        rows = [row for row in report.rows if name(row) == key]
        yield f"C{number}", key, sorted(rows, key=lambda row: row.placement.n_offloaded)


def pyplot() -> Any:
    """matplotlib.pyplot, drawing into files. Raises UnsupportedError where it is not installed."""
    try:
        import matplotlib
    except ImportError as e:
        raise UnsupportedError(
            "Plots need matplotlib, which is not installed; install it with: pip install matplotlib"
        ) from e
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
