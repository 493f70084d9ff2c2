"""`hybrid tune`: find the split that is quickest here, by measuring."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

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
from hybrid.cli.units import Bytes, Seconds, Whole
from hybrid.errors import BadRequestError, EngineError
from hybrid.schedule.placement import ENGINES

if TYPE_CHECKING:
    from hybrid.report.tuning import TuneReport

IN_CHAT = ("depth", "objective", "vram_bytes", "vram_reserve", "budget_s", "threads", "n_batch", "engine", "exhaustive")
"""Options that the chat's `/tune` has too: the others are the conversation's, or say how to print."""
OBJECTIVES = ("latency", "ttft", "throughput")


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
@click.option("--objective", type=click.Choice(OBJECTIVES), default="latency", show_default=True,
              help="What to be quick at: tokens one by one, the first token of a prompt of D tokens, or the tokens of "
                   "all sequences together.")  # fmt: skip
@click.option("--vram-budget", "vram_bytes", type=Bytes(), metavar="BYTES",
              help="VRAM that may be used.  [default: what is free, less the reserve]")  # fmt: skip
@vram_reserve_option
@click.option("--budget", "budget_s", type=Seconds(), default="120s", show_default=True, metavar="SECONDS",
              help="The longest it may take; the very first measurement may need more.")  # fmt: skip
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
    goes by what was measured. Ctrl-C keeps what is there; another tune goes on from it. Where nothing could be measured
    it ends with exit code 2.
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
    if report.trouble:
        raise EngineError(report.trouble)


def chat_options(text: str) -> dict[str, Any]:
    """What the words after the chat's `/tune` ask for, by TuneRequest's names; only what they name. Raises
    BadRequestError with a sentence for what is no option."""
    parser = click.Command("/tune", params=[p for p in command.params if p.name in IN_CHAT], add_help_option=False)
    try:
        asked = parser.make_context("/tune", shlex.split(text))
    except (click.UsageError, ValueError) as e:
        why = e.format_message() if isinstance(e, click.UsageError) else str(e)
        names = " ".join(p.opts[0] for p in parser.params)
        raise BadRequestError(f"{why.rstrip('.')}; /tune has {names}.") from e
    given = (name for name in asked.params if asked.get_parameter_source(name) is ParameterSource.COMMANDLINE)
    return {name: asked.params[name] for name in given}


def _print(report: TuneReport) -> None:
    from rich.console import Console

    from hybrid.cli.tune_table import print_tuning

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = max(console.width, 100)  # a file has room
    print_tuning(report, console)
