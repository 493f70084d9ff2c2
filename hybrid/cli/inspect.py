"""`hybrid inspect`: what a model is made of, and where it can be split. Reads the file's header only."""

from __future__ import annotations

import itertools
import json
from typing import Any

import click

from hybrid.cli.options import json_option, model_argument
from hybrid.cli.units import Whole
from hybrid.printable import printable
from hybrid.schedule.placement import KV_DTYPES


@click.command()
@model_argument
@click.option("-c", "--ctx-size", "n_ctx", type=Whole(min=1), metavar="N", help="Context to size the KV cache for.")
@click.option(
    "--kv-type", "kv_dtype", type=click.Choice(KV_DTYPES), default="f16", show_default=True, help="KV cache type."
)
@click.option(
    "--verify",
    is_flag=True,
    help="Run llama.cpp alone and a split on a few tokens, and compare them. Takes a minute or so.",
)
@click.option(
    "-ngl",
    "--n-gpu-layers",
    metavar="N|all",
    help="With --verify: the split to run.  [default: in the middle of the model]",
)
@click.option("--device", metavar="NAME", help="With --verify: the device of the first layers.")
@click.option("-t", "--threads", "n_threads", type=Whole(min=1), metavar="N", help="With --verify: CPU threads.")
@json_option
def command(
    model: str | None,
    n_ctx: int | None,
    kv_dtype: str,
    verify: bool,
    n_gpu_layers: str | None,
    device: str | None,
    n_threads: int | None,
    as_json: bool,
) -> None:
    """Show a model's layers, their bytes and quantisation, their KV cache, and the allowed values of -ngl.

    KV bytes of a layer with a sliding window stop growing where the window (and a chunk of prompt) is full.

    --verify loads the model twice, one after the other: whole in llama.cpp, then split. It exits with 1 where the two
    do not agree. What llama.cpp does with itself, in other batches or without flash attention, is the yardstick.
    """
    if verify:
        _verify(model, n_gpu_layers, device, n_threads, as_json)
        return
    if n_gpu_layers is not None or device is not None or n_threads is not None:
        raise click.UsageError("-ngl, --device and --threads need --verify")
    facts = describe(model, n_ctx, kv_dtype)
    if as_json:
        click.echo(json.dumps(facts, ensure_ascii=False))
    else:
        _print(facts)


def describe(model: str | None, n_ctx: int | None, kv_dtype: Any) -> dict[str, Any]:
    """Everything `inspect` says, as JSON-ready values. Bytes are those of the file; `n_ctx` None: as trained."""
    from hybrid.model.architectures import read_spec
    from hybrid.model.catalog import resolve_model
    from hybrid.model.file import ModelFile
    from hybrid.model.ggml_types import type_name
    from hybrid.model.splits import find_splits
    from hybrid.schedule import ledger
    from hybrid.schedule.placement import Placement

    with ModelFile(resolve_model(model)) as file:
        spec = read_spec(file)
        splits = find_splits(spec)
        n_ctx = n_ctx or spec.n_ctx_train
        placement = Placement(device="cpu", n_gpu_layers=0, n_ctx=n_ctx, kv_dtype=kv_dtype)
        layers = [
            {
                "index": layer.index,
                "bytes": layer.weight_bytes,
                "types": _bytes_by_type(layer.weights.values()),
                "window": layer.window,
                "kv_bytes_per_token": ledger.kv_bytes_per_token(layer, kv_dtype),
                "kv_bytes": ledger.kv_bytes(spec, placement, layer.index, layer.index + 1),
            }
            for layer in spec.layers
        ]
        return {
            "path": str(file.path),
            "architecture": spec.architecture,
            "name": file.metadata.get("general.name"),
            "bytes": sum(t.n_bytes for t in file.tensors.values()),
            "n_layers": spec.n_layers,
            "n_embd": spec.n_embd,
            "n_vocab": spec.n_vocab,
            "n_ctx_train": spec.n_ctx_train,
            "allowed_n_gpu_layers": list(splits.allowed),
            "refused_n_gpu_layers": [{"first": r.first, "last": r.last, "reason": r.reason} for r in splits.refused],
            "notes": list(splits.notes),
            "n_ctx": n_ctx,
            "kv_type": kv_dtype,
            "kv_bytes_per_token": sum(layer["kv_bytes_per_token"] for layer in layers),
            "kv_bytes": sum(layer["kv_bytes"] for layer in layers),
            "layers": layers,
            "outside": [{"name": t.name, "bytes": t.n_bytes, "type": type_name(t.type)} for t in spec.weights.values()],
        }


def _verify(model: str | None, k: str | None, device: str | None, n_threads: int | None, as_json: bool) -> None:
    """Print whether llama.cpp alone and the split agree; exit code 1 where they do not."""
    from hybrid.apps.verify import verify
    from hybrid.cli.progress import ProgressBar
    from hybrid.model.catalog import resolve_model

    progress = ProgressBar()
    try:
        verdict = verify(resolve_model(model), k, device=device, n_threads=n_threads, progress=progress)
    finally:
        progress.clear()
    if as_json:
        click.echo(json.dumps(verdict.to_dict()))
    else:
        where = f"{verdict.n_gpu_layers} layers on {verdict.device}"
        click.echo(f"{where}, {verdict.n_tokens} tokens, against llama.cpp alone:")
        click.echo(f"  split      KL {verdict.kl:.2g}, same next token {verdict.same_token:.0%}")
        click.echo(f"  llama.cpp  KL {verdict.own_kl:.2g}, same next token {verdict.own_same_token:.0%}, with itself")
        if verdict.tail_difference is not None:
            exact = (
                "bit for bit llama.cpp's" if verdict.tail_difference == 0 else f"off by {verdict.tail_difference:.1%}"
            )
            click.echo(f"  CPU half   {exact}, given llama.cpp's own hidden state")
            click.echo(f"  GPU half   hidden state off by {verdict.hidden_difference:.2%}")
        click.echo("They agree." if verdict.agrees else "They do NOT agree: please report this model.")
    if not verdict.agrees:
        raise SystemExit(1)


def _bytes_by_type(tensors: Any) -> dict[str, int]:
    """Type name -> bytes, the largest share first."""
    from hybrid.model.ggml_types import type_name

    shares: dict[str, int] = {}
    for tensor in tensors:
        name = type_name(tensor.type)
        shares[name] = shares.get(name, 0) + tensor.n_bytes
    return dict(sorted(shares.items(), key=lambda share: -share[1]))


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    title, architecture = (printable(str(facts[key] or facts["architecture"])) for key in ("name", "architecture"))
    size = f"{facts['n_layers']} layers, {_size(facts['bytes'])}"
    console.print(Text.assemble((title, "bold"), f"  {architecture}, {size}"))
    console.print(printable(facts["path"]), markup=False)
    console.print(
        f"n_embd {facts['n_embd']}, vocabulary {facts['n_vocab']}, trained for {facts['n_ctx_train']} tokens",
        markup=False,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("layers", "weights", "types", "window", "KV/token"):
        table.add_column(name, justify="left" if name in ("layers", "types") else "right", no_wrap=True)
    alike = lambda layer: [v for k, v in layer.items() if k != "index"]  # noqa: E731
    for _, group in itertools.groupby(facts["layers"], key=alike):
        members = list(group)
        first, last = members[0]["index"], members[-1]["index"]
        table.add_row(
            f"{first}-{last}" if last > first else str(first),
            _size(members[0]["bytes"]),
            ", ".join([t for t in members[0]["types"] if t != "F32"] or ["F32"]),  # norms are always F32
            str(members[0]["window"] or "-"),
            _size(members[0]["kv_bytes_per_token"]),
        )
    for tensor in facts["outside"]:
        table.add_row(escape(printable(tensor["name"])), _size(tensor["bytes"]), tensor["type"], "", "")
    console.print()
    console.print(table)
    console.print()
    console.print(
        f"KV cache ({facts['kv_type']}): {_size(facts['kv_bytes_per_token'])} a token, "
        f"{_size(facts['kv_bytes'])} for {facts['n_ctx']} tokens"
    )
    console.print(f"-ngl may be {_ranges(facts['allowed_n_gpu_layers'])}")
    for refused in facts["refused_n_gpu_layers"]:
        layers = _ranges(list(range(refused["first"], refused["last"] + 1)))
        console.print(f"  not {layers}: {printable(refused['reason'])}", markup=False)
    for note in facts["notes"]:
        console.print(f"  {note}", markup=False)


def _size(n_bytes: int) -> str:
    """Bytes for people."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.{0 if n_bytes >= 100 * factor else 1}f} {unit}"
    return f"{n_bytes} B"


def _ranges(numbers: list[int]) -> str:
    """`[0, 1, 2, 5]` as `0 to 2, 5`."""
    parts = []
    for _, group in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [n for _, n in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}")
    return ", ".join(parts)
