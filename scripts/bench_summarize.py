"""The throughput behind `hybrid summarize`, as ratios measured in one run, interleaved with llama.cpp alone.

    python scripts/bench_summarize.py [--models smollm2-135m gemma3-270m] [--sections parallel speculation groups]
                                      [--repeats 5] [--threads N] [--busy] [--json FILE]

With --busy (where other programs are at work) the first two sections count processor time, with one thread, and the
least disturbed of all rounds instead of the median of each round's ratios.

Sections, on the CPU (bounds in brackets; every row says met or missed):
  parallel     k = 0, 4 and 8 sequences: the gain in decode over one against llama.cpp's own gain for that batch [0.9],
               and the prompts' speed against llama.cpp's [0.97]
  speculation  k = 0, one sequence: the gain on text that quotes its source against what llama.cpp's batch curve allows
               for the guesses that were made [0.85; 1.4 x on gemma3], and on text that does not quote [0.97 x]
  groups       emulated device, one thread a half, at the k that balances them: two groups, one in each half at a time,
               against the slower half alone [1.15]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from raw_llama import RawLlama
from rich.console import Console
from rich.table import Table

from hybrid import Hybrid
from hybrid.model.architectures import read_spec
from hybrid.model.catalog import resolve_model
from hybrid.model.file import ModelFile
from hybrid.runtime.batch import Batch, Finished, Task
from hybrid.runtime.engine import Engine
from hybrid.runtime.options import options_of
from hybrid.schedule.machine import usable_cores
from hybrid.schedule.placement import Placement

N_PROMPT, N_DECODE, N_CTX, N_DRAFT = 128, 32, 1024, 7
SIZES = (1, 2, 3, 4, 5, 6, 7, 8)
SOURCE = Path(__file__).with_name("alice.txt")
console = Console(width=None if sys.stdout.isatty() else 130)

Row = dict[str, Any]


clock = time.perf_counter
"""What the first two sections measure with."""


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes by the clock."""
    start = clock()
    work()
    return clock() - start


def row(model: str, what: str, value: float, bound: str, met: bool, **more: Any) -> Row:
    """One line of a table."""
    return {"model": model, "what": what, "value": value, "bound": bound, "result": "met" if met else "missed", **more}


def random_tokens(n: int, seed: int = 0) -> list[int]:
    """Ordinary tokens in no order."""
    return np.random.default_rng(seed).integers(100, 40000, n).tolist()  # type: ignore[no-any-return]


def show(title: str, rows: list[Row]) -> None:
    """Print a section."""
    table = Table(title=title, title_justify="left")
    names = list(dict.fromkeys(name for line in rows for name in line))
    for name in names:
        table.add_column(name)
    for line in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v := line.get(name, ""), float) else str(v) for name in names))
    console.print(table)


@dataclass(frozen=True)
class Served:
    """Some tasks' results; the seconds of their prompts and of all else; the tokens in each step."""

    done: list[Finished]
    prefill_s: float
    decode_s: float
    steps: list[int]


def serve(model: Hybrid, batch: Batch, tasks: Sequence[Task]) -> Served:
    """Run `tasks` to their ends."""
    engine, left = model.engine, iter(tasks)
    begin, evaluate = engine.begin, engine.evaluate
    steps: list[int] = []
    prefill_s = 0.0

    def counted(rows: Any, **options: Any) -> Any:
        steps.append(sum(map(len, rows.values())))
        return begin(rows, **options)

    def timed(*args: Any, **options: Any) -> Any:
        nonlocal prefill_s
        start = clock()
        out = evaluate(*args, **options)
        prefill_s += clock() - start
        return out

    engine.begin, engine.evaluate = counted, timed  # type: ignore[method-assign]
    try:
        start = clock()
        done = list(model.serve(batch, lambda: next(left, None)))
        return Served(done, prefill_s, clock() - start - prefill_s, steps)
    finally:
        engine.begin, engine.evaluate = begin, evaluate  # type: ignore[method-assign]


# -- several sequences -------------------------------------------------------------------------------------------------


def parallel(models: Sequence[str], repeats: int, threads: int) -> list[Row]:
    """Rounds of 1, 4 and 8 sequences, llama.cpp and ours in turn; the median over rounds of each round's ratios."""
    rows: list[Row] = []
    for name in models:
        path = resolve_model(name)
        with (
            closing(RawLlama(str(path), n_ctx=N_CTX, n_threads=threads, n_sequences=8)) as raw,
            Hybrid(path, n_gpu_layers=0, n_ctx=N_CTX, n_threads=threads, n_sequences=8) as ours,
        ):
            rounds: list[dict[str, float]] = []
            for number in range(repeats + 1):
                found: dict[str, float] = {}
                for n in (1, 4, 8):
                    for who in ("raw", "ours") if number % 2 else ("ours", "raw"):
                        pp, tg = _raw_parallel(raw, ours, n) if who == "raw" else _our_parallel(ours, n)
                        found |= {f"{who} pp{n}": pp, f"{who} tg{n}": tg}
                rounds.append(found)
        rounds = rounds[1:]  # the first warms up
        if clock is time.process_time:
            rounds = [{what: max(r[what] for r in rounds) for what in rounds[0]}]
        for n in (4, 8):
            gains = {who: [r[f"{who} tg{n}"] / r[f"{who} tg1"] for r in rounds] for who in ("raw", "ours")}
            ratio = statistics.median(a / b for a, b in zip(gains["ours"], gains["raw"], strict=True))
            rows.append(
                row(name, f"decode, {n} sequences: our gain / llama.cpp's", ratio, "≥ 0.9", ratio >= 0.9,
                    ours=statistics.median(gains["ours"]), llama_cpp=statistics.median(gains["raw"]))
            )  # fmt: skip
        for n in (4, 8):
            ratio = statistics.median(r[f"ours pp{n}"] / r[f"raw pp{n}"] for r in rounds)
            rows.append(
                row(name, f"prefill of {n} prompts, t/s: ours / llama.cpp", ratio, "≥ 0.97", ratio >= 0.97,
                    ours=statistics.median(r[f"ours pp{n}"] for r in rounds),
                    llama_cpp=statistics.median(r[f"raw pp{n}"] for r in rounds))
            )  # fmt: skip
        one = statistics.median(r["ours tg1"] / r["raw tg1"] for r in rounds)
        rows.append(row(name, "decode, 1 sequence, t/s: ours / llama.cpp", one, "", True,
                        ours=statistics.median(r["ours tg1"] for r in rounds),
                        llama_cpp=statistics.median(r["raw tg1"] for r in rounds)))  # fmt: skip
    return rows


def _raw_parallel(raw: RawLlama, beside: Hybrid, n: int) -> tuple[float, float]:
    """Tokens per second of n prompts one after the other, and of n sequences decoding together; on the thread that
    computes in `beside`, for two would slow each other down (`Pipeline.on_tail_thread`)."""

    def run() -> tuple[float, float]:
        raw.clear()
        pp = seconds(lambda: [raw.prompt(random_tokens(N_PROMPT, seq), seq) for seq in range(n)])
        tg = seconds(lambda: [raw.step([(1000 + i, N_PROMPT + i, seq) for seq in range(n)]) for i in range(N_DECODE)])
        return n * N_PROMPT / pp, n * N_DECODE / tg

    return beside.engine.on_tail_thread(run)


def _our_parallel(model: Hybrid, n: int) -> tuple[float, float]:
    options = options_of(temperature=0, max_tokens=N_DECODE + 1, ignore_eos=True)
    tasks = [Task(prompt=tuple(random_tokens(N_PROMPT, seq)), options=options, index=seq) for seq in range(n)]
    for seq in range(8):
        model.engine.trim(0, seq)
    served = serve(model, model.batch(n), tasks)
    return n * N_PROMPT / served.prefill_s, n * N_DECODE / served.decode_s


# -- guesses -----------------------------------------------------------------------------------------------------------


def speculation(models: Sequence[str], repeats: int, threads: int) -> list[Row]:
    """With and without guesses, in turn; and llama.cpp's time for batches of 1 to 8 tokens of one sequence."""
    rows: list[Row] = []
    text = SOURCE.read_text("utf-8")[:1600]
    for name in models:
        path = resolve_model(name)
        with (
            closing(RawLlama(str(path), n_ctx=N_CTX, n_threads=threads)) as raw,
            Hybrid(path, n_gpu_layers=0, n_ctx=N_CTX, n_threads=threads, n_draft=N_DRAFT) as model,
        ):
            curve = model.batch_curve()
            quote = f"{text}\n\nThe same text once more:\n\n{text[:80]}"
            prompts = {
                "quotes": (tuple(model.tokenize(quote)), options_of(temperature=0, max_tokens=96, ignore_eos=True)),
                "does not quote": (
                    tuple(model.tokenize(text)),
                    options_of(temperature=1.2, seed=5, max_tokens=96, ignore_eos=True),
                ),
            }
            samples: dict[str, list[dict[str, Any]]] = {what: [] for what in prompts}
            costs: list[list[float]] = []
            for number in range(repeats + 1):
                costs.append(model.engine.on_tail_thread(lambda raw=raw: _raw_curve(raw)))  # type: ignore[misc]
                for what, (prompt, options) in prompts.items():
                    order = (0, N_DRAFT) if number % 2 else (N_DRAFT, 0)
                    found: dict[str, Any] = {}
                    for n_draft in order:
                        batch = model.batch(1, curve=curve, n_draft=n_draft)
                        served = serve(model, batch, [Task(prompt=prompt, options=options)])
                        (done,) = served.done
                        found[f"s{bool(n_draft):d}"] = served.decode_s
                        if n_draft:
                            found |= {"steps": served.steps, "drafted": done.n_drafted, "accepted": done.n_accepted}
                        found[f"tokens{bool(n_draft):d}"] = done.completion.tokens
                    samples[what].append(found)
        busy = clock is time.process_time
        cost = [(min if busy else statistics.median)(column) for column in zip(*costs[1:], strict=True)]
        for what, found_all in samples.items():
            found_all = found_all[1:]
            gain = statistics.median(f["s0"] / f["s1"] for f in found_all)
            if busy:
                gain = min(f["s0"] for f in found_all) / min(f["s1"] for f in found_all)
            first = found_all[0]
            n_tokens = len(first["tokens1"]) - 1
            allowed = n_tokens * cost[0] / sum(cost[n - 1] for n in first["steps"])
            more = {"gain": gain, "allowed": allowed, "guesses": f"{first['accepted']}/{first['drafted']}",
                    "same text": all(f["tokens0"] == f["tokens1"] for f in found_all)}  # fmt: skip
            if what == "quotes":
                share = gain / allowed
                rows.append(
                    row(name, "text that quotes: gain / what the curve allows", share, "≥ 0.85", share >= 0.85, **more)
                )
                if name.startswith("gemma3"):
                    rows.append(row(name, "text that quotes: gain", gain, "≥ 1.4", gain >= 1.4, **more))
            else:
                rows.append(row(name, "text that does not quote: gain", gain, "≥ 0.97", gain >= 0.97, **more))
    return rows


def _raw_curve(raw: RawLlama) -> list[float]:
    """Seconds of llama.cpp's batches of each size, after a short text."""
    raw.clear()
    raw.prompt(random_tokens(N_PROMPT), 0)
    out = []
    for size in SIZES:
        taken = []
        for _ in range(3):
            taken.append(seconds(lambda n=size: raw.step([(1000 + i, N_PROMPT + i, 0) for i in range(n)])))  # type: ignore[misc]
            raw.forget(N_PROMPT, 0)
        out.append(min(taken))
    return out


# -- two groups --------------------------------------------------------------------------------------------------------


def groups(models: Sequence[str], repeats: int, threads: int) -> list[Row]:
    """Wall time of two groups of four sequences against each half alone with the same work, one thread a half."""
    rows: list[Row] = []
    for name in models:
        path = resolve_model(name)
        with ModelFile(path) as file:
            n_layers = read_spec(file).n_layers
        k = n_layers // 2
        for _ in range(5):
            placement = Placement(device="cpu", n_gpu_layers=k, n_ctx=N_CTX, n_batch=64, n_ubatch=64, n_sequences=8)
            with _engine(path, placement) as engine:
                head_s, tail_s, beside_s, wall_s = _halves(engine, repeats)
            balanced = round(n_layers * tail_s / (n_layers - k) / (head_s / k + tail_s / (n_layers - k)))
            balanced = min(max(balanced, 1), n_layers - 1)
            if balanced == k or abs(head_s - tail_s) <= 0.1 * max(head_s, tail_s):
                break
            k = balanced
        ratio = wall_s / max(head_s, tail_s)
        rows.append(
            row(name, f"two groups, k = {k}: wall / slower half", ratio, "≤ 1.15", ratio <= 1.15, head_s=head_s,
                tail_s=tail_s, unconnected_s=beside_s, wall_s=wall_s)
        )  # fmt: skip
    return rows


@contextmanager
def _engine(path: Path, placement: Placement) -> Iterator[Engine]:
    with ModelFile(path) as file, closing(Engine(file, read_spec(file), placement)) as engine:
        yield engine


def _halves(engine: Engine, repeats: int) -> tuple[float, float, float, float]:
    """Medians, interleaved: the head alone, the tail alone, both at once but unconnected, both in two groups."""
    head, tail = engine.head, engine.tail
    assert head is not None
    assert tail is not None
    members = ((0, 1, 2, 3), (4, 5, 6, 7))
    hidden = np.random.default_rng(0).standard_normal((4, engine.spec.n_embd)).astype(np.float32)
    tokens, on = np.full(4, 1000, np.int32), np.ones(4, np.bool_)

    def fresh() -> None:
        for seq in range(8):
            engine.trim(0, seq)

    def head_alone() -> None:
        for i in range(N_DECODE):
            for seqs in members:
                head.forward(tokens, np.full(4, i, np.int32), np.array(seqs, np.int32))

    def tail_alone() -> None:
        for i in range(N_DECODE):
            for seqs in members:
                tail.decode(hidden, np.full(4, i, np.int32), np.array(seqs, np.int32), on)

    def together() -> None:
        rows = [{seq: [1000] for seq in seqs} for seqs in members]
        steps = [engine.begin(row, alone=False) for row in rows]
        for i in range(N_DECODE):
            for g in (0, 1):
                engine.complete(steps[g])
                if i + 1 < N_DECODE:
                    steps[g] = engine.begin(rows[g], alone=False)

    samples = []
    with ThreadPoolExecutor(1, initializer=_one_thread) as pool:  # torch counts its threads per thread
        for _ in range(repeats + 1):
            fresh()
            head_s = pool.submit(_wall, head_alone).result()
            fresh()
            tail_s = _wall(tail_alone)
            fresh()
            start = time.perf_counter()
            beside = pool.submit(head_alone)
            tail_alone()
            beside.result()
            beside_s = time.perf_counter() - start
            fresh()
            samples.append((head_s, tail_s, beside_s, _wall(together)))
    head_t, tail_t, beside_t, wall_t = (statistics.median(column) for column in zip(*samples[1:], strict=True))
    return head_t, tail_t, beside_t, wall_t


def _wall(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


SECTIONS: dict[str, Callable[[Sequence[str], int, int], list[Row]]] = {
    "parallel": parallel,
    "speculation": speculation,
    "groups": groups,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "gemma3-270m"])
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    global clock
    if args.busy:
        clock, args.threads = time.process_time, 1
    result: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "threads": args.threads,
        "busy": args.busy,
    }
    for name in args.sections:
        result[name] = SECTIONS[name](args.models, args.repeats, args.threads)
        show(name, result[name])
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
