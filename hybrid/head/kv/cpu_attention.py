"""Attention on the CPU over a KV cache in host memory, and the merge of two partial results.

What attends to a part of the keys returns, beside its output, the log-sum-exp of its scores; `merge` makes one exact
result of two such parts, wherever each was computed (FlashDecoding; HGCA, HybridGen).
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid import _native
from hybrid.head.kv import q8_0
from hybrid.head.kv.base import DTYPES

HOST_DTYPES = {**DTYPES, "q8_0": torch.uint8}
"""The types of a cache in host memory, by their names in Placement, and what their rows are made of in torch."""


HUGE_PAGE = 2 << 20
"""Bytes below which huge pages gain nothing."""
_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.uint8: 3}
"""The types as `_native.attend` numbers them."""


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one sequence that attend to one layer's cache of that sequence."""

    start: int
    """Its first row of q."""
    n: int
    """Its rows of q."""
    position: int
    """The position of its first token; the others follow."""
    k: Tensor
    """[n_slots, n_kv_heads, head_dim_k] float16, bfloat16 or float32 on the CPU, or uint8 [n_slots, n_kv_heads,
    head_dim_k // 32 * 34] in q8_0. The last dimension is contiguous, the others may be strided."""
    v: Tensor
    """Likewise with head_dim_v; its type may be another."""
    first: int
    """The positions first … end - 1 are held, p in slot p % n_slots; none if end == first. What the other slots
    contain does not matter, and neither does whether the run's own tokens are among those held."""
    end: int


def attend_on_cpu(
    q: Tensor,
    runs: Sequence[Run],
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    n_threads: int = 1,
    instruction_set: str = "",
) -> tuple[Tensor, Tensor]:
    """Attention of q [n, n_heads, head_dim_k] float32 to the caches of `runs`, which cover its rows in order.

    A token at p sees the held keys at max(0, p - window + 1) … p, all up to p if window is 0 (llama.cpp's standard
    sliding window); scores are softcap * tanh(s / softcap) where softcap is not 0. Scores and sums are float32.

    Returns out [n, n_heads, head_dim_v] and lse [n, n_heads], both float32: lse is the log of the sum of exp(score).
    A token that sees no key gets out = 0 and lse = -inf.

    `sinks` [n_heads] float32 are scores of one more key that every token sees and whose value is zero; lse counts
    them. Who merges parts gives the sinks to exactly one of them, whichever it is (even one that holds no keys).

    The result does not depend on timing; on n_threads only by rounding. `instruction_set` is one of
    `_native.instruction_sets()`, empty for the best. Releases the interpreter lock; its threads sleep between calls.
    Raises ValueError for arguments that do not fit together.
    """
    n, n_heads, dim_k = _check_q(q)
    described = [_describe(run, dim_k) for run in runs]
    if not described:
        raise ValueError("There are no runs to attend with.")
    n_kv_heads, dim_v = runs[0].k.shape[1], _head_dim(runs[0].v)
    if any(run.k.shape[1] != n_kv_heads or _head_dim(run.v) != dim_v for run in runs):
        raise ValueError("The caches of the runs have different shapes.")
    if sinks is not None and (sinks.shape != (n_heads,) or not _is_float32_on_cpu(sinks) or not sinks.is_contiguous()):
        raise ValueError(f"Sinks are contiguous float32 [{n_heads}] on the CPU.")
    out, lse = torch.empty(n, n_heads, dim_v), torch.empty(n, n_heads)
    _native.attend(
        q.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        n,
        n_heads,
        n_kv_heads,
        dim_k,
        dim_v,
        described,
        scale,
        window,
        softcap,
        0 if sinks is None else sinks.data_ptr(),
        n_threads,
        instruction_set,
    )
    return out, lse


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """One attention out of two over disjoint keys: out [..., head_dim_v] and lse [...], on any one device.

    A part whose lse is -inf has seen nothing and does not count, whatever its out.
    """
    top = torch.maximum(lse_a, lse_b).clamp_min(torch.finfo(lse_a.dtype).min)
    weight_a, weight_b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = weight_a + weight_b
    share_a, share_b = (torch.where(total > 0, weight / total, 0).unsqueeze(-1) for weight in (weight_a, weight_b))
    out = torch.where(share_a > 0, share_a * out_a, 0) + torch.where(share_b > 0, share_b * out_b, 0)
    return out, top + torch.log(total)


def _is_float32_on_cpu(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu"


def _check_q(q: Tensor) -> tuple[int, int, int]:
    if q.dim() != 3 or not _is_float32_on_cpu(q) or not q.is_contiguous():
        raise ValueError(
            f"q is contiguous float32 [n, n_heads, head_dim] on the CPU; got {q.dtype} {list(q.shape)} on {q.device}."
        )
    n, n_heads, dim_k = q.shape
    return n, n_heads, dim_k


def _head_dim(rows: Tensor) -> int:
    width = rows.shape[-1]
    return width // q8_0.BLOCK_BYTES * q8_0.BLOCK if rows.dtype == torch.uint8 else width


def _describe(run: Run, dim_k: int) -> tuple[int, ...]:
    """The run as `_native.attend` takes it. ValueError for tensors it could not read safely."""
    k, v = run.k, run.v
    if k.shape[:2] != v.shape[:2] or _head_dim(k) != dim_k:
        raise ValueError(f"K {list(k.shape)} and V {list(v.shape)} do not fit a head dimension of {dim_k}.")
    return run.start, run.n, run.position, k.shape[0], run.first, run.end, *_memory(k), *_memory(v)


def _memory(rows: Tensor) -> tuple[int, int, int, int]:
    """Address, slot stride and head stride in bytes, type."""
    number = _NUMBERS.get(rows.dtype)
    if number is None or rows.dim() != 3 or rows.device.type != "cpu" or (rows.stride(2) != 1 and rows.shape[2] != 1):
        raise ValueError(
            f"K and V are [n_slots, n_kv_heads, head_dim] on the CPU with contiguous heads, of one of "
            f"{', '.join(map(str, _NUMBERS))}; got {rows.dtype} {list(rows.shape)} on {rows.device}, "
            f"strides {rows.stride()}."
        )
    if rows.dtype == torch.uint8 and rows.shape[2] % q8_0.BLOCK_BYTES:
        raise ValueError(f"q8_0 rows are whole blocks of {q8_0.BLOCK_BYTES} bytes; got {rows.shape[2]}.")
    size = rows.element_size()
    return rows.data_ptr(), rows.stride(0) * size, rows.stride(1) * size, number


def host_rows(
    n_slots: int, n_kv_heads: int, head_dim: int, kv_dtype: str, *, n_sequences: int | None = None, pinned: bool = False
) -> Tensor:
    """Zeroed rows [n_slots, n_kv_heads, width] for K or V, with n_sequences in front where it is given.

    Memory that is not pinned is in huge pages where the system has them: it reads faster so.
    `pinned` asks for page-locked memory and raises RuntimeError where there is none; the caller decides what then.
    """
    width = q8_0.row_bytes(head_dim) if kv_dtype == "q8_0" else head_dim
    shape = (n_slots, n_kv_heads, width) if n_sequences is None else (n_sequences, n_slots, n_kv_heads, width)
    dtype = HOST_DTYPES[kv_dtype]
    n_bytes = math.prod(shape) * dtype.itemsize
    if pinned or n_bytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, pin_memory=pinned)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, n_bytes, flags=flags)  # zeros; the tensor keeps it alive
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def encode(x: Tensor, kv_dtype: str) -> Tensor:
    """x [..., head_dim] as rows of a cache, on x's device."""
    return q8_0.quantize(x) if kv_dtype == "q8_0" else x.to(HOST_DTYPES[kv_dtype])


def decode(rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of a cache as values [..., head_dim] of `dtype`, on their device."""
    return q8_0.dequantize(rows, dtype) if rows.dtype == torch.uint8 else rows.to(dtype)
