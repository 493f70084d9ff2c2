"""The Ledger against what is really there, over k x context x batch x sequences x KV type x KV strategy of real models.

    python scripts/bench_ledger.py [--models smollm2-135m gemma3-270m] [--quick] [--json FILE]

Tables (bound: within 2 % or 16 MiB):
  tail      llama.cpp's KV, compute and output buffers as it reports them for a load without weights
  head      the head's weights, KV and temporaries: live torch storages while it runs a full batch at a full context
  process   anonymous resident growth of a fresh process that loads both halves and fills its context
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from hybrid.model.architectures import read_spec
from hybrid.model.catalog import resolve_model
from hybrid.model.file import ModelFile
from hybrid.model.spec import ModelSpec
from hybrid.schedule.kv_size import kv_bytes, llama_layer_kv_bytes
from hybrid.schedule.ledger import ledger_of
from hybrid.schedule.placement import KV_STRATEGIES, Placement

MIB = 1 << 20
console = Console(width=None if sys.stdout.isatty() else 140)
Row = dict[str, Any]


def grid(spec: ModelSpec, quick: bool, ks: list[int]) -> list[Placement]:
    """Every combination of a few of each."""
    n_ctx = (1024, 8192) if quick else (512, 2048, 8192)
    n_batch = (512,) if quick else (64, 512)
    dtypes = ("f16",) if quick else ("f16", "f32")
    return [
        Placement(device="cpu", n_gpu_layers=k, n_ctx=c, n_batch=b, n_ubatch=b, n_sequences=s, kv_dtype=t)  # type: ignore[arg-type]
        for k, c, b, s, t in itertools.product(ks, n_ctx, n_batch, (1, 4), dtypes)
    ]


def strategies(spec: ModelSpec, placements: list[Placement]) -> Iterator[Placement]:
    """Each placement under every KV strategy; `tiered` with room for a quarter of the cache."""
    for placement in placements:
        for kv in KV_STRATEGIES:
            budget = kv_bytes(spec, placement, 0, placement.n_gpu_layers) // 4 if kv == "tiered" else None
            yield replace(placement, kv=kv, kv_budget=budget)


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


def tail(name: str, file: ModelFile, spec: ModelSpec, quick: bool) -> list[Row]:
    """Buffers, without weights."""
    from hybrid.tail.dry_run import dry_run

    n = spec.n_layers
    placements = grid(spec, quick, [0, 1, n // 2, n - 1])
    rows = []
    for placement, memory in zip(placements, dry_run(file, spec, placements), strict=True):
        dynamic = ledger_of(spec, placement).host.dynamic
        predicted = sum(dynamic.kv) + dynamic.compute + dynamic.output
        rows.append(row(name, placement, predicted, memory.total_bytes))
    return rows


def head(name: str, file: ModelFile, spec: ModelSpec, quick: bool) -> list[Row]:
    """Live storages, temporaries included; then what each strategy's cache holds in host memory."""
    import torch
    from full_cache import pretend_full

    from hybrid.head.head import Head
    from hybrid.head.memory import LiveBytes

    torch.set_num_threads(1)
    n = spec.n_layers
    rows = []
    for placement in strategies(spec, grid(spec, quick, [n // 2, n] if quick else [1, n // 2, n])):
        if placement.n_gpu_layers == n and placement.n_ctx > 2048 and not quick:
            continue
        model = Head(file, spec, placement)
        first = placement.n_ctx - placement.n_batch
        pretend_full(model.cache, first)
        with LiveBytes() as count:
            hidden = model.forward(
                np.ones(placement.n_batch, int),
                np.arange(first, placement.n_ctx),
                np.zeros(placement.n_batch, int),
            )
            if placement.n_gpu_layers == n:
                model.logits(hidden[-placement.n_sequences :])
        ledger = ledger_of(spec, placement)
        tail = sum(llama_layer_kv_bytes(layer, placement) for layer in spec.layers[placement.n_gpu_layers :])
        in_host = sum(ledger.host.dynamic.kv) - tail + ledger.host.dynamic.staging
        line = row(name, placement, ledger.vram_bytes, model.nbytes + count.peak)
        beside = {"host predicted": in_host / MIB, "host measured": model.cache.host_nbytes / MIB}
        line["ok"] = line["ok"] and in_host == model.cache.host_nbytes
        rows.append(line | beside)
        model.close()
    return rows


def process(name: str, path: Path, spec: ModelSpec, quick: bool) -> list[Row]:
    """Anonymous resident growth after the libraries are imported, against the Ledger without them and without the
    mapped file; one fresh process a row. What was allocated (address space) is another figure."""
    n = spec.n_layers
    rows = []
    cases = [
        Placement(device="cpu", n_gpu_layers=k, n_ctx=n_ctx, n_sequences=sequences)
        for k, (n_ctx, sequences) in itertools.product((0, n // 3, n), ((1024, 1), (2048, 2)))
    ]
    for placement in [*cases, *list(strategies(spec, cases[-1:]))[1:]]:
        command = [sys.executable, __file__, "--child", str(path), json.dumps(placement.to_dict())]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        ledger = ledger_of(spec, placement)
        predicted = ledger.ram_bytes - ledger.mapped_bytes - ledger.host.dynamic.runtime
        line = row(name, placement, predicted, found["anonymous"])
        rows.append(line | {"file pages MiB": found["file"] / MIB, "allocated MiB": found["allocated"] / MIB})
        if quick and len(rows) == 1:
            break
    return rows


def child(path: str, placement: Placement) -> None:
    """Load, fill the context of the first sequence, prefill a batch of the others."""
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
        engine.evaluate([1] * (placement.n_ctx - 1))
        engine.evaluate([1])
        for seq in range(1, placement.n_sequences):
            engine.evaluate([1] * placement.n_batch, seq)
        after = status()
        engine.close()
    keys = {"anonymous": "RssAnon", "file": "RssFile", "allocated": "VmSize"}
    print(json.dumps({name: after[key] - before[key] for name, key in keys.items()}))


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
                result["tail"] += tail(name, file, spec, args.quick)
            if "head" in result:
                result["head"] += head(name, file, spec, args.quick)
            if "process" in result:
                result["process"] += process(name, path, spec, args.quick)
    for section, rows in result.items():
        show({"tail": "Tail: llama.cpp's buffers", "head": "Head: live torch storages",
              "process": "Process: resident growth"}[section], rows)  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
