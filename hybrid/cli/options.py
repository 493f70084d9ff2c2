"""Options that several commands share, in llama.cpp's spelling. Each is named as the argument of `Hybrid` it sets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from hybrid.cli.units import Bytes, Number, Whole
from hybrid.schedule.placement import ENGINES, KV_DTYPES, KV_STRATEGIES

F = TypeVar("F", bound=Callable[..., Any])

PLACEMENT = ("n_gpu_layers", "device", "n_ctx", "n_batch", "n_ubatch", "n_threads", "kv", "kv_dtype", "kv_budget",
             "kv_keep_sliding", "engine", "offload_kqv", "vram_reserve")  # fmt: skip
"""Options that go to the constructor of Hybrid."""
SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed")
"""Options that go to `generate` and `chat`."""


def _layers(ctx: click.Context, param: click.Parameter, value: str) -> int | str:
    word = value.strip().lower()
    if word in ("all", "auto"):
        return word
    if not (word.isascii() and word.isdecimal() and len(word) < 10):
        raise click.BadParameter(f"{value!r} is not a number of layers, 'all' or 'auto'", ctx, param)
    return int(word)


def _until_end(ctx: click.Context, param: click.Parameter, value: int) -> int | None:
    return None if value == -1 else value


def pick(names: tuple[str, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `options` that are called one of `names`."""
    return {name: options[name] for name in names}


def _all(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    return lambda f: functools.reduce(lambda g, decorate: decorate(g), reversed(decorators), f)


_count = Whole(min=1)

model_argument = click.argument("model", required=False, metavar="[MODEL]")

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")

# Of the commands that plan and measure.
ctx_size_option = click.option("-c", "--ctx-size", "n_ctx", type=Whole(min=1), metavar="N", default=4096,
                               show_default=True, help="Context in tokens, per sequence.")  # fmt: skip
batch_size_option = click.option("-b", "--batch-size", "n_batch", type=Whole(min=1), metavar="N",
                                 help="Prompt tokens per chunk.  [default: the split's]")  # fmt: skip
kv_type_option = click.option("--kv-type", "kv_dtype", type=click.Choice(KV_DTYPES), default="f16", show_default=True,
                              help="KV cache type.")  # fmt: skip
vram_reserve_option = click.option("--vram-reserve", type=Bytes(), default="512MiB", show_default=True, metavar="BYTES",
                                   help="Of the free VRAM, what is left to the desktop.")  # fmt: skip

placement_options = _all(
    click.option(
        "-ngl",
        "--n-gpu-layers",
        metavar="N|all|auto",
        default="auto",
        show_default=True,
        callback=_layers,
        help="How many layers, counted from the first, live on the GPU.",
    ),
    click.option("--device", metavar="NAME", help="PyTorch device of those layers: cuda, cuda:1, mps, cpu (emulated)."),
    click.option(
        "-c",
        "--ctx-size",
        "n_ctx",
        type=Whole(min=0),
        metavar="N",
        help="Context in tokens; 0: as long as the model was trained for.  [default: what memory allows, up to 4096]",
    ),
    click.option("-b", "--batch-size", "n_batch", type=_count, metavar="N", help="Prompt tokens per chunk."),
    click.option(
        "-ub", "--ubatch-size", "n_ubatch", type=_count, metavar="N", help="Tokens llama.cpp takes at a time."
    ),
    click.option("-t", "--threads", "n_threads", type=_count, metavar="N", help="CPU threads.  [default: all cores]"),
    click.option(
        "--kv",
        type=click.Choice(KV_STRATEGIES),
        default="device",
        show_default=True,
        help="Where the KV cache of the GPU's layers lives: device; stream: in RAM, fetched a layer ahead; attend: in "
        "RAM, where the CPU attends; tiered: the recent part on the GPU, the rest as attend.",
    ),
    click.option(
        "--kv-type",
        "kv_dtype",
        type=click.Choice(KV_DTYPES),
        default="f16",
        show_default=True,
        help="Precision of the KV cache, in both halves.",
    ),
    click.option(
        "--kv-budget",
        type=Bytes(),
        metavar="BYTES",
        help="GPU memory for the recent part of --kv tiered, such as 512MiB.  [default: what is free]",
    ),
    click.option(
        "--kv-keep-sliding/--no-kv-keep-sliding",
        default=True,
        show_default=True,
        help="Whether layers with a sliding window keep their KV cache on the GPU under every strategy.",
    ),
    click.option(
        "--vram-reserve",
        type=Bytes(),
        default="512MiB",
        show_default=True,
        metavar="BYTES",
        help="Of the free VRAM, what `-ngl auto` leaves to the desktop.",
    ),
    click.option(
        "--engine",
        type=click.Choice(ENGINES),
        default="auto",
        show_default=True,
        help="Whose GPU -ngl speaks of: hybrid's own, or llama.cpp's (which counts from the last layer).",
    ),
    click.option(
        "-nkvo",
        "--no-kv-offload",
        "offload_kqv",
        is_flag=True,
        flag_value=False,
        default=True,
        help="With --engine llama.cpp: keep the KV cache of its GPU layers in RAM.",
    ),
)

grammar_options = _all(
    click.option("--grammar", "grammar_file", metavar="FILE", help="Text by the GBNF grammar in FILE."),
    click.option("--json-schema", "schema_file", metavar="FILE", help="JSON by the JSON schema in FILE."),
)

sampling_options = _all(
    click.option(
        "-n",
        "--predict",
        "max_tokens",
        type=Whole(min=-1),
        default=-1,
        show_default=True,
        metavar="N",
        callback=_until_end,
        help="Most tokens to generate; -1: until the model ends or the context is full.",
    ),
    click.option(
        "--temp",
        "temperature",
        type=Number(min=0),
        default=0.8,
        show_default=True,
        metavar="T",
        help="Temperature; 0 is greedy.",
    ),
    click.option(
        "--top-k",
        type=Whole(min=0),
        default=40,
        show_default=True,
        metavar="N",
        help="Sample from the N likeliest; 0: off.",
    ),
    click.option(
        "--top-p",
        type=Number(0, 1),
        default=0.95,
        show_default=True,
        metavar="P",
        help="Sample from the likeliest that sum to P; 1: off.",
    ),
    click.option(
        "--min-p",
        type=Number(0, 1),
        default=0.05,
        show_default=True,
        metavar="P",
        help="Drop what is less likely than P times the likeliest; 0: off.",
    ),
    click.option(
        "--repeat-penalty",
        type=Number(min=0, min_open=True),
        default=1.0,
        show_default=True,
        metavar="X",
        help="Penalty on recent tokens; 1: off.",
    ),
    click.option("-s", "--seed", type=Whole(0, 2**32 - 1), metavar="N", help="Seed.  [default: random]"),
)
