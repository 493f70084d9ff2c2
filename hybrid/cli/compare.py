"""`hybrid compare`: the same work under several placements, measured, with a verdict."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybrid.cli import INTERRUPTED
from hybrid.cli.measuring import measuring
from hybrid.cli.options import json_option, model_argument, vram_reserve_option
from hybrid.cli.session import read_prompt
from hybrid.cli.units import MOST_SECONDS, Bytes, Number, Whole
from hybrid.errors import EngineError
from hybrid.printable import printable
from hybrid.schedule.placement import KV_DTYPES

if TYPE_CHECKING:
    from hybrid.report.comparing import CompareReport, CompareRow


def _words(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    words = tuple(dict.fromkeys(word.strip() for word in value.split(",") if word.strip()))
    if not words:
        raise click.BadParameter("there is nothing in it", ctx, param)
    return words


def _numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    words = _words(ctx, param, value)
    for word in words or ():
        if not (word.isascii() and word.isdecimal() and len(word) < 11 and 0 < int(word) < 2**31):
            raise click.BadParameter(f"{word!r} is not a number of 1 or more", ctx, param)
    return tuple(int(word) for word in words) if words else None


def _kv_types(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    words = _words(ctx, param, value)
    for word in words or ():
        if word not in KV_DTYPES:
            raise click.BadParameter(f"{word!r} is none of {', '.join(KV_DTYPES)}", ctx, param)
    return words


@click.command()
@model_argument
@click.option("-f", "--file", "prompt_file", metavar="FILE",
              help="Evaluate the text in FILE (- is stdin), and a short beginning of it.")  # fmt: skip
@click.option("--depths", metavar="D,…", callback=_numbers,
              help="Tokens in the context when decoding begins.  [default: few, and where VRAM ends]")  # fmt: skip
@click.option("--modes", metavar="MODE,…", callback=_words,
              help="device, stream, attend, tiered (all layers on the device, the KV cache as --kv says), split:15 (so "
                   "many layers there), llama.cpp (alone).  [default: all of them]")  # fmt: skip
@click.option("--sequences", "n_sequences", metavar="S,…", default="1", show_default=True, callback=_numbers,
              help="Sequences decoded together.")  # fmt: skip
@click.option("--kv-type", "kv_dtypes", metavar="TYPE,…", default="f16", show_default=True, callback=_kv_types,
              help=f"KV cache types: {', '.join(KV_DTYPES)}.")  # fmt: skip
@click.option("-n", "--predict", "n_decode", type=Whole(min=1), default=32, show_default=True, metavar="N",
              help="Tokens to decode in each run.")  # fmt: skip
@click.option("--repeats", type=Whole(min=1), default=3, show_default=True, metavar="R",
              help="Runs of everything, each in a process of its own.")  # fmt: skip
@click.option("--time-limit", "time_limit_s", type=Number(0, MOST_SECONDS, min_open=True), default=1800.0,
              show_default=True, metavar="SECONDS",
              help="End a run that takes longer, loading included, and record that; the others go on.")  # fmt: skip
@click.option("-b", "--batch-size", "n_batch", type=Whole(min=1), default=512, show_default=True, metavar="N",
              help="Prompt tokens per chunk, in all modes.")  # fmt: skip
@click.option("--device", metavar="NAME", help="The head's PyTorch device; cpu emulates a GPU.  [default: the GPU]")
@click.option("--vram-budget", "vram_bytes", type=Bytes(), metavar="BYTES",
              help="What the device may hold, as it counts.  [default: what is free, less the reserve]")  # fmt: skip
@vram_reserve_option
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Draw speed and memory over the depth (PNG, SVG or PDF; needs matplotlib).")  # fmt: skip
@click.option("--save", type=click.Path(path_type=Path), metavar="DIR",
              help="Write every run as JSON, into a new folder in DIR named by date and time.")  # fmt: skip
@json_option
def command(
    model: str | None, prompt_file: str | None, plot: Path | None, save: Path | None, as_json: bool, **options: Any
) -> None:
    """Compare ways of running MODEL on this machine: the layers split, the KV cache elsewhere, llama.cpp alone.

    Every condition is run in processes of its own, with the same file, tokens, limits and greedy sampling, in an order
    that goes there and back. What fails is shown as a failure and has no speed. Ctrl-C prints what was measured. Where
    everything failed it ends with exit code 2.
    """
    from hybrid.apps.compare import compare
    from hybrid.model.catalog import resolve_model
    from hybrid.report.comparing import CompareRequest

    if plot is not None:
        from hybrid.report.plot import check_plot

        check_plot(plot)
    if prompt_file is not None:
        if options["depths"] is not None:
            raise click.UsageError("Give a prompt with -f or --depths, not both")
        options["prompt"] = read_prompt(None, prompt_file)
    request, state = CompareRequest(**options), [0, 0]
    with measuring(lambda: f"{state[0]} of {state[1]} runs") as show:

        def on_progress(what: str, done: int, total: int) -> None:
            state[:] = done, total
            show(what, done / total)

        report = compare(resolve_model(model), request, save=save, on_progress=on_progress)
    if as_json:
        click.echo(json.dumps(report.to_dict(), ensure_ascii=False))
    else:
        _print(report)
    if report.saved is not None:
        click.echo(printable(f"Every run is a file in {report.saved}"), err=True)
    if plot is not None:
        from hybrid.report.plot_compare import plot_comparison

        plot_comparison(report, plot)
    if report.interrupted:
        sys.exit(INTERRUPTED)
    if report.trouble:
        raise EngineError(report.trouble)


# -- for people --------------------------------------------------------------------------------------------------------


def _print(report: CompareReport) -> None:
    from rich.console import Console

    from hybrid.apps.conditions import WARMUP

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = max(console.width, 150)  # a file has room
    request = report.request
    console.print(report.model, markup=False)
    limit = "" if report.vram_bytes is None else f", {_size(report.vram_bytes)} of VRAM"
    times = "once" if request.repeats == 1 else f"{request.repeats} times"
    console.print(
        f"{report.device}{limit}; {request.n_decode} tokens a run after {WARMUP} untimed ones, greedily; "
        f"everything {times}; prompts in chunks of {request.n_batch}",
        markup=False,
    )
    for note in report.notes:
        console.print(note, markup=False)
    console.print()
    console.print(table(report))
    console.print()
    for mode in report.modes:
        if mode != report.reference and (differs := report.differences(mode)):
            console.print(f"{mode} is {report.reference} with {'; '.join(differs)}", markup=False)
    for line in failures(report):
        console.print(line, markup=False)
    console.print()
    for line in report.verdict:
        console.print(f"- {line}", markup=False)


def failures(report: CompareReport) -> list[str]:
    """A line for each message with which something failed."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in report.rows:
        if row.failure is not None:
            found.setdefault((row.mode, row.failure.message), []).append(_setting(row, report))
    return [f"{mode} failed at {'; '.join(where)}: {message}" for (mode, message), where in found.items()]


def table(report: CompareReport) -> Any:
    """The rows as a rich table, a block for each setting."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, header_style="bold")
    columns = [name for name in COLUMNS if _wanted(name, report)]
    for name in columns:
        shown.add_column(name, justify="left" if name in ("mode", "output", "result") else "right", no_wrap=True)
    for number, (_, rows) in enumerate(report.groups):
        if number:
            shown.add_row()
        for row in rows:
            shown.add_row(*(_cell(name, row, report) for name in columns))
    return shown


COLUMNS = (
    "tokens", "seqs", "cache", "mode", "load s", "TTFT s", "prefill tok/s", "decode tok/s", "launch ms", "VRAM",
    "by driver", "RAM", "moved/step", "VRAM saved", "output", "result",
)  # fmt: skip
"""VRAM and RAM are the most that was seen; "by driver" is the process's VRAM with its context. "VRAM saved" is the
Ledger's, against all layers and their cache on the device; "moved/step" is what crossed the bus instead."""


def _wanted(name: str, report: CompareReport) -> bool:
    """Columns that would say nothing are left out; --json has all."""
    rows = report.rows
    if name == "seqs":
        return len({row.setting.n_sequences for row in rows}) > 1 or rows[0].setting.n_sequences > 1
    if name == "cache":
        return len({row.setting.kv_dtype for row in rows}) > 1 or rows[0].setting.kv_dtype != "f16"
    if name == "by driver":
        return any(row.most("device_tool_bytes") is not None for row in rows)
    return name != "launch ms" or any(row.launch_s is not None for row in rows)


def _cell(name: str, row: CompareRow, report: CompareReport) -> str:
    n, decode, ttft = row.setting.n_sequences, row.decode, row.ttft
    values: dict[str, str | None] = {
        "tokens": f"{row.setting.depth:,}",
        "seqs": str(n),
        "cache": row.setting.kv_dtype,
        "mode": row.mode,
        "load s": f"{row.load_s:.2f}" if row.load_s is not None else None,
        "TTFT s": _spread(ttft.median, ttft.most - ttft.least, ttft.n, 2) if ttft else None,
        "prefill tok/s": f"{row.prefill_tok_per_s:.0f}" if row.prefill_tok_per_s else None,
        "decode tok/s": _spread(n / decode.median, n / decode.least - n / decode.most, decode.n, 1) if decode else None,
        "launch ms": f"{1000 * row.launch_s:.2f}" if row.launch_s is not None else None,
        "VRAM": _seen(row, "device_bytes"),
        "by driver": _seen(row, "device_tool_bytes"),
        "RAM": _seen(row, "host_bytes"),
        "moved/step": _moved(row.moved_bytes),
        "VRAM saved": None if row.vram_saved is None else _size(row.vram_saved),
        "output": "baseline" if row.mode == report.baseline and row.finished else row.output,
        "result": _result(row, report.request.n_decode),
    }
    return values[name] or "-"


def _spread(middle: float, width: float, n: int, digits: int) -> str:
    """The median, and half of least to most where there is more than one run."""
    return f"{middle:.{digits}f}" + (f" ± {width / 2:.{digits}f}" if n > 1 else "")


def _result(row: CompareRow, asked: int) -> str:
    if row.failure is not None:
        return row.failure.kind
    if not row.trials:
        return "not measured"
    runs = f"{len(row.trials)} run{'s' * (len(row.trials) > 1)}"
    return f"{row.n_made} tokens, {runs}" if row.n_made >= asked else f"only {row.n_made} tokens, {runs}"


def _setting(row: CompareRow, report: CompareReport) -> str:
    s, parts = row.setting, [f"{row.setting.depth:,} tokens"]
    if _wanted("seqs", report):
        parts.append(f"{s.n_sequences} sequence{'s' * (s.n_sequences > 1)}")
    if _wanted("cache", report):
        parts.append(f"{s.kv_dtype} cache")
    return ", ".join(parts)


def _seen(row: CompareRow, figure: str) -> str | None:
    found = row.most(figure) if row.finished else None
    return None if found is None else _size(found)


def _moved(n_bytes: float | None) -> str | None:
    if n_bytes is None:
        return None
    return f"{n_bytes / 2**10:.0f} KiB" if n_bytes < 1 << 20 else _size(round(n_bytes))


def _size(n_bytes: int) -> str:
    sign, n_bytes = "-" * (n_bytes < 0), abs(n_bytes)
    return sign + (f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 10 << 30 else f"{n_bytes / 2**20:.0f} MiB")
