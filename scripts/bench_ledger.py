"""The Ledger against what is really there, over k x context x batch x sequences x KV strategy of real models.

    python scripts/bench_ledger.py [--models smollm2-135m gemma3-270m] [--sections tail head process] [--layers K …]
                                   [--quick] [--json FILE]

Tables (bound: within 2 % or 16 MiB):
  tail      llama.cpp's KV, compute and output buffers as it reports them for a load without weights
  head      the head's weights, KV and temporaries: live torch storages while it runs a full batch at a full context;
            what each KV strategy keeps in host memory, to the byte
  process   anonymous resident growth of a fresh process that loads both halves and fills every sequence's context:
            what it holds when malloc has returned what it only keeps. Beside it how much that was, which differs from
            run to run, and the Ledger's guess; and what was allocated (address space)

Every combination is run, with KV in float16, and some in other types; with --quick only some of all, in which every two
values of different kinds meet once. --layers runs those k in the place of both ends and one between.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from hybrid.model.architectures import read_spec
from hybrid.model.catalog import resolve_model
from hybrid.model.file import ModelFile
from hybrid.model.spec import ModelSpec
from hybrid.schedule.head_size import activation_bytes, kept_bytes
from hybrid.schedule.kv_size import kv_bytes, llama_layer_kv_bytes
from hybrid.schedule.ledger import ledger_of
from hybrid.schedule.placement import KV_STRATEGIES, KVDtype, KVStrategy, Placement

MIB = 1 << 20
console = Console(width=None if sys.stdout.isatty() else 140)
Row = dict[str, Any]


@dataclass(frozen=True)
class Axes:
    """What is varied, and whether every combination is wanted (`whole`) or only some."""

    ks: tuple[int, ...]
    n_ctx: tuple[int, ...]
    n_batch: tuple[int, ...] = (64, 512)
    n_sequences: tuple[int, ...] = (1, 4)
    kv: tuple[KVStrategy, ...] = ("device",)
    kv_dtype: tuple[KVDtype, ...] = ("f16",)

    def placements(self, spec: ModelSpec, whole: bool) -> list[Placement]:
        """In order of k. Without layers in the head there is one strategy; `tiered` has room for a quarter of the
        cache."""
        axes = self.ks, self.n_ctx, self.n_batch, self.n_sequences, self.kv, self.kv_dtype
        rows = list(itertools.product(*axes)) if whole else spread(*axes)
        found = (
            Placement(device="cpu", n_gpu_layers=k, n_ctx=c, n_batch=b, n_ubatch=b, n_sequences=s, kv=kv, kv_dtype=t)
            for k, c, b, s, kv, t in rows
        )
        named = dict.fromkeys(_named(spec, placement) for placement in found)
        return sorted(named, key=lambda placement: placement.n_gpu_layers)


def _named(spec: ModelSpec, placement: Placement) -> Placement:
    if placement.n_gpu_layers == 0:
        return replace(placement, kv="device")
    if placement.kv != "tiered":
        return placement
    return replace(placement, kv_budget=kv_bytes(spec, placement, 0, placement.n_gpu_layers) // 4)


def spread(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Few combinations of the axes' values in which every two values of different axes meet; always the same ones."""
    whole = list(itertools.product(*axes))

    def pairs(combination: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(combination), 2))

    missing = set().union(*map(pairs, whole))
    rows = []
    while missing:
        best = max(whole, key=lambda combination: len(pairs(combination) & missing))
        rows.append(best)
        missing -= pairs(best)
    return rows


def row(model: str, placement: Placement, predicted: int, measured: int) -> Row:
    """One line of a table."""
    error = predicted - measured
    return {
        "model": model,
        "k": placement.n_gpu_layers,
        "n_ctx": placement.n_ctx,
        "n_batch": placement.n_batch,
        "sequences": placement.n_sequences,
        "kv": f"{placement.kv} {placement.kv_dtype}",
        "predicted MiB": predicted / MIB,
        "measured MiB": measured / MIB,
        "error MiB": error / MIB,
        "error %": 100 * error / measured,
        "ok": abs(error) <= max(16 * MIB, 0.02 * measured),
    }


def tail(name: str, file: ModelFile, spec: ModelSpec, whole: bool, layers: list[int]) -> list[Row]:
    """Buffers, without weights. Where the head keeps its KV is nothing to llama.cpp."""
    from hybrid.tail.dry_run import dry_run

    n = spec.n_layers
    ks = tuple(k for k in layers if k < n) or (0, 1, n // 2, n - 1)
    placements = Axes(ks, (512, 2048, 8192), kv_dtype=("f16", "f32", "q8_0")).placements(spec, whole)
    rows = []
    for placement, memory in zip(placements, dry_run(file, spec, placements), strict=True):
        dynamic = ledger_of(spec, placement).host.dynamic
        predicted = sum(dynamic.kv) + dynamic.compute + dynamic.output
        rows.append(row(name, placement, predicted, memory.total_bytes))
    return rows


def head(name: str, file: ModelFile, spec: ModelSpec, whole: bool, layers: list[int]) -> list[Row]:
    """Live storages, temporaries included; then what each strategy's cache holds in host memory."""
    import torch

    torch.set_num_threads(1)
    n = spec.n_layers
    ks = tuple(k for k in layers if 0 < k <= n) or (1, n // 2, n)
    rows = []
    axes = Axes(ks, (1024, 8192), kv=KV_STRATEGIES)
    packed = replace(axes, kv_dtype=("q8_0", "f32"))
    for placement in [*axes.placements(spec, whole), *packed.placements(spec, False)]:
        measured, host = head_bytes(file, spec, placement)
        ledger = ledger_of(spec, placement)
        tail = sum(llama_layer_kv_bytes(layer, placement) for layer in spec.layers[placement.n_gpu_layers :])
        in_host = sum(ledger.host.dynamic.kv) - tail + ledger.host.dynamic.staging
        line = row(name, placement, ledger.vram_bytes, measured)
        line["ok"] = line["ok"] and in_host == host
        rows.append(line | {"host predicted": in_host / MIB, "host measured": host / MIB})
    return rows


def head_bytes(file: ModelFile, spec: ModelSpec, placement: Placement) -> tuple[int, int]:
    """Bytes of weights, cache and live temporaries of a full batch that ends a full context; and of the cache in host
    memory."""
    from hybrid.head.head import Head
    from hybrid.head.memory import LiveBytes
    from scripts.full_cache import pretend_full

    model = Head(file, spec, placement)
    first, n = placement.n_ctx - placement.n_batch, placement.n_batch
    pretend_full(model.cache, first)
    with LiveBytes() as count:
        hidden = model.forward(np.ones(n, int), np.arange(first, first + n), np.zeros(n, int))
        if placement.n_gpu_layers == spec.n_layers:
            model.logits(hidden[-placement.n_sequences :])
    total, host = model.nbytes + count.peak, model.cache.host_nbytes
    model.close()
    return total, host


def process(name: str, path: Path, spec: ModelSpec, whole: bool, layers: list[int]) -> list[Row]:
    """Anonymous resident growth after the libraries are imported, against the Ledger without them, the mapped file and
    temporaries; one fresh process a row. What was allocated (address space) is another figure."""
    n = spec.n_layers
    ks = tuple(k for k in layers if k <= n) or (0, n // 3, n)
    axes = Axes(ks, (1024, 2048), n_sequences=(1, 2), kv=KV_STRATEGIES)
    rows = []
    for placement in axes.placements(spec, whole):
        found = grown(path, placement)
        line = row(name, placement, growth(spec, placement), found["anonymous"])
        kept = {"kept predicted": temporaries(spec, placement) / MIB, "kept MiB": found["kept"] / MIB}
        rows.append(line | kept | {"file MiB": found["file"] / MIB, "allocated MiB": found["allocated"] / MIB})
    return rows


def growth(spec: ModelSpec, placement: Placement) -> int:
    """By the Ledger: all but the interpreter with its libraries, the mapped file, and what is freed again."""
    ledger = ledger_of(spec, placement)
    return ledger.ram_bytes - ledger.mapped_bytes - ledger.host.dynamic.runtime - temporaries(spec, placement)


def temporaries(spec: ModelSpec, placement: Placement) -> int:
    """By the Ledger: what an emulated device frees, and malloc keeps for the next batch."""
    return activation_bytes(spec, placement) + kept_bytes(spec, placement)


def grown(path: Path, placement: Placement) -> dict[str, int]:
    """What a fresh process grew by that loaded the placement and filled it: see `child`."""
    command = [sys.executable, __file__, "--child", str(path), json.dumps(placement.to_dict())]
    found: dict[str, int] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def child(path: str, placement: Placement) -> None:
    """Load, and fill the context of every sequence; the last token comes alone."""
    import torch

    from hybrid.runtime.engine import Engine
    from hybrid.tail.llama import lib

    torch.set_num_threads(1)
    lib()
    torch.ones(64, 64) @ torch.ones(64, 64)
    with ModelFile(path) as file:
        spec = read_spec(file)
        before = status()
        engine = Engine(file, spec, placement)
        for seq in range(placement.n_sequences):
            engine.evaluate([1] * (placement.n_ctx - 1), seq)
            engine.evaluate([1], seq)
        after = status()
        ctypes.CDLL(None).malloc_trim(0)
        held = status()
        engine.close()
    keys = {"anonymous": "RssAnon", "file": "RssFile", "allocated": "VmSize"}
    grown = {name: held[key] - before[key] for name, key in keys.items()}
    print(json.dumps({**grown, "kept": after["RssAnon"] - held["RssAnon"]}))


def status() -> dict[str, int]:
    """This process's memory in bytes, by the kernel's names."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words[-1:] == ["kB"]}


def show(title: str, rows: list[Row]) -> None:
    """Print a table and its worst lines."""
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for line in rows:
        table.add_row(*(f"{v:.1f}" if isinstance(v, float) else str(v) for v in line.values()))
    console.print(table)
    good = sum(line["ok"] for line in rows)
    worst = max(abs(line["error MiB"]) for line in rows)
    console.print(f"{good} of {len(rows)} within 2 % or 16 MiB; the largest difference is {worst:.1f} MiB\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "gemma3-270m"])
    parser.add_argument(
        "--sections", nargs="+", choices=["tail", "head", "process"], default=["tail", "head", "process"]
    )
    parser.add_argument("--layers", nargs="+", type=int, default=[], help="these k")
    parser.add_argument("--quick", action="store_true", help="a smaller grid")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], Placement(**json.loads(args.child[1])))
        return
    result: dict[str, list[Row]] = {section: [] for section in args.sections}
    for name in args.models:
        path = resolve_model(name)
        with ModelFile(path) as file:
            spec = read_spec(file)
            if "tail" in result:
                result["tail"] += tail(name, file, spec, not args.quick, args.layers)
            if "head" in result:
                result["head"] += head(name, file, spec, not args.quick, args.layers)
            if "process" in result:
                result["process"] += process(name, path, spec, not args.quick, args.layers)
    for section, rows in result.items():
        if not rows:
            continue
        show({"tail": "Tail: llama.cpp's buffers", "head": "Head: live torch storages",
              "process": "Process: resident growth"}[section], rows)  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
