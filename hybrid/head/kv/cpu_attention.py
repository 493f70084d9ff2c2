"""Attention on the CPU over a KV cache in host memory, and the merge of two partial results.

What attends to a part of the keys returns, beside its output, the log-sum-exp of its scores; `merge` makes one exact
result of two such parts, wherever each was computed (FlashDecoding; HGCA, HybridGen).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid.head.kv import q8_0
from hybrid.head.kv.base import DTYPES

HOST_DTYPES = {**DTYPES, "q8_0": torch.uint8}
"""The types of a cache in host memory, by their names in Placement, and what their rows are made of in torch."""


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
) -> tuple[Tensor, Tensor]:
    """Attention of q [n, n_heads, head_dim_k] float32 to the caches of `runs`, which cover its rows in order.

    A token at p sees the held keys at max(0, p - window + 1) … p, all up to p if window is 0 (llama.cpp's standard
    sliding window); scores are softcap * tanh(s / softcap) where softcap is not 0. Scores and sums are float32.

    Returns out [n, n_heads, head_dim_v] and lse [n, n_heads], both float32: lse is the log of the sum of exp(score).
    A token that sees no key gets out = 0 and lse = -inf.

    `sinks` [n_heads] float32 are scores of one more key that every token sees and whose value is zero; lse counts
    them. Who merges parts gives the sinks to exactly one of them, whichever it is (even one that holds no keys).

    The result does not depend on timing; on n_threads only by rounding. Raises ValueError for arguments that do not
    fit together.
    """
    n, n_heads, _ = q.shape
    dim_v = decode(runs[0].v[:0]).shape[-1] if runs else 0
    out = torch.zeros(n, n_heads, dim_v)
    lse = torch.full((n, n_heads), -torch.inf)
    for run in runs:
        for i in range(run.n):
            p = run.position + i
            lo = max(run.first, p - window + 1) if window else run.first
            hi = min(run.end, p + 1)
            if lo < hi:
                slots = torch.arange(lo, hi) % run.k.shape[0]
                k, v = decode(run.k[slots]), decode(run.v[slots])
                k, v = (x.repeat_interleave(n_heads // x.shape[1], 1) for x in (k, v))
                scores = torch.einsum("hd,thd->ht", q[run.start + i], k) * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                lse[run.start + i] = torch.logsumexp(scores, 1)
                out[run.start + i] = torch.einsum("ht,thd->hd", torch.softmax(scores, 1), v)
    if sinks is not None:
        return merge(out, lse, torch.zeros_like(out), sinks.expand(n, n_heads))
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


def host_rows(
    n_slots: int, n_kv_heads: int, head_dim: int, kv_dtype: str, *, n_sequences: int | None = None, pinned: bool = False
) -> Tensor:
    """Zeroed rows [n_slots, n_kv_heads, width] for K or V, with n_sequences in front where it is given.

    `pinned` asks for page-locked memory and raises RuntimeError where there is none; the caller decides what then.
    """
    width = q8_0.row_bytes(head_dim) if kv_dtype == "q8_0" else head_dim
    shape = (n_slots, n_kv_heads, width) if n_sequences is None else (n_sequences, n_slots, n_kv_heads, width)
    return torch.zeros(shape, dtype=HOST_DTYPES[kv_dtype], pin_memory=pinned)


def encode(x: Tensor, kv_dtype: str) -> Tensor:
    """x [..., head_dim] as rows of a cache, on x's device."""
    return q8_0.quantize(x) if kv_dtype == "q8_0" else x.to(HOST_DTYPES[kv_dtype])


def decode(rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of a cache as values [..., head_dim] of `dtype`, on their device."""
    return q8_0.dequantize(rows, dtype) if rows.dtype == torch.uint8 else rows.to(dtype)
