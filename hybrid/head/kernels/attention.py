"""Attention of a few new tokens to a long context: the context is split among programs (flash-decoding: Dao et al.,
"Flash-Decoding for long-context inference", 2023), whose partial results a second kernel merges by their log-sum-exps.

The query heads that share a KV head, of all tokens, are the rows of one program's matrix products, so that every key
and value is read once. Keys and values come straight from the cache's ring, whatever they are stored as.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid.head.kernels.variant import TRITON_TYPES, Variant
from hybrid.model.spec import LayerSpec

MAX_ROWS, MAX_ROWS_SMALL = 64, 16
"""Rows of scores in a program: tokens x query heads that share a KV head. The smaller number is for GPUs on which
Triton's products of tiles hold both factors in registers: those without tensor cores that it knows."""
MAX_DIM, MAX_DIM_SMALL = 512, 256
"""Values of a head's row."""
TILE_VALUES = 8192
"""Values of K, or of V, that a program holds at a time."""
LEAST_KEYS = 256
"""Keys of a split, at least: fewer are not worth a program."""
PROGRAMS_A_SM = 2
MERGED = 16
"""Splits that the merging kernel reads at a time."""


@triton.jit
def _rows(plane, slot, d, head, n_heads, DIM: tl.constexpr, PACKED: tl.constexpr, mask):
    """Values d [1, D] of the rows in `slot` [K, 1] of a KV head, as stored, or float16 out of q8_0 blocks."""
    if PACKED:
        row = plane + (slot * n_heads + head) * (DIM // 32 * 34)
        scale = tl.load((row + d // 32 * 34).to(tl.pointer_type(tl.float16)), mask=mask, other=0.0)
        q = tl.load(row + d // 32 * 34 + 2 + d % 32, mask=mask, other=0).to(tl.int8, bitcast=True)
        return (q.to(tl.float32) * scale.to(tl.float32)).to(tl.float16)
    else:  # noqa: RET505 - Triton would compile what follows a constant condition
        return tl.load(plane + (slot * n_heads + head) * DIM + d, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["where", "n_tokens", "least", "capacity", "window", "scale", "softcap"])
def attend_kernel(
    q, k, v, sinks, out, lse, where, n_tokens, least, capacity, window, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr, PAD_K: tl.constexpr,
    PAD_V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PACKED: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, LEAST_KEYS: tl.constexpr,
):  # fmt: skip
    """out [split, token, head, DIM_V], lse [split, token, head] of the split's keys. Grid: (KV heads, splits).

    `where` is the first token's position, and the sequence; keys before `least` do not count."""
    n_kv_heads: tl.constexpr = HEADS // GROUP
    kv_head, split = tl.program_id(0), tl.program_id(1)
    r = tl.arange(0, ROWS)
    token, head = r // GROUP, kv_head * GROUP + r % GROUP
    real = token < n_tokens
    dk, dv = tl.arange(0, PAD_K)[None, :], tl.arange(0, PAD_V)[None, :]
    at_q = (token * HEADS + head)[:, None] * DIM_K + dk
    queries = tl.load(q + at_q, mask=real[:, None] & (dk < DIM_K), other=0.0)
    queries = queries.to(tl.float16 if PACKED else k.dtype.element_ty)
    p0 = tl.load(where)
    rows = tl.load(where + 1).to(tl.int64) * capacity
    here = (p0 + token)[:, None]
    end = p0 + n_tokens
    first = tl.maximum(least, tl.where(window == 0, 0, p0 - window + 1))
    share = tl.cdiv(tl.cdiv(end - first, tl.num_programs(1)), LEAST_KEYS) * LEAST_KEYS
    start = first + split * share
    stop = tl.minimum(start + share, end)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, PAD_V], tl.float32)
    for at in range(start, stop, KEYS):
        key = at + tl.arange(0, KEYS)
        slot = (rows + key % capacity)[:, None]
        inside = (key < stop)[:, None]
        keys = _rows(k, slot, dk, kv_head, n_kv_heads, DIM_K, PACKED, inside & (dk < DIM_K))
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * (scores / softcap)) + 1.0))  # tanh
        seen = (key[None, :] <= here) & (key[None, :] < stop) & ((window == 0) | (key[None, :] > here - window))
        scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(best, tl.max(scores, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        shares = tl.exp(scores - base[:, None])
        shrink = tl.exp(best - base)
        weight = weight * shrink + tl.sum(shares, 1)
        values = _rows(v, slot, dv, kv_head, n_kv_heads, DIM_V, PACKED, inside & (dv < DIM_V))
        total = total * shrink[:, None] + tl.dot(shares.to(values.dtype), values, input_precision="ieee")
        best = top
    if SINKS:
        sink = tl.load(sinks + head, mask=real, other=0.0)
        top = tl.maximum(best, sink)
        shrink = tl.exp(best - top)
        weight = weight * shrink + tl.exp(sink - top)
        total *= shrink[:, None]
        best = top
    row = (split * n_tokens + token) * HEADS + head
    result = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
    tl.store(out + row[:, None] * DIM_V + dv, result, mask=real[:, None] & (dv < DIM_V))
    tl.store(lse + row, best + tl.log(weight), mask=real)


@triton.jit(do_not_specialize=["n_rows", "n_splits"])
def merge_kernel(
    parts, part_lse, sinks, out, lse, n_rows, n_splits,
    HEADS: tl.constexpr, DIM_V: tl.constexpr, PAD_V: tl.constexpr, MERGED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One attention out of those of all splits. Grid: (tokens x heads,)."""
    row = tl.program_id(0)
    d = tl.arange(0, PAD_V)
    best = tl.full([], float("-inf"), tl.float32)
    weight = tl.zeros([], tl.float32)
    if SINKS:
        best = tl.load(sinks + row % HEADS)
        weight += 1.0
    total = tl.zeros([PAD_V], tl.float32)
    for start in range(0, n_splits, MERGED):
        split = start + tl.arange(0, MERGED)
        found = tl.load(part_lse + split * n_rows + row, mask=split < n_splits, other=float("-inf"))
        at = (split * n_rows + row)[:, None] * DIM_V + d[None]
        part = tl.load(parts + at, mask=(split < n_splits)[:, None] & (d < DIM_V)[None], other=0.0)
        top = tl.maximum(best, tl.max(found, 0))
        base = tl.where(top == float("-inf"), 0.0, top)
        shares, shrink = tl.exp(found - base), tl.exp(best - base)
        weight = weight * shrink + tl.sum(shares, 0)
        total = total * shrink + tl.sum(shares[:, None] * part, 0)
        best = top
    tl.store(out + row * DIM_V + d, total / tl.where(weight == 0.0, 1.0, weight), mask=d < DIM_V)
    tl.store(lse + row, best + tl.log(weight))


@dataclass(frozen=True)
class Heads:
    """What attention kernels are compiled for."""

    n_heads: int
    n_kv_heads: int
    dim_k: int
    dim_v: int
    dtype: torch.dtype
    """Of the stored rows: float32, float16, bfloat16, or uint8 for q8_0 blocks."""
    softcap: bool
    sinks: bool

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.n_heads // self.n_kv_heads


@cache
def attend_variant(heads: Heads, n_tokens: int, sinks: bool, small: bool) -> Variant:
    """For so many tokens; `sinks`: whether there is one split only, which then counts them itself; `small`: see
    `MAX_ROWS`."""
    pad_k, pad_v = _padded(heads.dim_k), _padded(heads.dim_v)
    rows = max(16, triton.next_power_of_2(n_tokens * heads.group))
    tile = TILE_VALUES // 2 if heads.dtype == torch.uint8 else TILE_VALUES  # blocks take registers on their way
    keys = 16 if small else max(16, min(tile // 128, tile // max(pad_k, pad_v)))
    constants = {
        "HEADS": heads.n_heads, "GROUP": heads.group, "DIM_K": heads.dim_k, "DIM_V": heads.dim_v, "PAD_K": pad_k,
        "PAD_V": pad_v, "ROWS": rows, "KEYS": keys,
        "PACKED": heads.dtype == torch.uint8, "SOFTCAP": heads.softcap, "SINKS": sinks, "LEAST_KEYS": LEAST_KEYS,
    }  # fmt: skip
    held = "*" + TRITON_TYPES[heads.dtype]
    types = {"q": "*fp32", "k": held, "v": held} | dict.fromkeys(("sinks", "out", "lse"), "*fp32")
    types |= {"where": "*i32"} | dict.fromkeys(("n_tokens", "least", "capacity", "window"), "i32")
    types |= {"scale": "fp32", "softcap": "fp32"}
    name = f"attend {heads.dim_k} {TRITON_TYPES[heads.dtype]} x{rows}"
    options = {"num_warps": 4, "num_stages": 2}
    aligned = ("q", "k", "v", "sinks", "out", "lse")
    registers = 255 if heads.dtype == torch.uint8 and (small or rows >= 64) else 0  # else ptxas spills some
    return Variant(name, attend_kernel, constants, types, aligned, options, registers)


@cache
def merge_variant(heads: Heads) -> Variant:
    """For these heads."""
    constants = {
        "HEADS": heads.n_heads, "DIM_V": heads.dim_v, "PAD_V": _padded(heads.dim_v), "MERGED": MERGED,
        "SINKS": heads.sinks,
    }  # fmt: skip
    pointers = ("parts", "part_lse", "sinks", "out", "lse")
    types = dict.fromkeys(pointers, "*fp32") | dict.fromkeys(("n_rows", "n_splits"), "i32")
    return Variant(f"merge {heads.dim_v}", merge_kernel, constants, types, pointers, {"num_warps": 4})


def is_small(heads: Heads) -> bool:
    """Whether tensor cores are of no use: they round float32 off. (Without them AMD's compiler spills on float32, so
    there it is torch's.)"""
    return heads.dtype == torch.float32


def takes(heads: Heads, n_tokens: int, small: bool) -> bool:
    """Whether so many tokens are few enough, and the heads not too wide."""
    rows, dim = (MAX_ROWS_SMALL, MAX_DIM_SMALL) if small else (MAX_ROWS, MAX_DIM)
    return n_tokens * heads.group <= rows and max(heads.dim_k, heads.dim_v) <= dim


def splits_of(n_keys: int, n_kv_heads: int, n_sm: int) -> int:
    """Programs that share the context of one KV head."""
    return max(1, min(-(-n_keys // LEAST_KEYS), -(-PROGRAMS_A_SM * n_sm // n_kv_heads)))


def attend(
    spec: LayerSpec, q: Tensor, k: Tensor, v: Tensor, where: Tensor, least: int, most_keys: int, sinks: Tensor | None,
    n_sm: int, small: bool,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """Attention of q [n, n_heads, head_dim_k] float32 at positions p0, p0 + 1, … of a sequence to the keys that they
    see, from position `least` on, in the rings k and v [n_sequences, capacity, n_kv_heads, …]: out [n, n_heads,
    head_dim_v] and lse [n, n_heads], float32, as `hybrid.head.attention.attend_blocks` defines them.

    `where` [2] int32 holds p0 and the sequence, on the device: what is launched is the same wherever the tokens are, if
    they see `most_keys` at most. None where the tokens are too many, or a head too wide."""
    n, q = q.shape[0], q.contiguous()
    heads = Heads(
        spec.n_heads, spec.n_kv_heads, spec.head_dim_k, spec.head_dim_v, k.dtype, spec.attn_softcap != 0.0,
        sinks is not None,
    )  # fmt: skip
    if small and is_small(heads):
        return None
    small = small or is_small(heads)
    if not takes(heads, n, small):
        return None
    splits = splits_of(most_keys, heads.n_kv_heads, n_sm)
    parts = torch.empty(splits, n, heads.n_heads, heads.dim_v, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(splits, n, heads.n_heads, dtype=torch.float32, device=q.device)
    given = q if sinks is None else sinks
    args = q, k, v, given, parts, part_lse, where, n, least, k.shape[1], spec.window
    scalars = spec.attn_scale, spec.attn_softcap
    attend_variant(heads, n, heads.sinks and splits == 1, small).launch((heads.n_kv_heads, splits), *args, *scalars)
    if splits == 1:
        return parts[0], part_lse[0]
    out, lse = torch.empty_like(parts[0]), torch.empty_like(part_lse[0])
    rows = n * heads.n_heads
    merge_variant(heads).launch((rows,), parts, part_lse, given, out, lse, rows, splits)
    return out, lse


def moved_bytes(heads: Heads, n: int, n_keys: int) -> int:
    """What `attend` must move once: keys, values, queries and the result."""
    if heads.dtype == torch.uint8:
        row = (heads.dim_k + heads.dim_v) // 32 * 34
    else:
        row = (heads.dim_k + heads.dim_v) * heads.dtype.itemsize
    return n_keys * heads.n_kv_heads * row + 4 * n * heads.n_heads * (heads.dim_k + heads.dim_v + 1)


def _padded(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))
