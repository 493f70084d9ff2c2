"""Speed and memory of the split against llama.cpp alone, as ratios measured in one run, interleaved.

    python scripts/bench_split.py [--models smollm2-135m gemma3-270m] [--sections startup k0 tail overlap memory]
                                  [--repeats 7] [--json FILE]

Sections (each prints a table; the bound is in its title):
  startup  `hybrid --help`; command to first token at k = 0 against a ten-line llama_cpp script
  k0       prefill and decode with k = 0 against the raw llama.cpp loop
  tail     decode time of the tail alone against its share of the full model's
  overlap  pipelined prefill, emulated device, one thread a half, at the k that balances the halves
  memory   resident growth of a process that loads a tail
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from raw_llama import RawLlama
from rich.console import Console
from rich.table import Table

from hybrid.model.architectures import read_spec
from hybrid.model.catalog import resolve_model
from hybrid.model.file import ModelFile
from hybrid.runtime.engine import Engine
from hybrid.schedule.machine import usable_cores
from hybrid.schedule.placement import Placement

N_PROMPT, N_DECODE = 512, 64
console = Console(width=None if sys.stdout.isatty() else 120)

Row = dict[str, Any]

TEN_LINES = """
import sys
from llama_cpp import Llama

model = Llama(sys.argv[1], n_ctx=4096, verbose=False)
for piece in model("The capital of France is", max_tokens=1, temperature=0, stream=True):
    print(piece["choices"][0]["text"], end="", flush=True)
"""


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def prompt_tokens(n: int, n_vocab: int) -> list[int]:
    """Random ordinary tokens."""
    return np.random.default_rng(0).integers(100, min(n_vocab, 40000), n).tolist()  # type: ignore[no-any-return]


def ratio(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Median and half the interquartile range of a / b over interleaved pairs."""
    ratios = [a / b for a, b in pairs]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return statistics.median(ratios), (quartiles[2] - quartiles[0]) / 2


def show(title: str, rows: list[Row]) -> None:
    """Print a section."""
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)


def open_engine(path: Path, placement: Placement) -> Engine:
    """An engine on its own ModelFile."""
    file = ModelFile(path)
    return Engine(file, read_spec(file), placement)


# -- sections ----------------------------------------------------------------------------------------------------------


def startup(models: Sequence[str], repeats: int) -> list[Row]:
    """Whole processes: wall time of --help, and time to the first byte of text."""
    hybrid = [sys.executable, "-m", "hybrid.cli"]

    def first_byte(command: list[str]) -> float:
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            took = time.perf_counter() - start
            process.stdout.read()
        if process.returncode:
            raise RuntimeError(f"{command} exited with {process.returncode}")
        return took

    helps = [seconds(lambda: subprocess.run([*hybrid, "--help"], check=True, capture_output=True)) for _ in range(9)]
    rows: list[Row] = [
        {"what": "hybrid --help, s (≤ 0.25)", "hybrid": statistics.median(helps), "llama_cpp": "", "ratio": "", "±": ""}
    ]
    for name in models:
        path = str(resolve_model(name))
        ours = [*hybrid, "generate", path, "-p", "The capital of France is", "-n", "1", "--temp", "0", "-ngl", "0"]
        theirs = [sys.executable, "-c", TEN_LINES, path]
        pairs = [(first_byte(ours), first_byte(theirs)) for _ in range(repeats + 1)][1:]
        middle, spread = ratio(pairs)
        rows.append(
            {
                "what": f"{name}: command to first token, s (≤ 1.25 x)",
                "hybrid": statistics.median(a for a, _ in pairs),
                "llama_cpp": statistics.median(b for _, b in pairs),
                "ratio": middle,
                "±": spread,
            }
        )
    return rows


def k0(models: Sequence[str], repeats: int) -> list[Row]:
    """pp512 and tg64 of both, A B B A."""
    rows: list[Row] = []
    cores = usable_cores()
    for name in models:
        path = resolve_model(name)
        placement = Placement(
            device="cpu", n_gpu_layers=0, n_ctx=1024, n_threads_tail=cores, n_threads_tail_batch=cores
        )
        with closing(RawLlama(str(path), n_threads=cores)) as raw, closing(open_engine(path, placement)) as engine:
            tokens = prompt_tokens(N_PROMPT, raw.n_vocab)

            def ours(engine: Engine = engine, tokens: list[int] = tokens) -> tuple[float, float]:
                engine.trim(0)
                pp = seconds(lambda: engine.evaluate(tokens))
                return pp, seconds(lambda: [engine.evaluate([t]) for t in tokens[:N_DECODE]])

            def theirs(raw: RawLlama = raw, tokens: list[int] = tokens) -> tuple[float, float]:
                raw.clear()
                pp = seconds(lambda: raw.decode(tokens, 0))
                return pp, seconds(lambda: [raw.decode([t], N_PROMPT + i) for i, t in enumerate(tokens[:N_DECODE])])

            ours(), engine.on_tail_thread(theirs)  # one thread for both: see there what it costs to have two
            runs = []
            for i in range(2 * repeats):
                if i % 2:
                    a, b = ours(), engine.on_tail_thread(theirs)
                else:
                    b, a = engine.on_tail_thread(theirs), ours()
                runs.append((a, b))
        for index, what, n in ((0, "pp512", N_PROMPT), (1, "tg64", N_DECODE)):
            middle, spread = ratio([(theirs_s[index], ours_s[index]) for ours_s, theirs_s in runs])
            rows.append(
                {
                    "model": name,
                    "test": what,
                    "hybrid t/s": n / statistics.median(o[index] for o, _ in runs),
                    "llama.cpp t/s": n / statistics.median(t[index] for _, t in runs),
                    "ratio": middle,
                    "±": spread,
                }
            )
    return rows


def tail(models: Sequence[str], repeats: int) -> list[Row]:
    """Decode time of a tail of L - k layers against (L - k)/L of the full model's layers plus the output head.

    The output head's time is llama.cpp's own difference between a token with and one without logits.
    """
    from hybrid.tail.tail import Tail

    rows: list[Row] = []
    cores = usable_cores()
    for name in models:
        path = resolve_model(name)
        with closing(RawLlama(str(path), n_threads=cores)) as raw, ModelFile(path) as file:
            spec = read_spec(file)
            n_layers = spec.n_layers
            tokens = prompt_tokens(N_DECODE, raw.n_vocab)
            hidden = np.random.default_rng(0).standard_normal((N_DECODE, spec.n_embd)).astype(np.float32)
            one, on = np.zeros(1, np.int32), np.ones(1, np.bool_)

            def full(output: bool, raw: RawLlama = raw, tokens: list[int] = tokens) -> float:
                raw.clear()
                return seconds(lambda: [raw.decode([t], i, output=output) for i, t in enumerate(tokens)])

            for k in sorted({1, n_layers // 4, n_layers // 2, 3 * n_layers // 4, n_layers - 1}):
                placement = Placement(
                    device="cpu", n_gpu_layers=k, n_ctx=1024, n_threads_tail=cores, n_threads_tail_batch=cores
                )
                with closing(Tail(file, spec, placement)) as late:

                    def part(late: Tail = late, hidden: Any = hidden, one: Any = one, on: Any = on) -> float:
                        late.trim(0, 0)
                        return seconds(
                            lambda: [
                                late.decode(hidden[i : i + 1], np.full(1, i, np.int32), one, on)
                                for i in range(N_DECODE)
                            ]
                        )

                    part(), full(True)
                    shares, pairs = [], []
                    for _ in range(2 * repeats):
                        tail_s, full_s, silent_s = part(), full(True), full(False)
                        head_s = max(0.0, full_s - silent_s)
                        share = (n_layers - k) / n_layers * (full_s - head_s) + head_s
                        shares.append(share)
                        pairs.append((tail_s, share))
                middle, spread = ratio(pairs)
                rows.append(
                    {
                        "model": name,
                        "k": k,
                        "tail ms/token": 1e3 * statistics.median(a for a, _ in pairs) / N_DECODE,
                        "share ms/token": 1e3 * statistics.median(shares) / N_DECODE,
                        "ratio": middle,
                        "±": spread,
                    }
                )
    return rows


def overlap(models: Sequence[str], repeats: int) -> list[Row]:
    """Wall time of a pipelined prefill against the slower half alone plus one chunk of the faster.

    `beside` is what the machine makes of the two halves at the same time with nothing between them: where it exceeds
    the slower half alone, the cores share something (a physical core, caches, memory, power).
    """
    rows: list[Row] = []
    n_prompt = 1024
    for name in models:
        path = resolve_model(name)
        with ModelFile(path) as file:
            n_layers = read_spec(file).n_layers
        k = n_layers // 2
        for n_batch in (64, 128, 256, 512):
            for _ in range(5):
                placement = Placement(
                    device="cpu", n_gpu_layers=k, n_ctx=n_prompt, n_batch=n_batch, n_ubatch=n_batch
                )  # one thread everywhere
                with closing(open_engine(path, placement)) as engine:
                    head_s, tail_s, beside_s, wall_s = _halves(engine, n_prompt, repeats)
                balanced = round(n_layers * tail_s / (n_layers - k) / (head_s / k + tail_s / (n_layers - k)))
                if abs(head_s - tail_s) <= 0.1 * max(head_s, tail_s) or balanced == k:
                    break
                k = min(max(balanced, 1), n_layers - 1)
            ideal = max(head_s, tail_s) + min(head_s, tail_s) * n_batch / n_prompt
            rows.append(
                {
                    "model": name,
                    "chunk": n_batch,
                    "k": k,
                    "head s": head_s,
                    "tail s": tail_s,
                    "apart": abs(head_s - tail_s) / max(head_s, tail_s),
                    "beside s": beside_s,
                    "wall s": wall_s,
                    "wall / ideal": wall_s / ideal,
                    "prefill t/s": n_prompt / wall_s,
                }
            )
    return rows


def _halves(engine: Engine, n_prompt: int, repeats: int) -> tuple[float, float, float, float]:
    """Medians, interleaved: the head alone, the tail alone, both at once but unconnected, both pipelined."""
    head, late, placement = engine.head, engine.tail, engine.placement
    assert head is not None
    assert late is not None
    tokens = np.array(prompt_tokens(n_prompt, engine.spec.n_vocab), np.int32)
    hidden = np.random.default_rng(0).standard_normal((placement.n_batch, engine.spec.n_embd)).astype(np.float32)
    seqs, off = np.zeros(placement.n_batch, np.int32), np.zeros(placement.n_batch, np.bool_)
    starts = range(0, n_prompt, placement.n_batch)

    def positions(start: int) -> Any:
        return np.arange(start, start + placement.n_batch, dtype=np.int32)

    def head_alone() -> None:
        for s in starts:
            head.forward(tokens[s : s + placement.n_batch], positions(s), seqs)

    def tail_alone() -> None:
        for s in starts:
            late.decode(hidden, positions(s), seqs, off)

    samples: list[tuple[float, float, float, float]] = []
    with ThreadPoolExecutor(1, initializer=_one_thread) as pool:  # torch counts its threads per thread
        for _ in range(max(3, repeats // 2) + 1):
            engine.trim(0)
            head_s = pool.submit(seconds, head_alone).result()
            engine.trim(0)
            tail_s = seconds(tail_alone)
            engine.trim(0)
            start = time.perf_counter()
            beside = pool.submit(head_alone)
            tail_alone()
            beside.result()
            beside_s = time.perf_counter() - start
            engine.trim(0)
            samples.append((head_s, tail_s, beside_s, seconds(lambda: engine.evaluate(tokens.tolist()))))
    head_t, tail_t, beside_t, wall_t = (statistics.median(column) for column in zip(*samples[1:], strict=True))
    return head_t, tail_t, beside_t, wall_t


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def memory(models: Sequence[str], repeats: int) -> list[Row]:
    """One fresh process a row: `--child-memory` below."""
    rows: list[Row] = []
    for name in models:
        path = resolve_model(name)
        with ModelFile(path) as file:
            n_layers = read_spec(file).n_layers
        for k in (1, n_layers // 2, n_layers - 1):
            command = [sys.executable, __file__, "--child-memory", str(path), str(k)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            allowed = 1.1 * found["buffers"] + found["vocabulary"]
            rows.append(
                {
                    "model": name,
                    "k": k,
                    "tensors + KV + compute + output MiB": found["buffers"] / 2**20,
                    "vocabulary MiB": found["vocabulary"] / 2**20,
                    "RSS grown MiB": found["grown"] / 2**20,
                    "grown / allowed": found["grown"] / allowed,
                }
            )
    return rows


def child_memory(path: str, k: int) -> None:
    """Resident growth of this process by a vocabulary alone, then by a tail that has filled a batch."""
    import psutil

    from hybrid.tail.llama import lib
    from hybrid.tail.tail import Tail
    from hybrid.tail.vocab import Vocabulary

    def rss() -> int:
        return int(psutil.Process().memory_info().rss)

    lib()
    with ModelFile(path) as file:
        spec = read_spec(file)
        start = rss()
        vocabulary = Vocabulary.open(file.path)
        vocabulary_bytes = rss() - start
        vocabulary.close()
        placement = Placement(device="cpu", n_gpu_layers=k, n_ctx=1024)
        start = rss()
        late = Tail(file, spec, placement)
        hidden = np.random.default_rng(0).standard_normal((512, spec.n_embd)).astype(np.float32)
        last = np.zeros(512, np.bool_)
        last[-1] = True
        for i in (0, 512):
            late.decode(hidden, np.arange(i, i + 512, dtype=np.int32), np.zeros(512, np.int32), last)
        grown = rss() - start
        report = late.memory
        buffers = report.model_bytes + report.kv_bytes + report.compute_bytes + report.output_bytes
        late.close()
    print(json.dumps({"buffers": buffers, "vocabulary": vocabulary_bytes, "grown": grown}))


SECTIONS: dict[str, tuple[str, Callable[[Sequence[str], int], list[Row]]]] = {
    "startup": ("Start-up", startup),
    "k0": ("k = 0 against the raw llama.cpp loop (ratio of speeds ≥ 0.97)", k0),
    "tail": ("The tail alone, decode (time / share ≤ 1.05)", tail),
    "overlap": ("Prefill, both halves overlapping, one thread each (wall / ideal ≤ 1.10)", overlap),
    "memory": ("Resident memory of a tail (grown / allowed ≤ 1)", memory),
}


def machine() -> Row:
    """What the figures were measured on."""
    import llama_cpp

    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": usable_cores(),
        "system": platform.platform(),
        "llama_cpp_python": llama_cpp.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "gemma3-270m"])
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child-memory", nargs=2, metavar=("PATH", "K"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child_memory:
        child_memory(args.child_memory[0], int(args.child_memory[1]))
        return
    result: Row = {"machine": machine()}
    console.print(f"{result['machine']['cpu']}, {result['machine']['cores']} cores, {result['machine']['date']}")
    for name in args.sections:
        title, measure = SECTIONS[name]
        result[name] = measure(args.models, args.repeats)
        show(title, result[name])
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
