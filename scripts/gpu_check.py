"""The head on a GPU: every kernel and whole heads against plain PyTorch, and how near they come to the memory's speed.

    python -m scripts.gpu_check [--device cuda:0] [--json FILE]       # under 10 minutes, no downloads
    python -m scripts.gpu_check --interpret --tiny                    # the same path on the CPU, through Triton's
                                                                      # interpreter: right results, speeds of nothing

Models are random and of realistic shapes (8B-class in Q4_K_M and Q8_0, 1B-class), a few layers of each. A rate is the
bytes that a kernel must move once, over its time; beside it, the share of what a copy within the device reaches. Exit
code 1 if a result is wrong or the Ledger is not within 2 % or 16 MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from rich.console import Console
from rich.table import Table

from hybrid.head.activation import Nonlinearity
from hybrid.head.dequant import dequantize
from hybrid.head.device import Compute, open_device
from hybrid.head.head import Head
from hybrid.head.kernels.choice import Kernels
from hybrid.head.kernels.formats import FEW_TOKENS, FORMATS, Planes
from hybrid.head.memory import LiveBytes
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.model.ggml_types import type_name
from hybrid.schedule.ledger import CUDA_CONTEXT_BYTES, ledger_of
from hybrid.schedule.placement import KV_STRATEGIES, Placement
from scripts.full_cache import pretend_full
from scripts.graph_tape import Tape
from scripts.random_gguf import EIGHT_B_Q4, EIGHT_B_Q8, ONE_B, TINY, Shape, few_rows, write

MIB = 1 << 20
COLD_BYTES = 512 * MIB
"""Weights that take turns in a measurement, so that none is still in the GPU's cache."""


@dataclass(frozen=True)
class Row:
    """One line of the table. What was not measured is None."""

    part: str
    what: str
    ok: bool | None
    error: float | None = None
    """Of the result, relative to the reference."""
    seconds: float | None = None
    n_bytes: int | None = None
    per_s: float | None = None
    """Bytes per second."""
    share: float | None = None
    """Of the copy that it is compared with."""
    note: str = ""


class Bench:
    """The device, how it computes with and without kernels, and how long things take there."""

    def __init__(self, device: torch.device, tiny: bool) -> None:
        self.device, self.tiny = device, tiny
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            self.compute = Compute.on(device)
        else:
            self.compute = Compute(device, torch.float16, False, 1 << 25, False, Kernels(4), Tape())
        self.plain = replace(self.compute, kernels=None, recorder=None)
        self.launched = replace(self.compute, recorder=None)
        self.repeats = 20 if self.on_gpu else 1
        n = (256 if self.on_gpu else 4) * MIB
        here, there = (torch.zeros(n, dtype=torch.uint8, device=device) for _ in range(2))
        self.copy_per_s = 2 * n / self.seconds(lambda i: there.copy_(here))
        host = torch.zeros(n, dtype=torch.uint8, pin_memory=self.on_gpu)
        self.bus_per_s = n / self.seconds(lambda i: there.copy_(host, non_blocking=True))

    def kernels(self) -> Kernels:
        """A fresh set, so that one failure does not hide others."""
        found = self.compute.kernels
        assert found is not None
        return Kernels(found.n_multiprocessors, found.small, found.device)

    def seconds(self, run: Callable[[int], object]) -> float:
        """The median time of `run`, called with 0, 1, … after a warm-up."""
        times = []
        for i in range(self.repeats + 2 if self.on_gpu else 1):
            self.wait()
            start = time.perf_counter()
            run(i)
            self.wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times[2:] or times)

    def free(self) -> int:
        """Free bytes of the GPU."""
        if not self.on_gpu:
            return 0
        self.wait()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def wait(self) -> None:
        """Until the device has done all."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def rate(self, seconds: float, n_bytes: int) -> dict[str, Any]:
        """Fields of a row."""
        per_s = n_bytes / seconds
        return {"seconds": seconds, "n_bytes": n_bytes, "per_s": per_s, "share": per_s / self.copy_per_s}


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want|."""
    got, want = got.double().cpu(), want.double().cpu()
    return float((got - want).norm() / want.norm())


# -- kernels -----------------------------------------------------------------------------------------------------------


def product_rows(bench: Bench, kind: int) -> Iterator[Row]:
    """Products of 1 and 8 tokens, and tiles, of one type."""
    from hybrid.head.kernels import matvec, tiles

    n_rows, n_in = (9, 256) if bench.tiny else (4096, 4096)
    raw, name = few_rows(kind, n_rows, n_in), f"{type_name(kind)} [{n_rows}, {n_in}]"
    held = Planes(torch.empty(raw.size, dtype=torch.uint8, device=bench.device), kind, (n_rows, n_in))
    held.write(0, torch.from_numpy(raw).to(bench.device))
    n_copies = max(1, min(64, COLD_BYTES // held.nbytes)) if bench.on_gpu else 1
    copies = [held, *(Planes(held.data.clone(), kind, (n_rows, n_in)) for _ in range(n_copies - 1))]
    weights, kernels = dequantize(torch.from_numpy(raw), kind), bench.kernels()
    for n in (1, FEW_TOKENS):
        x = torch.randn(n, n_in, device=bench.device)
        got = kernels.matvec(held, x, None)
        error = None if got is None else relative(got, x.cpu().double() @ weights.double().T)
        took = bench.seconds(partial(_multiply, kernels, copies, x))
        yield Row("product", f"{name}, {n} tokens", error is not None and error < 1e-5, error,
                  **bench.rate(took, matvec.moved_bytes(held, n)), note=" ".join(kernels.notes))  # fmt: skip
    out = torch.full((n_rows, n_in), torch.nan, dtype=bench.compute.dtype, device=bench.device)
    done = kernels.dequantize(held, 0, n_rows, out)
    equal = done and torch.equal(out.cpu(), weights.to(bench.compute.dtype))
    took = bench.seconds(lambda i: kernels.dequantize(copies[i % n_copies], 0, n_rows, out))
    moved = tiles.moved_bytes(held, 0, n_rows, out.itemsize)
    yield Row("tile", name, equal, relative(out.float(), weights) if done else None,
              **bench.rate(took, moved), note=" ".join(kernels.notes))  # fmt: skip


def fused_rows(bench: Bench, kind: int) -> Iterator[Row]:
    """Gate, up and activation in one launch, and the residual stream's sum and norm."""
    from hybrid.head.kernels import matvec, norm

    n_ff, n_in = (9, 256) if bench.tiny else (8192, 4096)
    raw, kernels, then = few_rows(kind, 2 * n_ff, n_in), bench.kernels(), Nonlinearity("silu", gated=True)
    held = Planes(torch.empty(raw.size, dtype=torch.uint8, device=bench.device), kind, (2 * n_ff, n_in))
    held.write(0, torch.from_numpy(raw).to(bench.device))
    x = torch.randn(1, n_in, device=bench.device)
    got = kernels.matvec(held, x, None, then)
    want = then(x.cpu().double() @ dequantize(torch.from_numpy(raw), kind).double().T)
    error = None if got is None else relative(got, want)
    took = bench.seconds(lambda i: kernels.matvec(held, x, None, then))
    yield Row("gate and up", f"{type_name(kind)} [2 x {n_ff}, {n_in}]", error is not None and error < 1e-5, error,
              **bench.rate(took, matvec.moved_bytes(held, 1, gated=True)), note=" ".join(kernels.notes))  # fmt: skip
    h, weight = torch.randn(2, 1, n_in, device=bench.device), torch.rand(n_in, device=bench.device)
    sums = kernels.add_and_norm(h[0], h[1], None, weight, 1e-5)
    wanted = F.rms_norm(h.sum(0).cpu().double(), (n_in,), weight.cpu().double(), 1e-5)
    error = None if sums is None else relative(sums[1], wanted)
    took = bench.seconds(lambda i: kernels.add_and_norm(h[0], h[1], None, weight, 1e-5))
    moved = norm.moved_bytes(1, n_in, add=True, norm=True)
    yield Row("sum and norm", f"[{n_in}]", error is not None and error < 1e-5, error, **bench.rate(took, moved),
              note=" ".join(kernels.notes))  # fmt: skip


def _multiply(kernels: Kernels, copies: Sequence[Planes], x: torch.Tensor, i: int) -> None:
    kernels.matvec(copies[i % len(copies)], x, None)


# -- whole heads -------------------------------------------------------------------------------------------------------


def open_head(file: ModelFile, compute: Compute, k: int, **more: Any) -> Head:
    """The first k layers of a model whose cache holds a long context."""
    values = {"device": str(compute.device), "n_ctx": 8192, "n_batch": 512, "kv_dtype": "f16", **more}
    return Head(file, read_spec(file), Placement(n_gpu_layers=k, **values), compute=compute)


def run(head: Head, n: int, at: int) -> torch.Tensor:
    """Hidden states of n tokens from position `at` on."""
    tokens = np.random.default_rng(at).integers(5, 300, n)
    return head.forward(tokens, np.arange(at, at + n), np.zeros(n, int))


def head_rows(bench: Bench, path: Path, shape: Shape) -> Iterator[Row]:
    """A head with kernels against one without; decode and prefill for several k; the Ledger."""
    depth, prompt = (20, 10) if bench.tiny else (4096, 512)
    more = {"n_ctx": 64, "n_batch": 32} if bench.tiny else {}
    with ModelFile(path) as file:
        spec = read_spec(file)
        for kv_dtype in ("f16", "q8_0") if bench.tiny else ("f16", "bf16", "q8_0"):
            fast = open_head(file, bench.compute, spec.n_layers, kv_dtype=kv_dtype, **more)
            plain = open_head(file, bench.plain, spec.n_layers, kv_dtype=kv_dtype, **more)
            errors = []
            for at, n in ((0, prompt), (prompt, 3), (prompt + 3, 1), (prompt + 4, 1)):
                errors.append(relative(run(fast, n, at), run(plain, n, at)))
            yield Row("head", f"{shape.name}, all layers, {kv_dtype} cache", max(errors) < 2e-2, max(errors),
                      note=" ".join(fast.notes))  # fmt: skip
            fast.close()
            plain.close()
        for k in sorted({max(1, spec.n_layers // 2), spec.n_layers}):
            head = open_head(file, bench.compute, k, **more)
            placement = replace(head.placement, device="cuda")
            with Peak(bench) as peak:
                pretend_full(head.cache, placement.n_ctx - placement.n_batch)
                run(head, placement.n_batch, placement.n_ctx - placement.n_batch)
            ledger, measured = ledger_of(spec, placement), head.nbytes + peak.n_bytes
            # graphs have a row of their own
            predicted = ledger.vram_bytes - CUDA_CONTEXT_BYTES - ledger.device.dynamic.graphs
            close = abs(predicted - measured) <= max(16 * MIB, 0.02 * measured)
            yield Row("ledger", f"{shape.name}, k = {k}", close, abs(predicted - measured) / measured,
                      n_bytes=measured, note=f"predicted {predicted / MIB:,.1f} MiB")  # fmt: skip

            def decode(i: int, head: Head = head) -> None:
                pretend_full(head.cache, depth)
                run(head, 1, depth)

            def prefill(i: int, head: Head = head) -> None:
                pretend_full(head.cache, 0)
                run(head, prompt, 0)

            took = bench.seconds(decode)
            yield graph_row(bench, file, head, decode, shape)
            kv = depth * sum(2 * (layer.n_embd_k + layer.n_embd_v) for layer in spec.layers[:k])
            weights = sum(layer.weight_bytes for layer in spec.layers[:k])
            yield Row("decode", f"{shape.name}, k = {k}, {depth} tokens deep", None,
                      **bench.rate(took, weights + kv), note=f"{took * 1e3:.2f} ms a token")  # fmt: skip
            took = bench.seconds(prefill)
            yield Row("prefill", f"{shape.name}, k = {k}, {prompt} tokens", None, seconds=took,
                      note=f"{prompt / took:,.0f} tokens/s")  # fmt: skip
            head.close()


def graph_row(bench: Bench, file: ModelFile, head: Head, decode: Callable[..., None], shape: Shape) -> Row:
    """Decode as graphs against the same kernels launched one by one: results, both times, and the graphs' memory."""
    free = bench.free()
    one_by_one = Head(file, head.spec, head.placement, compute=bench.launched)
    without = free - bench.free()
    error = relative(*(_a_few_steps(each) for each in (head, one_by_one)))
    took, slower = bench.seconds(decode), bench.seconds(partial(decode, head=one_by_one))
    one_by_one.close()
    free = bench.free()
    again = Head(file, head.spec, head.placement, compute=bench.compute)
    n_bytes = free - bench.free() - without
    again.close()
    note = "; ".join([f"{slower * 1e3:.2f} ms launched one by one", *again.notes])
    return Row("graphs", f"{shape.name}, k = {head.n_layers}", error < 1e-3 and not again.notes, error, seconds=took,
               n_bytes=n_bytes if bench.on_gpu else None, note=note)  # fmt: skip


def _a_few_steps(head: Head) -> torch.Tensor:
    """Behind a prompt, the third of three steps."""
    pretend_full(head.cache, 0)
    for at, n in ((0, 10), (10, 1), (11, 1)):
        run(head, n, at)
    return run(head, 1, 12)


class Peak:
    """Torch's bytes beyond those at the start, at most."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.n_bytes = bench, 0
        self._count = LiveBytes()

    def __enter__(self) -> Peak:
        if self.bench.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            self.n_bytes = -torch.cuda.memory_allocated()
        else:
            self._count.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bench.on_gpu:
            self.n_bytes += torch.cuda.max_memory_allocated()
        else:
            self._count.__exit__(*error)
            self.n_bytes = self._count.peak


def strategy_rows(bench: Bench, path: Path, shape: Shape) -> Iterator[Row]:
    """What a step of each KV strategy moves over the bus, and how fast beside a copy of pinned memory."""
    depth = 40 if bench.tiny else 8000
    more: dict[str, Any] = {"n_ctx": 64, "n_batch": 32} if bench.tiny else {"n_ctx": 8192, "n_batch": 64}
    with ModelFile(path) as file:
        spec = read_spec(file)
        for kv in KV_STRATEGIES:
            budget = {"kv_budget": 0 if bench.tiny else 64 * MIB} if kv == "tiered" else {}
            head = open_head(file, bench.compute, spec.n_layers, kv=kv, **more, **budget)

            def step(i: int, head: Head = head) -> None:
                pretend_full(head.cache, depth)
                run(head, 1, depth)

            step(0)
            before = head.cache.moved.to_device + head.cache.moved.to_host
            step(0)
            moved = head.cache.moved.to_device + head.cache.moved.to_host - before
            took = bench.seconds(step)
            per_s = moved / took
            yield Row("bus", f"{shape.name}, {kv}, {depth} tokens deep", None, seconds=took, n_bytes=moved, per_s=per_s,
                      share=per_s / bench.bus_per_s, note="; ".join(head.notes))  # fmt: skip
            head.close()


def llama_rows(bench: Bench, path: Path, shape: Shape) -> Iterator[Row]:
    """llama.cpp's own offload of the same file, where llama-cpp-python has a GPU."""
    import llama_cpp

    from scripts.raw_llama import RawLlama

    if not llama_cpp.llama_supports_gpu_offload():
        yield Row("llama.cpp", f"{shape.name}, -ngl all", None, note="llama-cpp-python was built without a GPU")
        return
    raw = RawLlama(str(path), n_ctx=1024, n_gpu_layers=999)
    prompt = list(range(5, 5 + 512))
    raw.decode(prompt, 0)
    took = bench.seconds(lambda i: raw.decode([300], 512 + i))
    yield Row("llama.cpp", f"{shape.name}, all layers and the output head, decode", None, seconds=took,
              note=f"{took * 1e3:.2f} ms a token")  # fmt: skip


# -- the whole ---------------------------------------------------------------------------------------------------------


def check(bench: Bench) -> Iterator[Row]:
    """All of it."""
    for kind in FORMATS:
        yield from product_rows(bench, kind)
    for kind in (8, 12):
        yield from fused_rows(bench, kind)
    shapes = (TINY,) if bench.tiny else (EIGHT_B_Q4, EIGHT_B_Q8, ONE_B)
    with tempfile.TemporaryDirectory() as folder:
        for shape in shapes:
            path = write(Path(folder) / "model.gguf", shape)
            yield from head_rows(bench, path, shape)
            if shape is shapes[0]:
                yield from strategy_rows(bench, path, shape)
            yield from llama_rows(bench, path, shape)


def show(rows: list[Row], title: str) -> None:
    """A table."""
    table = Table(title=title, title_justify="left")
    for name in ("part", "what", "right", "error", "ms", "MiB", "GB/s", "of a copy", ""):
        table.add_column(name, justify="left" if name in ("part", "what", "") else "right")
    for row in rows:
        table.add_row(
            row.part, row.what, {True: "yes", False: "NO", None: "-"}[row.ok],
            "-" if row.error is None else f"{row.error:.1e}",
            "-" if row.seconds is None else f"{row.seconds * 1e3:.3f}",
            "-" if row.n_bytes is None else f"{row.n_bytes / MIB:.2f}",
            "-" if row.per_s is None else f"{row.per_s / 1e9:.1f}",
            "-" if row.share is None else f"{row.share:.0%}", row.note,
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 170).print(table)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--interpret", action="store_true", help="run kernels on the CPU, through Triton's interpreter")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported: at the first kernel
        from scripts.triton_interpreter import mend_bfloat16

        mend_bfloat16()
    device = torch.device("cpu") if args.interpret else open_device(args.device)
    bench = Bench(device, args.tiny)
    name = (
        torch.cuda.get_device_name(device) if bench.on_gpu else "no GPU: interpreted on the CPU, no speed of anything"
    )
    title = f"{name}; PyTorch {torch.__version__}; copies reach {bench.copy_per_s / 1e9:.1f} GB/s"
    with torch.inference_mode():
        rows = []
        for row in check(bench):
            rows.append(row)
            print(f"{row.part}: {row.what}{' WRONG' if row.ok is False else ''}", file=sys.stderr, flush=True)
    show(rows, title)
    if args.json:
        facts = {
            "device": name, "torch": torch.__version__, "system": platform.platform(), "interpreted": args.interpret,
            "copy_bytes_per_s": bench.copy_per_s, "bus_bytes_per_s": bench.bus_per_s,
        }  # fmt: skip
        args.json.write_text(json.dumps(facts | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    sys.exit(any(row.ok is False for row in rows))


if __name__ == "__main__":
    main()
