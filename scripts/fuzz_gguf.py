"""Spoils tiny models of every architecture and runs the program on them: each run must end with exit code 0 or 2.

    python -m scripts.fuzz_gguf                       # 2,000 mutations
    python -m scripts.fuzz_gguf -n 500 --seed 7 --jobs 4

A run fails where it dies of a signal, hangs, takes more than 10 s or 1 GiB, ends with another exit code, or says
anything but one sentence. It is run again alone then, so that a busy machine does not count. What fails is printed as a
JSON line, ready for `tests/fuzz/failed.jsonl`, and the exit code is 1.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import click

from tests.fuzz.cases import Case, bases, drawn, summary
from tests.fuzz.layout import Layout
from tests.fuzz.runner import Run, Runner


@click.command()
@click.option("-n", "n_mutations", default=2000, show_default=True, help="Mutations.")
@click.option("--seed", default=0, show_default=True, help="Of the random numbers.")
@click.option("--jobs", default=os.cpu_count() or 1, show_default=True, help="Runs at a time.")
@click.option("-v", "--verbose", is_flag=True, help="Print every case and what became of it.")
def main(n_mutations: int, seed: int, jobs: int, verbose: bool) -> None:
    """Run the campaign and print its figures."""
    with tempfile.TemporaryDirectory(prefix="hybrid-fuzz-") as folder:
        layouts = bases(Path(folder))
        cases = list(itertools.islice(drawn(layouts, seed), n_mutations))
        runs = run_all(cases, layouts, Path(folder), jobs, verbose)
        with Runner(Path(folder)) as runner:
            runs = [(case, case.run(runner, layouts[case.base]) if run.problem else run) for case, run in runs]
    for case, run in runs:
        if run.problem:
            click.echo(f"{run.problem}: {run.words[-300:]!r}\n{case.to_json()}")
    figures = summary(runs)
    click.echo(", ".join(f"{name} {value}" for name, value in figures.items()))
    sys.exit(1 if figures["problems"] else 0)


def run_all(
    cases: list[Case], layouts: dict[str, Layout], folder: Path, jobs: int, verbose: bool = False
) -> list[tuple[Case, Run]]:
    """Every case and its run, in order."""
    idle: SimpleQueue[Runner] = SimpleQueue()
    for i in range(jobs):
        (folder / str(i)).mkdir()
        idle.put(Runner(folder / str(i)))

    def run(case: Case) -> tuple[Case, Run]:
        runner = idle.get()
        try:
            done = case.run(runner, layouts[case.base])
        finally:
            idle.put(runner)
        if verbose:
            click.echo(f"{done.code} {done.seconds:.2f} s {done.problem} {done.words[-150:]!r} {case.to_json()[:300]}")
        return case, done

    with ThreadPoolExecutor(jobs) as pool:
        runs = list(pool.map(run, cases))
    for _ in range(jobs):
        idle.get().close()
    return runs


if __name__ == "__main__":
    main()
