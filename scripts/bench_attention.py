"""Decode attention over a cache in RAM: our kernel against the memory, torch and llama.cpp, in one run.

    python scripts/bench_attention.py [--depth 32768] [--threads N] [--repeats 7] [--no-llama] [--json FILE]

One new token, 32 heads, 8 kv heads, head dimension 128 by default. The contenders take turns in every round; ratios are
made within a round and their median counts. There are as many layers as it takes to leave no cache a chance. Bounds on
a quiet machine: 0.60 of the memory's read bandwidth, 10 times torch asked with enable_gqa, 2 times llama.cpp, q8_0 no
slower than f16.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from llama_attention import LlamaAttention, shape_parser
from torch import Tensor

from hybrid import _native
from hybrid.head.kv.cpu_attention import Run, attend_on_cpu, encode, host_rows

READ_BYTES = 1 << 30
LAYERS_BYTES = 1 << 30
"""Of the f16 caches together: several times the last cache."""
BOUNDS = {
    "fraction_of_read_bandwidth": 0.60,
    "vs_torch": 10.0,
    "vs_llama_cpp": 2.0,
    "q8_0_vs_f16": 1.0,
}
Caches = list[tuple[Tensor, Tensor]]


def make_caches(kv_type: str, n_layers: int, depth: int, n_kv_heads: int, head_dim: int) -> Caches:
    """Random K and V for each layer."""
    block = encode(torch.randn(1024, n_kv_heads, head_dim), kv_type)
    caches = []
    for _ in range(n_layers):
        pair = [host_rows(depth, n_kv_heads, head_dim, kv_type) for _ in range(2)]
        for rows in pair:
            for at in range(0, depth, 1024):
                rows[at : at + 1024] = block[: min(1024, depth - at)]
        caches.append((pair[0], pair[1]))
    return caches


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ours_s(q: Tensor, caches: Caches, n_threads: int) -> float:
    """Seconds a layer."""
    depth, scale = caches[0][0].shape[0], q.shape[2] ** -0.5

    def all_layers() -> None:
        for k, v in caches:
            attend_on_cpu(q, [Run(0, 1, depth - 1, k, v, 0, depth)], scale=scale, n_threads=n_threads)

    return timed(all_layers) / len(caches)


def torch_s(q: Tensor, cache: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Seconds a layer of SDPA in float16: asked with enable_gqa, and with the heads of a group as rows of one head."""
    n_heads, head_dim = q.shape[1:]
    k, v = (rows.transpose(0, 1).unsqueeze(0) for rows in cache)
    grouped = q.half().view(1, k.shape[1], n_heads // k.shape[1], head_dim)
    heads = q.half().view(1, n_heads, 1, head_dim)
    return (
        timed(lambda: F.scaled_dot_product_attention(heads, k, v, enable_gqa=True)),
        timed(lambda: F.scaled_dot_product_attention(grouped, k, v)),
    )


def main() -> None:
    parser = shape_parser(__doc__, repeats=7)
    parser.add_argument("--no-llama", action="store_true", help="leave llama.cpp out")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    n_bytes = {"f16": 4 * args.depth * args.n_kv_heads * args.head_dim}
    n_bytes["q8_0"] = n_bytes["f16"] * 34 // 64
    n_layers = max(2, -(-LAYERS_BYTES // n_bytes["f16"]))
    caches = {t: make_caches(t, n_layers, args.depth, args.n_kv_heads, args.head_dim) for t in n_bytes}
    q = torch.randn(1, args.n_heads, args.head_dim)
    llama = None
    if not args.no_llama:
        llama = LlamaAttention(args.n_heads, args.n_kv_heads, args.head_dim, args.depth, args.threads)
    rounds = []
    for number in range(args.repeats + 1):
        row = {"read_bytes_per_s": _native.read_bandwidth(READ_BYTES, args.threads, 0.3)}
        for kv_type in caches:
            row[f"{kv_type}_s"] = ours_s(q, caches[kv_type], args.threads)
        row["torch_s"], row["torch_grouped_s"] = torch_s(q, caches["f16"][number % n_layers])
        if llama:
            row["llama_cpp_s"] = llama.layer_s()
        if number:  # the first round warms up
            rounds.append(row)
    result = summary(rounds, n_bytes["f16"])
    result |= {"n_threads": args.threads, "instruction_set": _native.instruction_sets()[0]}
    result |= {"shape": [args.n_heads, args.n_kv_heads, args.head_dim, args.depth], "rounds": rounds}
    show(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def summary(rounds: list[dict[str, float]], n_bytes: int) -> dict[str, Any]:
    """Medians over the rounds."""

    def middle(ratio: Callable[[dict[str, float]], float]) -> float:
        return median(ratio(row) for row in rounds)

    result: dict[str, Any] = {
        "gb_per_s": middle(lambda r: n_bytes / r["f16_s"] / 1e9),
        "read_gb_per_s": middle(lambda r: r["read_bytes_per_s"] / 1e9),
        "fraction_of_read_bandwidth": middle(lambda r: n_bytes / r["f16_s"] / r["read_bytes_per_s"]),
        "vs_torch": middle(lambda r: r["torch_s"] / r["f16_s"]),
        "vs_torch_grouped": middle(lambda r: r["torch_grouped_s"] / r["f16_s"]),
        "q8_0_vs_f16": middle(lambda r: r["f16_s"] / r["q8_0_s"]),
        "f16_tokens_per_s_per_layer": middle(lambda r: 1 / r["f16_s"]),
        "q8_0_tokens_per_s_per_layer": middle(lambda r: 1 / r["q8_0_s"]),
    }
    if "llama_cpp_s" in rounds[0]:
        result["vs_llama_cpp"] = middle(lambda r: r["llama_cpp_s"] / r["f16_s"])
    return result


def show(result: dict[str, Any]) -> None:
    print(f"{result['instruction_set']}, {result['n_threads']} threads, {len(result['rounds'])} rounds")
    print(f"{result['gb_per_s']:.1f} GB/s of {result['read_gb_per_s']:.1f} GB/s")
    for name, bound in BOUNDS.items():
        if name in result:
            print(f"{name} {result[name]:.2f} ({'ok' if result[name] >= bound else 'below'}: {bound})")
    print(f"vs_torch_grouped {result['vs_torch_grouped']:.2f} (torch's quicker way, which few callers know)")


if __name__ == "__main__":
    main()
