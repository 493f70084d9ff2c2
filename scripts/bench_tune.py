"""Whether `hybrid tune` finds the best, and how quickly.

    python scripts/bench_tune.py [--sections simulated real] [--machines 200] [--quick] [--json FILE]

simulated  machines with hidden true costs and 5 % noise (`scripts/simulated.py`). Bounds: regret ≤ 3 % in 95 % of
           them, in ≤ 40 % of the time that measuring everything once would take.
real       VRAM budgets on this machine with an emulated GPU (--device cpu), both models, objectives latency and ttft,
           whose optima lie at opposite ends. A sweep of every split is the truth; for each budget the winner of a
           fresh tune is measured again, interleaved with the sweep's best that fits. Bounds: winner / best ≥ 0.97 in
           speed, and no start runs out of memory. Use a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from hybrid.apps.runner import run_trial
from hybrid.apps.tune import tune
from hybrid.model.catalog import resolve_model
from hybrid.report.trial import Condition, Trial
from hybrid.report.tuning import TuneReport, TuneRequest
from hybrid.schedule.estimate import Objective, same_speed
from hybrid.schedule.placement import Placement
from scripts.simulated import KINDS, Outcome, Simulated, machine, quantile, search

MIB = 1 << 20
Row = dict[str, Any]
console = Console(width=None if sys.stdout.isatty() else 120)


# -- simulated machines ------------------------------------------------------------------------------------------------


def simulated(n: int) -> list[Row]:
    """One row a kind of machine, and one for all."""
    found: list[tuple[Simulated, Outcome]] = []
    for seed in range(n):
        one = machine(seed)
        found.append((one, search(one, seed)))
    rows = [summary(kind, [pair for pair in found if pair[0].kind == kind]) for kind in KINDS]
    rows.append(summary("all", found))
    return rows


def summary(kind: str, found: list[tuple[Simulated, Outcome]]) -> Row:
    """What came of some machines."""
    best = [one.options[one.best] for one, _ in found]
    wins = Counter(str(option.strategy) for option in best)
    regrets, costs = [o.regret for _, o in found], [o.cost for _, o in found]
    return {
        "machines": kind,
        "n": len(found),
        "regret ≤ 3 %": sum(r <= 0.03 for r in regrets) / len(found),
        "regret, 95 of 100": quantile(regrets, 0.95),
        "time / exhaustive": sum(costs) / len(found),
        "time, 95 of 100": quantile(costs, 0.95),
        "best is inside": sum(0.05 < option.share < 0.95 for option in best) / len(found),
        "best by strategy": ", ".join(f"{kv} {n}" for kv, n in sorted(wins.items())),
    }


# -- real budgets ------------------------------------------------------------------------------------------------------


def real(names: list[str], quick: bool) -> list[Row]:
    """One row a budget."""
    rows: list[Row] = []
    for name in names:
        for objective in ("latency", "ttft"):
            rows += real_model(name, objective, 2 if quick else 5, quick)  # type: ignore[arg-type]
            show("so far", rows[-1:])
    return rows


def real_model(name: str, objective: Objective, n_budgets: int, quick: bool) -> list[Row]:
    """Sweep every split (every few, where `quick`), then tune under budgets between the smallest and the largest."""
    path = resolve_model(name)
    request = TuneRequest(n_ctx=512, depth=192, objective=objective, device="cpu", budget_s=25 if quick else 60)
    swept = in_folder(lambda: tune(path, replace(request, exhaustive=True)))
    sizes = {row.placement.n_gpu_layers: row.vram_bytes for row in swept.rows}
    most = max(sizes.values())
    rows = []
    for i in range(n_budgets):
        budget = int(most * (i + 1) / n_budgets) + MIB
        report = in_folder(lambda b=budget: tune(path, replace(request, vram_bytes=b)))  # type: ignore[misc]
        rows.append(compare(name, objective, budget, swept, report))
    return rows


def compare(name: str, objective: Objective, budget: int, swept: TuneReport, report: TuneReport) -> Row:
    """The tune's winner against the sweep's best that fits the budget, measured anew, in turns."""
    assert report.best is not None
    winner = report.rows[report.best].placement
    allowed = {same_speed(row.placement, objective) for row in report.rows}
    timed = [row for row in swept.rows if row.measured is not None and same_speed(row.placement, objective) in allowed]
    best = min(timed, key=lambda row: row.measured.median if row.measured else 0.0).placement
    ratio = 1.0
    trials = list(report.trials)
    if same_speed(best, objective) != same_speed(winner, objective):
        pairs = []
        for turn in range(4):
            order = (winner, best) if turn % 2 == 0 else (best, winner)
            both = {p: again(report, p) for p in order}
            trials += both.values()
            pairs.append(seconds(both[best], objective) / seconds(both[winner], objective))
        ratio = median(pairs)
    return {
        "model": name,
        "objective": objective,
        "budget MiB": budget / MIB,
        "winner k": winner.n_gpu_layers,
        "best k": best.n_gpu_layers,
        "winner / best": ratio,
        "measured": len(report.trials),
        "of": len(report.rows),
        "tune s": report.elapsed_s,
        "out of memory": sum(t.failure is not None and t.failure.kind == "out of memory" for t in trials),
        "failed": sum(t.failure is not None for t in trials),
    }


def again(report: TuneReport, placement: Placement) -> Trial:
    """The condition that the tune would run of a placement."""
    condition = next((t.condition for t in report.trials), None)
    assert isinstance(condition, Condition)
    return run_trial(replace(condition, placement=placement))


def seconds(trial: Trial, objective: Objective) -> float:
    """The figure that counts."""
    spread = trial.ttft if objective == "ttft" else trial.tpot
    if spread is None:
        raise SystemExit(f"{trial.condition.placement} failed: {trial.failure}")
    return spread.median


def in_folder(work: Any) -> TuneReport:
    """Run something with a memory of its own, which is forgotten afterwards."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            report: TuneReport = work()
        finally:
            if before is None:
                del os.environ["XDG_CACHE_HOME"]
            else:
                os.environ["XDG_CACHE_HOME"] = before
    return report


# -- output ------------------------------------------------------------------------------------------------------------


def show(title: str, rows: list[Row]) -> None:
    """Print a table."""
    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=["simulated", "real"], default=["simulated", "real"])
    parser.add_argument("--machines", type=int, default=200)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "gemma3-270m"])
    parser.add_argument("--quick", action="store_true", help="fewer budgets, less time for each")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result: dict[str, list[Row]] = {}
    start = time.perf_counter()
    if "simulated" in args.sections:
        result["simulated"] = simulated(args.machines)
        show("Simulated machines (regret ≤ 3 % in ≥ 0.95 of them, time / exhaustive ≤ 0.40)", result["simulated"])
    if "real" in args.sections:
        result["real"] = real(args.models, args.quick)
        show("Real budgets, emulated GPU (winner / best ≥ 0.97, nothing out of memory)", result["real"])
    console.print(f"{time.perf_counter() - start:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
