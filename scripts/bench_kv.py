"""Decode against depth and sequences for each KV strategy, and the bytes a step moves over the bus.

    python scripts/bench_kv.py [MODEL] [-ngl N|all] [--depths 250 1000 4000] [--sequences 1 4] [--kv-type f16 q8_0]
                               [--device cpu] [--kv-budget BYTES] [--repeats R] [--json FILE]

The head alone, without a tail; the cache counts as full up to the depth (what it holds does not change the time). All
strategies are loaded at once and take turns, so that whatever else the machine does hits them alike. Each line has the
median of its repeats and their spread, and what the copies counted in a step beside what arithmetic says
(`hybrid.schedule.kv_tiers.step_traffic`): these must be equal, or the exit code is 1. `tiered` may keep half of the
longest cache on the device unless --kv-budget says otherwise; every 64th of its steps also moves a block to the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from full_cache import pretend_full
from rich.console import Console
from rich.table import Table

from hybrid.cli.units import Bytes
from hybrid.head.head import Head
from hybrid.model.architectures import read_spec
from hybrid.model.catalog import resolve_model
from hybrid.model.file import ModelFile
from hybrid.model.spec import ModelSpec
from hybrid.schedule.kv_size import kv_bytes
from hybrid.schedule.kv_tiers import step_traffic
from hybrid.schedule.limits import usable_cores
from hybrid.schedule.placement import KV_DTYPES, KV_STRATEGIES, Placement
from hybrid.schedule.shares import with_threads

MIB = 1 << 20


def placements(spec: ModelSpec, args: argparse.Namespace, sequences: int, dtype: Any) -> Iterator[Placement]:
    """One a strategy; nothing else differs."""
    k = spec.n_layers if args.n_gpu_layers == "all" else min(int(args.n_gpu_layers), spec.n_layers)
    base = Placement(
        device=args.device,
        n_gpu_layers=k,
        n_ctx=max(args.depths) + 1,
        n_batch=128,
        n_sequences=sequences,
        kv_dtype=dtype,
        kv_keep_sliding=not args.no_kv_keep_sliding,
    )
    half = kv_bytes(spec, base, 0, k) // 2 if args.kv_budget is None else args.kv_budget
    for kv in KV_STRATEGIES:
        yield with_threads(replace(base, kv=kv, kv_budget=half if kv == "tiered" else None), spec, usable_cores())


def step(head: Head, depth: int) -> tuple[float, int, int]:
    """Seconds of one token for every sequence after `depth` of them, and the bytes moved to the device and back."""
    n = head.placement.n_sequences
    pretend_full(head.cache, depth)
    before = replace(head.cache.moved)
    torch.set_num_threads(head.placement.n_threads_head)
    start = time.perf_counter()
    head.forward(np.ones(n, int), np.full(n, depth), np.arange(n))
    if head.compute.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    after = head.cache.moved
    return seconds, after.to_device - before.to_device, after.to_host - before.to_host


def measure(file: ModelFile, spec: ModelSpec, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each KV type, number of sequences, depth and strategy."""
    for dtype in args.kv_type:
        for sequences in args.sequences:
            heads = [Head(file, spec, p) for p in placements(spec, args, sequences, dtype)]
            for depth in args.depths:
                steps: list[list[tuple[float, int, int]]] = [[] for _ in heads]
                for turn in range(args.repeats + 1):
                    for head, found in zip(heads, steps, strict=True):
                        found.append(step(head, depth))
                    if turn == 0:
                        steps = [[] for _ in heads]  # the first is for pages and caches
                for head, found in zip(heads, steps, strict=True):
                    yield row(spec, head, depth, found)
            for head in heads:
                head.close()


def row(spec: ModelSpec, head: Head, depth: int, found: list[tuple[float, int, int]]) -> dict[str, Any]:
    """What one strategy did at one depth, beside the arithmetic."""
    seconds = [s for s, _, _ in found]
    moved = {(to_device, to_host) for _, to_device, to_host in found}
    wanted = step_traffic(spec, head.placement, depth, recorded=head.compute.recorder is not None)
    return {
        "placement": head.placement.to_dict(),
        "depth": depth,
        "step_s": {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)},
        "to_device_bytes": sorted(moved)[0][0],
        "to_host_bytes": sorted(moved)[0][1],
        "to_device_bytes_by_arithmetic": wanted.to_device,
        "to_host_bytes_by_arithmetic": wanted.to_host,
        "equal": moved == {(wanted.to_device, wanted.to_host)},
        "kv_on_device_bytes": head.cache.nbytes,
        "kv_on_host_bytes": head.cache.host_nbytes,
    }


def show(rows: list[dict[str, Any]]) -> None:
    """A table."""
    table = Table(title="A step of decode in the head", title_justify="left")
    for name in ("KV", "type", "sequences", "depth", "ms", "min", "max", "to device", "to host", "= arithmetic",
                 "device MiB", "host MiB"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("KV", "type") else "right")
    for line in rows:
        p, s = line["placement"], line["step_s"]
        table.add_row(
            p["kv"], p["kv_dtype"], str(p["n_sequences"]), str(line["depth"]),
            *(f"{1e3 * s[name]:.1f}" for name in ("median", "min", "max")),
            f"{line['to_device_bytes']:,}", f"{line['to_host_bytes']:,}", "yes" if line["equal"] else "NO",
            f"{line['kv_on_device_bytes'] / MIB:.1f}", f"{line['kv_on_host_bytes'] / MIB:.1f}",
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("-ngl", "--n-gpu-layers", default="all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--depths", type=int, nargs="+", default=[250, 1000, 4000])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--kv-type", nargs="+", choices=KV_DTYPES, default=["f16"])
    parser.add_argument("--kv-budget", type=lambda text: Bytes().convert(text, None, None))
    parser.add_argument("--no-kv-keep-sliding", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with ModelFile(resolve_model(args.model)) as file:
        rows = list(measure(file, read_spec(file), args))
    show(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    sys.exit(not all(line["equal"] for line in rows))


if __name__ == "__main__":
    main()
