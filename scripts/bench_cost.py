"""The CostModel against the clock, on splits and depths it was not calibrated with.

    python scripts/bench_cost.py [--models smollm2-135m gemma3-270m] [--device cpu] [--clock wall|cpu] [--json FILE]

Calibrates on two splits and depths up to 512 tokens, then predicts and measures others (bound: median error of single
tokens and of prompts ≤ 10 %). The quickest of several tokens counts on both sides; use a quiet machine, or on a busy
one `--clock cpu`: one thread a half and processor time, in which overlapping halves add up.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from hybrid.apps.calibrate import CPU, WALL, Clock, calibrate, measure_whole
from hybrid.model.architectures import read_spec
from hybrid.model.catalog import resolve_model
from hybrid.model.file import ModelFile
from hybrid.runtime.engine import Engine
from hybrid.schedule.cost import CostModel
from hybrid.schedule.cost_fit import Measurement, fit
from hybrid.schedule.cost_prior import assumed_rates
from hybrid.schedule.machine_store import this_machine, unmeasured_machine
from hybrid.schedule.scheduler import Request, plan

CALIBRATED_DEPTH = 512
DEPTHS = (256, 1024)
console = Console(width=None if sys.stdout.isatty() else 120)
Row = dict[str, Any]


def bench(name: str, device: str, n_batch: int, clock: Clock) -> tuple[list[Row], CostModel]:
    """Predicted and measured seconds of one model."""
    with ModelFile(resolve_model(name)) as file:
        spec = read_spec(file)
        n = spec.n_layers

        def placement(k: int) -> Any:
            threads = 1 if clock is CPU else None
            request = Request(n_gpu_layers=k, device=device, n_ctx=1280, n_batch=n_batch, n_threads=threads)
            return plan(spec, request).placement

        machine = this_machine() or unmeasured_machine()
        measurements = calibrate(
            file, spec, [placement(n // 4), placement(3 * n // 4)], depth=CALIBRATED_DEPTH, clock=clock
        )
        rates = fit(spec, machine, assumed_rates(machine, device), measurements)
        model = CostModel(spec, machine, rates)
        rows: list[Row] = []
        for k in sorted({0, n // 8, n // 2, n - 2}):
            with closing(Engine(file, spec, placement(k))) as engine:
                engine.evaluate([1] * 64)  # warms up
                rows += [compare(name, model, m, clock) for m in measure_whole(engine, DEPTHS, clock)]
        return rows, model


def compare(name: str, model: CostModel, m: Measurement, clock: Clock) -> Row:
    """One measurement beside its prediction."""
    assert m.total_s is not None
    if m.kind == "decode":
        predicted = model.tpot_s(m.placement, m.depth)
    elif clock is CPU:
        step = m.placement.n_batch
        starts = range(0, m.n_tokens, step)
        predicted = sum(sum(model.chunk_s(m.placement, min(step, m.n_tokens - at), m.depth + at)) for at in starts)
    else:
        predicted = model.prefill_s(m.placement, m.n_tokens, m.depth)
    return {
        "model": name,
        "k": m.placement.n_gpu_layers,
        "what": f"{m.n_tokens} tokens at {m.depth}",
        "predicted ms": 1e3 * predicted,
        "measured ms": 1e3 * m.total_s,
        "error %": 100 * (predicted / m.total_s - 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "gemma3-270m"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--n-batch", type=int, default=256)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result: list[Row] = []
    for name in args.models:
        rows, model = bench(name, args.device, args.n_batch, CPU if args.clock == "cpu" else WALL)
        result += rows
        table = Table(title=f"{name}, calibrated at two splits", title_justify="left")
        for column in rows[0]:
            table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
        for row in rows:
            table.add_row(*(f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values()))
        console.print(table)
        console.print(f"rates {model.rates}", markup=False)
    for what, chosen in (
        ("single tokens", [r for r in result if r["what"].startswith("1 ")]),
        ("prompts", [r for r in result if not r["what"].startswith("1 ")]),
        ("all", result),
    ):
        console.print(f"median error of {what}: {median(abs(r['error %']) for r in chosen):.1f} % (≤ 10 %)")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
