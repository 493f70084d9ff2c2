"""The picture of a comparison: speed and both memories over the depth, one line a mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybrid.report.comparing import CompareReport, CompareRow
from hybrid.report.plot import MIB, pyplot, save_figure, title

MARKERS = "osD^vP*X"
FAR_APART = 20
"""The fastest is so many times as fast as the slowest: a linear axis would not show what lies between."""


def plot_comparison(report: CompareReport, path: Path) -> None:
    """A column for each number of sequences and cache type; written whole or not at all."""
    plt = pyplot()
    kinds = list(dict.fromkeys((row.setting.kv_dtype, row.setting.n_sequences) for row in report.rows))
    figure, axes = plt.subplots(
        3,
        len(kinds),
        sharex=True,
        sharey="row",
        squeeze=False,
        figsize=(max(7.5, 4.5 * len(kinds)), 9),
        height_ratios=(4, 3, 3),
        layout="constrained",
    )
    for column, (kv_dtype, n_sequences) in enumerate(kinds):
        rows = [r for r in report.rows if (r.setting.kv_dtype, r.setting.n_sequences) == (kv_dtype, n_sequences)]
        speed, vram, ram = axes[:, column]
        speed.set_title(f"{n_sequences} sequence{'s' * (n_sequences > 1)}, {kv_dtype} cache", fontsize="medium")
        _draw_speed(speed, report, rows)
        _draw_vram(vram, report, rows)
        _draw_ram(ram, report, rows)
        ram.set_xlabel("tokens in the context")
        depths = sorted({row.setting.depth for row in rows})
        if depths[-1] >= 16 * depths[0]:
            ram.set_xscale("log", base=2)
        ram.set_xticks(depths, [f"{depth:,}" for depth in depths])
        ram.minorticks_off()
        for one in (speed, vram, ram):
            one.grid(alpha=0.3)
    for one, name in zip(
        axes[:, 0], ("decode, tokens per second", "VRAM, MiB", "RAM of the process, MiB"), strict=True
    ):
        one.set_ylabel(name)
        one.set_ylim(bottom=0)
        one.margins(y=0.12)
    speeds = [row.tok_per_s for row in report.rows if row.tok_per_s is not None]
    if speeds and max(speeds) > FAR_APART * min(speeds):
        axes[0, 0].set_yscale("log")
        axes[0, 0].set_ylim(min(speeds) / 2, max(speeds) * 1.5)
        axes[0, 0].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    emulated = " (the GPU is emulated on the CPU)" if report.emulated else ""
    figure.suptitle(title(f"{Path(report.model).name}{emulated}"))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small",
                  title="bars: least to most of the runs; crosses: failed; hollow: what it would have needed",
                  title_fontsize="small")  # fmt: skip
    save_figure(figure, path)


def _draw_speed(axes: Any, report: CompareReport, rows: Sequence[CompareRow]) -> None:
    lost: Counter[int] = Counter()
    first = min(row.setting.depth for row in report.rows)
    for number, mode in enumerate(report.modes):
        ours = [row for row in rows if row.mode == mode]
        timed = [(row, row.decode) for row in ours if row.decode is not None]
        at = [row.setting.depth for row, _ in timed]
        n = [row.setting.n_sequences for row, _ in timed]
        middles = [n / spread.median for n, (_, spread) in zip(n, timed, strict=True)]
        below = [m - n / spread.most for m, n, (_, spread) in zip(middles, n, timed, strict=True)]
        above = [n / spread.least - m for m, n, (_, spread) in zip(middles, n, timed, strict=True)]
        axes.errorbar(at, middles, [below, above], fmt=MARKERS[number % len(MARKERS)] + "-", color=f"C{number}",
                      capsize=3, markersize=5, label=mode)  # fmt: skip
        for row in ours:
            if row.failure is not None:
                axes.plot(
                    [row.setting.depth],
                    [0],
                    "x",
                    color=f"C{number}",
                    markersize=9,
                    clip_on=False,
                    zorder=5,
                    transform=axes.get_xaxis_transform(),
                )
                depth = row.setting.depth
                side, dx = ("left", 8) if depth == first else ("right", -8)  # where there is room in the axes
                axes.annotate(f"{mode}: {row.failure.kind}", (depth, 0), xytext=(dx, 5 + 12 * lost[depth]),
                              xycoords=axes.get_xaxis_transform(),
                              textcoords="offset points", ha=side, fontsize="small", color=f"C{number}")  # fmt: skip
                lost[depth] += 1


def _draw_vram(axes: Any, report: CompareReport, rows: Sequence[CompareRow]) -> None:
    for number, mode in enumerate(report.modes):
        ours = [row for row in rows if row.mode == mode]
        seen = [(row.setting.depth, 0 if not _on_device(row) else _most_vram(row)) for row in ours if row.finished]
        points = [(depth, n_bytes / MIB) for depth, n_bytes in seen if n_bytes is not None]
        look = {"color": f"C{number}", "marker": MARKERS[number % len(MARKERS)], "markersize": 5}
        axes.plot([x for x, _ in points], [y for _, y in points], "-", **look)
        lost = [row for row in ours if row.failure is not None and row.vram_needed]
        axes.plot([row.setting.depth for row in lost], [row.vram_needed / MIB for row in lost], linestyle="none",
                  fillstyle="none", **look)  # fmt: skip
    if report.vram_bytes is not None:
        line = report.vram_bytes / MIB
        axes.axhline(line, color="red", linewidth=1.2, linestyle="--")
        axes.annotate(f"budget, {line:,.0f} MiB", (0.01, line), xycoords=("axes fraction", "data"), xytext=(2, 3),
                      textcoords="offset points", fontsize="small", color="red")  # fmt: skip


def _draw_ram(axes: Any, report: CompareReport, rows: Sequence[CompareRow]) -> None:
    for number, mode in enumerate(report.modes):
        seen = [(r.setting.depth, r.most("host_bytes")) for r in rows if r.mode == mode and r.finished]
        points = [(depth, n_bytes / MIB) for depth, n_bytes in seen if n_bytes is not None]
        axes.plot([x for x, _ in points], [y for _, y in points], MARKERS[number % len(MARKERS)] + "-",
                  color=f"C{number}", markersize=5)  # fmt: skip


def _on_device(row: CompareRow) -> bool:
    return bool(row.placement.n_gpu_layers or row.placement.llama_gpu_layers)


def _most_vram(row: CompareRow) -> int | None:
    """What the framework counted; what the driver said, where llama.cpp has the layers."""
    found = row.most("device_bytes")
    return found if found is not None else row.most("device_tool_bytes")
