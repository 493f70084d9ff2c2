"""Rotating queries and keys, and storing keys and values in the cache's ring, in one launch."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid.head.kernels.attention import Heads
from hybrid.head.kernels.variant import TRITON_TYPES, Variant
from hybrid.head.rope import Rotation


@triton.jit
def _turned(x, cos, sin, d, DIM: tl.constexpr, TURNED: tl.constexpr, NEOX: tl.constexpr):
    """Row x of DIM values, the first TURNED of them rotated; `cos` and `sin` [TURNED / 2] are the token's."""
    HALF: tl.constexpr = TURNED // 2
    value = tl.load(x + d, mask=d < DIM, other=0.0)
    turns = d < TURNED
    if NEOX:
        second = d >= HALF
        other, angle = tl.where(second, d - HALF, d + HALF), tl.where(second, d - HALF, d)
    else:
        second = d % 2 == 1
        other, angle = tl.where(second, d - 1, d + 1), d // 2
    partner = tl.load(x + other, mask=turns, other=0.0)
    c = tl.load(cos + angle, mask=turns, other=1.0)
    s = tl.load(sin + angle, mask=turns, other=0.0)
    return tl.where(turns, tl.where(second, partner * s + value * c, value * c - partner * s), value)


@triton.jit
def _store(row, x, d, DIM: tl.constexpr, PAD: tl.constexpr, PACKED: tl.constexpr):
    """x [PAD] as a row of a cache: numbers of the row's type, or q8_0 blocks as ggml makes them."""
    if PACKED:
        blocks = tl.reshape(x, [PAD // 32, 32])
        scale = tl.div_rn(tl.max(tl.abs(blocks), 1), 127.0)
        inverse = tl.where(scale == 0.0, 0.0, tl.div_rn(1.0, tl.where(scale == 0.0, 1.0, scale)))
        scaled = blocks * inverse[:, None]
        size = tl.abs(scaled)
        whole = tl.floor(size)
        rounded = whole + tl.floor(2.0 * (size - whole))  # half away from zero
        value = tl.where(scaled < 0.0, -rounded, rounded).to(tl.int8)
        block, lane = tl.arange(0, PAD // 32), tl.arange(0, 32)
        real = block < DIM // 32
        to = row + block[:, None] * 34 + 2 + lane[None, :]
        tl.store(to, value.to(tl.uint8, bitcast=True), mask=real[:, None])
        tl.store((row + block * 34).to(tl.pointer_type(tl.float16)), scale.to(tl.float16), mask=real)
    else:
        tl.store(row + d, x.to(row.dtype.element_ty), mask=d < DIM)


@triton.jit(do_not_specialize=["where", "capacity"])
def turn_and_store_kernel(
    q, k, v, cos, sin, q_scale, turned, ring_k, ring_v, where, capacity, q_step, k_step, v_step,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr, PAD_K: tl.constexpr,
    PAD_V: tl.constexpr, TURNED: tl.constexpr, NEOX: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, query heads + KV heads + KV heads). `where` is the first token's position, and the sequence; steps
    are from one token to the next."""
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(where + 1).to(tl.int64) * capacity + (tl.load(where) + token) % capacity
    cos += token * (TURNED // 2)
    sin += token * (TURNED // 2)
    if head < HEADS:
        d = tl.arange(0, PAD_K)
        x = _turned(q + token * q_step + head * DIM_K, cos, sin, d, DIM_K, TURNED, NEOX)
        if SCALED:
            x *= tl.load(q_scale + token)
        tl.store(turned + (token * HEADS + head) * DIM_K + d, x, mask=d < DIM_K)
    elif head < HEADS + KV_HEADS:
        d = tl.arange(0, PAD_K)
        kv_head = head - HEADS
        x = _turned(k + token * k_step + kv_head * DIM_K, cos, sin, d, DIM_K, TURNED, NEOX)
        width: tl.constexpr = DIM_K // 32 * 34 if PACKED else DIM_K
        _store(ring_k + (slot * KV_HEADS + kv_head) * width, x, d, DIM_K, PAD_K, PACKED)
    else:
        d = tl.arange(0, PAD_V)
        kv_head = head - HEADS - KV_HEADS
        x = tl.load(v + token * v_step + kv_head * DIM_V + d, mask=d < DIM_V, other=0.0)
        wide: tl.constexpr = DIM_V // 32 * 34 if PACKED else DIM_V
        _store(ring_v + (slot * KV_HEADS + kv_head) * wide, x, d, DIM_V, PAD_V, PACKED)


@cache
def variant(heads: Heads, turned: int, neox: bool, scaled: bool) -> Variant:
    """For these heads, of whose queries and keys the first `turned` values are rotated; `scaled`: queries are
    multiplied by a number a token."""
    pads = [max(32, int(triton.next_power_of_2(dim))) for dim in (heads.dim_k, heads.dim_v)]
    constants = {
        "HEADS": heads.n_heads, "KV_HEADS": heads.n_kv_heads, "DIM_K": heads.dim_k, "DIM_V": heads.dim_v,
        "PAD_K": pads[0], "PAD_V": pads[1], "TURNED": turned, "NEOX": neox, "SCALED": scaled,
        "PACKED": heads.dtype == torch.uint8,
    }  # fmt: skip
    held = "*" + TRITON_TYPES[heads.dtype]
    types = dict.fromkeys(("q", "k", "v", "cos", "sin", "q_scale", "turned"), "*fp32")
    types |= {"ring_k": held, "ring_v": held, "where": "*i32"}
    types |= dict.fromkeys(("capacity", "q_step", "k_step", "v_step"), "i32")
    name = f"rope {'neox' if neox else 'norm'} {heads.dim_k} {TRITON_TYPES[heads.dtype]}"
    options = {"num_warps": 1, "enable_fp_fusion": False}  # as torch computes it, product by product
    aligned = tuple(name for name in types if name not in ("where", "capacity"))
    return Variant(name, turn_and_store_kernel, constants, types, aligned, options)


def turn_and_store(
    q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, ring_k: Tensor, ring_v: Tensor, where: Tensor
) -> Tensor:
    """Turn q [n, n_heads, dim_k] and k [n, n_kv_heads, dim_k] and store k and v [n, n_kv_heads, dim_v], all float32,
    each token contiguous, at positions p0, p0 + 1, … of a sequence in the rings [n_sequences, capacity, n_kv_heads, …].
    `where` [2] int32 holds p0 and the sequence, on the device. Returns the turned q."""
    n, n_heads, dim_k = q.shape
    heads = Heads(n_heads, k.shape[1], dim_k, v.shape[2], ring_k.dtype, False, False)
    turned = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    cos = sin = scale = q  # what is not read
    n_dims, neox = 0, False
    if rotation is not None:
        cos, sin, n_dims = rotation.cos.contiguous(), rotation.sin.contiguous(), rotation.spec.n_dims
        neox = rotation.spec.style == "neox"
        scale = q if rotation.query_scale is None else rotation.query_scale
    form = variant(heads, n_dims, neox, rotation is not None and rotation.query_scale is not None)
    grid = n, n_heads + 2 * heads.n_kv_heads
    steps = q.stride(0), k.stride(0), v.stride(0)
    form.launch(grid, q, k, v, cos, sin, scale, turned, ring_k, ring_v, where, ring_k.shape[1], *steps)
    return turned


def moved_bytes(heads: Heads, n: int) -> int:
    """What `turn_and_store` must move once: q twice, k and v as they come and as they are stored."""
    stored = 34 / 32 if heads.dtype == torch.uint8 else heads.dtype.itemsize
    kv = heads.n_kv_heads * (heads.dim_k + heads.dim_v)
    return int(n * (8 * heads.n_heads * heads.dim_k + kv * (4 + stored)))
