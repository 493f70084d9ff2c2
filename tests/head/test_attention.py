"""Attention against the definition in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.head import attention
from hybrid.head.attention import Keys, attend


def definition(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, p0: int, window: int, scale: float, softcap: float
) -> np.ndarray:
    """Token by token: the softmax of the scores of what it sees, times the values."""
    n, n_heads, _ = q.shape
    group = n_heads // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))  # [n_keys, n_heads, head_dim]
    out = np.zeros((n, n_heads, v.shape[2]))
    for i in range(n):
        p = p0 + i
        lo = max(0, p - window + 1) if window else 0
        scores = scale * np.einsum("khd,hd->kh", k[lo : p + 1], q[i])
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max(0))
        out[i] = np.einsum("kh,khd->hd", weights / weights.sum(0), v[lo : p + 1])
    return out


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 9),
    p0=st.integers(0, 20),
    n_kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    dims=st.sampled_from([(8, 8), (8, 4)]),
    window=st.integers(0, 12),
    softcap=st.sampled_from([0.0, 2.0]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    block=st.sampled_from([1, 3, 1000]),
    rows=st.sampled_from([2, 128]),
    seed=st.integers(0, 1000),
)
def test_attention_is_its_definition(
    n: int,
    p0: int,
    n_kv_heads: int,
    group: int,
    dims: tuple[int, int],
    window: int,
    softcap: float,
    dtype: torch.dtype,
    block: int,
    rows: int,
    seed: int,
) -> None:
    """Any window, cap, grouping and head size; keys read at once or in blocks, queries at once or in rows."""
    torch.manual_seed(seed)
    q = torch.randn(n, n_kv_heads * group, dims[0])
    k = torch.randn(p0 + n, n_kv_heads, dims[0]).to(dtype)
    v = torch.randn(p0 + n, n_kv_heads, dims[1]).to(dtype)
    reads: list[tuple[int, int]] = []

    def read(lo: int, hi: int, as_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        reads.append((lo, hi))
        return k[lo:hi].to(as_dtype), v[lo:hi].to(as_dtype)

    n_values = n_kv_heads * sum(dims)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "CONVERT_BYTES", 4 * n_values * block)
        patch.setattr(attention, "ROWS", rows)
        got = attend(q, p0, Keys(read, dtype, n_values), window=window, scale=0.3, softcap=softcap)
    want = definition(q.numpy(), k.float().numpy(), v.float().numpy(), p0, window, 0.3, softcap)
    assert got.shape == want.shape
    assert got.dtype == torch.float32
    assert np.abs(got.numpy() - want).max() < 1e-5
    first = max(0, p0 - window + 1) if window else 0
    assert min(lo for lo, _ in reads) == first  # what no query sees is not even read
    if dtype != torch.float32 or softcap:
        assert max(hi - lo for lo, hi in reads) <= max(block, 1)


def test_a_huge_score_does_not_overflow_in_blocks() -> None:
    q, k, v = torch.full((1, 1, 4), 100.0), torch.randn(64, 1, 4) * 100, torch.randn(64, 1, 4)
    keys = Keys(lambda lo, hi, dtype: (k[lo:hi].to(dtype), v[lo:hi].to(dtype)), torch.float16, 2 << 20)
    got = attend(q, 63, keys, window=0, scale=1.0, softcap=0.0)
    want = definition(q.numpy(), k.numpy(), v.numpy(), 63, 0, 1.0, 0.0)
    assert np.abs(got.numpy() - want).max() < 1e-5
