"""Attention kernels against the blocked softmax in torch, and RoPE with the store against torch's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.head.attention import attend_blocks
from hybrid.head.kernels import attention
from hybrid.head.kernels.choice import Kernels
from hybrid.head.kv.rows import RowFormat
from hybrid.head.rope import Rope, Rotation
from hybrid.model.spec import LayerSpec, RopeSpec
from hybrid.schedule.placement import KVDtype

TOLERANCE = {"f32": 2e-6, "f16": 2e-3, "bf16": 2e-2, "q8_0": 2e-3}
"""Of the largest value: products are made in the stored type, as torch makes them."""


def heads(n_kv_heads: int, group: int, dims: tuple[int, int], window: int, softcap: float) -> LayerSpec:
    """As much of a layer as attention reads."""
    found = SimpleNamespace(
        n_heads=n_kv_heads * group,
        n_kv_heads=n_kv_heads,
        head_dim_k=dims[0],
        head_dim_v=dims[1],
        window=window,
        attn_scale=dims[0] ** -0.5,
        attn_softcap=softcap,
    )
    return cast(LayerSpec, found)


def rings(spec: LayerSpec, kv_dtype: KVDtype, capacity: int, end: int) -> tuple[torch.Tensor, ...]:
    """Rings whose sequence 1 holds the last `capacity` of `end` random tokens, and these as float32 numbers from
    position 0 on."""
    form = RowFormat(kv_dtype)
    k = torch.randn(end, spec.n_kv_heads, spec.head_dim_k)
    v = torch.randn(end, spec.n_kv_heads, spec.head_dim_v)
    stored = form.encode(k), form.encode(v)
    found = [torch.full((2, capacity, *rows.shape[1:]), 77, dtype=rows.dtype) for rows in stored]
    at = torch.arange(max(0, end - capacity), end)
    for ring, rows in zip(found, stored, strict=True):
        ring[1, at % capacity] = rows[at]
    return *found, form.decode(stored[0], torch.float32), form.decode(stored[1], torch.float32)


def place(p0: int, seq: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([p0, seq], dtype=torch.int32, device=device)


@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(1, 8),
    before=st.sampled_from([0, 5, 40, 300, 700]),
    shape=st.sampled_from([(1, 1, (32, 32)), (2, 3, (32, 64)), (2, 4, (96, 96)), (1, 8, (64, 64))]),
    window=st.sampled_from([0, 1, 20, 400]),
    softcap=st.sampled_from([0.0, 5.0]),
    with_sinks=st.booleans(),
    kv_dtype=st.sampled_from(["f32", "f16", "bf16", "q8_0"]),
    n_sm=st.sampled_from([1, 100]),
    longest=st.sampled_from([0, 5000]),
    small=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_attention_is_torch_s(
    n: int,
    before: int,
    shape: tuple[int, int, tuple[int, int]],
    window: int,
    softcap: float,
    with_sinks: bool,
    kv_dtype: KVDtype,
    n_sm: int,
    longest: int,
    small: bool,
    seed: int,
    device: torch.device,
) -> None:
    """Output and log-sum-exp, whatever the context, wrapped or not, in one split or many, launched for just these keys
    or for a longer context."""
    torch.manual_seed(seed)
    spec = heads(*shape, window, softcap)
    end = before + n
    capacity = end + 3 if not window else min(end + 3, window + n)
    ring_k, ring_v, k, v = rings(spec, kv_dtype, capacity, end)
    q, sinks = torch.randn(n, spec.n_heads, spec.head_dim_k), torch.randn(spec.n_heads) if with_sinks else None
    first = max(0, before - window + 1) if window else 0
    kernels = Kernels(n_sm, small)
    found = kernels.attend(
        spec, q.to(device), ring_k.to(device), ring_v.to(device), place(before, 1, device), 0,
        max(longest, end - first), None if sinks is None else sinks.to(device),
    )  # fmt: skip
    assert kernels.notes == []
    plain = kv_dtype == "f32"
    if (small and plain) or ((small or plain) and n * shape[1] > attention.MAX_ROWS_SMALL):
        assert found is None
        return
    assert found is not None
    want, want_lse = attend_blocks(
        q,
        before,
        [(first, end, k[first:], v[first:])],
        window=window,
        scale=spec.attn_scale,
        softcap=softcap,
        sinks=sinks,
    )
    out, lse = found[0].cpu(), found[1].cpu()
    assert (out - want).abs().max() <= TOLERANCE[kv_dtype] * max(1.0, float(want.abs().max()))
    assert (lse - want_lse).abs().max() <= 4 * TOLERANCE[kv_dtype]


def test_huge_scores_do_not_overflow(device: torch.device) -> None:
    spec = heads(1, 2, (32, 32), 0, 0.0)
    ring_k, ring_v, k, v = rings(spec, "f32", 600, 600)
    q = torch.full((1, 2, 32), 1e4)
    there = place(599, 1, device)
    found = Kernels(100).attend(spec, q.to(device), ring_k.to(device), ring_v.to(device), there, 0, 600, None)
    assert found is not None
    want, _ = attend_blocks(q, 599, [(0, 600, k, v)], window=0, scale=spec.attn_scale, softcap=0.0)
    assert torch.allclose(found[0].cpu(), want, atol=1e-5)


def test_keys_before_the_least_do_not_count(device: torch.device) -> None:
    """Those of a tiered cache that the CPU attends to; splits without a key weigh nothing."""
    spec = heads(1, 1, (32, 32), 0, 0.0)
    ring_k, ring_v, k, v = rings(spec, "f32", 700, 700)
    q, there = torch.randn(1, 1, 32), place(699, 1, device)
    found = Kernels(100).attend(spec, q.to(device), ring_k.to(device), ring_v.to(device), there, 696, 700, None)
    assert found is not None
    want, want_lse = attend_blocks(q, 699, [(696, 700, k[696:], v[696:])], window=0, scale=spec.attn_scale, softcap=0.0)
    assert torch.allclose(found[0].cpu(), want, atol=1e-5)
    assert torch.allclose(found[1].cpu(), want_lse, atol=1e-5)


def test_many_tokens_and_huge_heads_are_for_torch() -> None:
    q, k, there = torch.zeros(40, 8, 32), torch.zeros(1, 64, 1, 32), place(0, 0, torch.device("cpu"))
    assert Kernels(1).attend(heads(1, 8, (32, 32), 0, 0.0), q, k, k, there, 0, 40, None) is None
    q, k = torch.zeros(1, 1, 1024), torch.zeros(1, 1, 1, 1024)
    assert Kernels(1).attend(heads(1, 1, (1024, 1024), 0, 0.0), q, k, k, there, 0, 1, None) is None


# -- RoPE and the store ------------------------------------------------------------------------------------------------

ROPE = RopeSpec("norm", 32, 10000.0, 1.0)


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize(
    "spec",
    [ROPE, replace(ROPE, style="neox"), replace(ROPE, n_dims=20, style="neox", query_scale=0.3, n_ctx_orig=4), None],
    ids=["norm", "neox", "partial and scaled", "none"],
)
def test_rope_and_store_are_torch_s_bit_for_bit(spec: RopeSpec | None, kv_dtype: KVDtype, device: torch.device) -> None:
    torch.manual_seed(1)
    n, capacity, p0 = 3, 5, 8  # wraps: slots 3, 4 and 0
    rows = torch.randn(n, 3 * 32 + 2 * 32 + 2 * 64)  # of one product, whose parts they are
    q, k, v = (part.view(n, -1, dim) for part, dim in zip(rows.split([96, 64, 128], 1), (32, 32, 64), strict=True))
    k[0, 0], v[1, 1] = 0.0, 1e-9
    form = RowFormat(kv_dtype)
    rotation = None if spec is None else Rope(spec).rotation(np.arange(p0, p0 + n), torch.device("cpu"))
    want_q, want_k = (q, k) if rotation is None else rotation(q, k)
    want = form.encode(want_k), form.encode(v)
    given: Any = [torch.full((2, capacity, *rows.shape[1:]), 33, dtype=rows.dtype, device=device) for rows in want]
    moved = None if rotation is None else on(rotation, device)
    kernels = Kernels(1)
    got = kernels.turn_and_store(q.to(device), k.to(device), v.to(device), moved, *given, place(p0, 1, device))
    assert kernels.notes == []
    assert got is not None
    assert torch.equal(got.cpu(), want_q)
    for ring, rows in zip(given, want, strict=True):
        assert torch.equal(ring[1, [3, 4, 0]].cpu(), rows)
        assert (ring[0] == 33).all()
        assert (ring[1, [1, 2]] == 33).all()


def on(rotation: Rotation, device: torch.device) -> Rotation:
    scale = None if rotation.query_scale is None else rotation.query_scale.to(device)
    return Rotation(rotation.spec, rotation.cos.to(device), rotation.sin.to(device), scale)


def test_the_bytes_that_must_move() -> None:
    """Llama 3 8B at 8192 tokens: 2 x 8 heads x 128 x 2 bytes a token, and one query."""
    spec = attention.Heads(32, 8, 128, 128, torch.float16, False, False)
    assert attention.moved_bytes(spec, 1, 8192) == 8192 * 4096 + 4 * 32 * 257
    packed = replace(spec, dtype=torch.uint8)
    assert attention.moved_bytes(packed, 1, 8192) == 8192 * 8 * 8 * 34 + 4 * 32 * 257
