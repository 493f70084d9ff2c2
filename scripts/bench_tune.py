"""Whether `hybrid tune` finds the best, and how quickly.

    python scripts/bench_tune.py [--sections simulated real] [--machines 200] [--first-seed 0] [--budget 30] [--quick]
                                 [--json FILE [--resume]]

simulated  machines with hidden true costs and 5 % noise (`scripts/simulated.py`). Bounds: regret ≤ 3 % in 95 % of
           them, in ≤ 40 % of the time that measuring everything once would take.
real       VRAM budgets on this machine with an emulated GPU (--device cpu), both models, objectives latency and ttft,
           whose optima lie at opposite ends. A sweep of every split is the truth; for each budget the winner of a
           fresh tune is measured again, interleaved with the sweep's best that fits, until what a machine's unrest
           leaves of doubt (the median's 95 % interval) lies on one side of the bound. Budgets in which the same two
           meet share that measurement. Bounds: winner / best ≥ 0.97 in speed, and no start runs out of memory. Use a
           quiet machine.

The real part takes about 25 minutes on two cores. What it has so far is in FILE after each step; with --resume it goes
on from there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from hybrid.apps.conditions import prompt_tokens
from hybrid.apps.runner import run_trial
from hybrid.apps.tune import tune
from hybrid.files import write_atomically
from hybrid.model.architectures import read_spec
from hybrid.model.catalog import resolve_model
from hybrid.model.file import ModelFile
from hybrid.report.trial import Condition, Trial
from hybrid.report.tuning import TuneReport, TuneRequest
from hybrid.schedule.budget import Budget, ram_budget
from hybrid.schedule.candidates import tunable
from hybrid.schedule.estimate import Objective, same_speed
from hybrid.schedule.ledger import ledger_of
from hybrid.schedule.limits import usable_cores
from hybrid.schedule.placement import Placement
from scripts.simulated import KINDS, Outcome, Simulated, machine, quantile, search

MIB = 1 << 20
N_CTX, DEPTH = 512, 192
BOUND = 0.97
TURNS = range(8, 41)
"""The winner and the best of the sweep are run so often, each time one after the other: a machine may drift."""
OBJECTIVES: tuple[Objective, ...] = ("latency", "ttft")
OUT_OF_MEMORY = ("out of memory", "out of RAM", "killed")
START = time.perf_counter()
Row = dict[str, Any]
console = Console(width=None if sys.stdout.isatty() else 180)


# -- simulated machines ------------------------------------------------------------------------------------------------


def simulated(n: int, first_seed: int) -> list[Row]:
    """One row a kind of machine, and one for all."""
    found: list[tuple[Simulated, Outcome]] = []
    for seed in range(first_seed, first_seed + n):
        one = machine(seed)
        found.append((one, search(one, seed)))
        if (seed - first_seed + 1) % 25 == 0:
            say(f"simulated machines: {seed - first_seed + 1} of {n}")
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


@dataclass
class Real:
    """The second part: its parameters, and what there is so far, which `save` keeps."""

    models: list[str]
    quick: bool
    budget_s: float
    save: Callable[[dict[str, Any]], None]
    known: dict[str, Any]
    """{"sweeps": {model: [a Swept as JSON]}, "rows": [a row of the table], "pairs": {two placements: [ratio]}}."""

    def run(self) -> list[Row]:
        """One row a budget."""
        n_budgets = 2 if self.quick else 5
        for name in self.models:
            swept = self.sweep(name)
            most = max(one.vram_bytes for one in swept)
            for objective, i in itertools.product(OBJECTIVES, range(n_budgets)):
                budget = int(most * (i + 1) / n_budgets) + MIB
                done = [(row["model"], row["objective"], row["budget MiB"]) for row in self.known["rows"]]
                if (name, objective, budget / MIB) in done:
                    continue
                say(f"{name}, {objective}: a tune with {budget / MIB:.0f} MiB")
                request = TuneRequest(
                    n_ctx=N_CTX,
                    depth=DEPTH,
                    objective=objective,
                    device="cpu",
                    budget_s=self.budget_s,
                    vram_bytes=budget,
                )
                report = in_folder(partial(tune, resolve_model(name), request))
                row = compare(name, objective, budget, swept, report, self.known.setdefault("pairs", {}))
                self.known["rows"].append(row)
                self.save(self.known)
                say(", ".join(f"{column} {value:.3g}" if isinstance(value, float) else f"{column} {value}"
                              for column, value in row.items()))  # fmt: skip
        return list(self.known["rows"])

    def sweep(self, name: str) -> list[Swept]:
        """Every split (every third, where `quick`), there and back, with both objectives' figures of each run."""
        if name not in self.known["sweeps"]:
            path = resolve_model(name)
            with ModelFile(path) as file:
                spec = read_spec(file)
            base = Placement(device="cpu", n_gpu_layers=0, n_ctx=N_CTX)
            found = tunable(spec, base, Budget(ram_bytes=ram_budget()), threads=[usable_cores()])
            found = found[:: 3 if self.quick else 1]
            runs: dict[Placement, list[Trial]] = {p: [] for p in found}
            order = [*found, *reversed(found)]
            start = time.perf_counter()
            for i, p in enumerate(order):
                if i and i % 10 == 0:
                    left = (time.perf_counter() - start) / i * (len(order) - i)
                    say(f"{name}: sweep, {i} of {len(order)}, about {left:.0f} s left")
                condition = Condition(
                    model=str(path), placement=p, prompt=prompt_tokens(DEPTH, spec.n_vocab), n_decode=24,
                    repeat_s=0.4, prefills=2,
                )  # fmt: skip
                runs[p].append(run_trial(condition))
            self.known["sweeps"][name] = [
                asdict(
                    Swept(
                        p.to_dict(),
                        ledger_of(spec, p).vram_bytes,
                        {o: median([seconds(trial, o) for trial in trials]) for o in OBJECTIVES},
                    )
                )
                for p, trials in runs.items()
            ]
            self.save(self.known)
        return [Swept(**facts) for facts in self.known["sweeps"][name]]


@dataclass(frozen=True)
class Swept:
    """A split's truth."""

    fields: dict[str, Any]
    """Its placement's."""
    vram_bytes: int
    seconds: dict[str, float]
    """By objective."""

    @property
    def placement(self) -> Placement:
        """What was run."""
        return Placement(**self.fields)


def compare(
    name: str,
    objective: Objective,
    budget: int,
    swept: list[Swept],
    report: TuneReport,
    pairs: dict[str, list[float]],
) -> Row:
    """The tune's winner against the sweep's best that fits the budget, measured anew, in turns.

    Args:
        pairs: Speeds, winner / best, turn by turn, of the two that met in another budget; those of a new two are added.
    """
    assert report.best is not None
    with ModelFile(resolve_model(name)) as file:
        spec = read_spec(file)

    def key(p: Placement) -> Placement:
        return same_speed(p, objective, spec)

    winner = report.rows[report.best].placement
    allowed = {key(row.placement) for row in report.rows}
    best = min((s for s in swept if key(s.placement) in allowed), key=lambda s: s.seconds[objective]).placement
    trials = list(report.trials)
    two = " / ".join(json.dumps(key(p).to_dict()) for p in (winner, best))
    if key(best) == key(winner):
        ratios = [1.0]
    elif (met := f"{name}, {objective}: {two}") in pairs:
        ratios = pairs[met]
    else:
        ratios = pairs[met] = []
        while len(ratios) < TURNS.start or (len(ratios) < TURNS.stop - 1 and not decided(ratios)):
            order = (winner, best) if len(ratios) % 2 == 0 else (best, winner)
            both = {p: again(report, p) for p in order}
            trials += both.values()
            ratios.append(seconds(both[best], objective) / seconds(both[winner], objective))
    low, high = interval(ratios)
    return {
        "model": name,
        "objective": objective,
        "budget MiB": budget / MIB,
        "winner k": winner.n_gpu_layers,
        "winner kv": winner.strategy,
        "best k": best.n_gpu_layers,
        "winner / best": median(ratios),
        "95 % interval": f"{low:.2f} to {high:.2f}" if len(ratios) > 1 else "the same",
        "turns": len(ratios) if len(ratios) > 1 else 0,
        "measured": len(report.trials),
        "of": len(report.rows),
        "tune s": report.elapsed_s,
        "out of memory": sum(t.failure is not None and t.failure.kind in OUT_OF_MEMORY for t in trials),
        "failed": sum(t.failure is not None for t in trials),
    }


def decided(ratios: list[float]) -> bool:
    """Whether the median lies on one side of the bound."""
    low, high = interval(ratios)
    return low >= BOUND or high < BOUND


def interval(values: list[float]) -> tuple[float, float]:
    """Where the median is with 95 %: between two of the sorted values, however they are distributed (the sign test)."""
    n = len(values)
    below = 0  # how many values may be left out at each end
    while 2 * sum(comb(n, i) for i in range(below + 1)) <= 0.05 * 2**n:
        below += 1
    ordered = sorted(values)
    return ordered[max(below - 1, 0)], ordered[n - max(below, 1)]


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


def say(what: str) -> None:
    """A line of progress, with the time since the start."""
    print(f"{time.perf_counter() - START:6.0f} s  {what}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=["simulated", "real"], default=["simulated", "real"])
    parser.add_argument("--machines", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0, help="of the simulated machines")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of each real tune")
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "gemma3-270m"])
    parser.add_argument("--quick", action="store_true", help="fewer budgets, less time for each")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resume", action="store_true", help="go on with what is in the JSON file")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    if args.resume and args.json and args.json.exists():
        result = json.loads(args.json.read_text())

    def save(section: str, found: Any) -> None:
        result[section] = found
        if args.json:
            write_atomically(args.json, json.dumps(result, indent=2) + "\n")

    if "simulated" in args.sections:
        save("simulated", simulated(args.machines, args.first_seed))
        show("Simulated machines (regret ≤ 3 % in ≥ 0.95 of them, time / exhaustive ≤ 0.40)", result["simulated"])
    if "real" in args.sections:
        known = result.get("real", {"sweeps": {}, "rows": []})
        real = Real(args.models, args.quick, args.budget, lambda found: save("real", found), known)
        show(f"Real budgets, emulated GPU (winner / best ≥ {BOUND}, nothing out of memory)", real.run())
    console.print(f"{time.perf_counter() - START:.0f} s")


if __name__ == "__main__":
    main()
