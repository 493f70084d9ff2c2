"""Dequantisation in torch against gguf's own."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.errors import UnsupportedError
from hybrid.head.dequant import SUPPORTED, dequantize, dequantize_on_host
from hybrid.model.ggml_types import GGML_TYPES, type_name
from tests.tiny import quantize

PROMISED = {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "IQ4_XS", "MXFP4"}
PROMISED |= {f"Q{bits}_K" for bits in range(2, 7)}
OTHERS = [16, 17, 18, 21, 22, 34, 35]
"""IQ2_XXS, IQ2_XS, IQ3_XXS, IQ3_S, IQ2_S, TQ1_0, TQ2_0."""


def reference(raw: np.ndarray, kind: int) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.dequantize(raw, gguf.GGMLQuantizationType(kind))


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype == np.float32
    same = (got.view(np.int32) == want.view(np.int32)) | (np.isnan(got) & np.isnan(want))
    assert same.all()


def test_every_promised_type_is_dequantised_on_the_device() -> None:
    assert {type_name(kind) for kind in SUPPORTED} == PROMISED


@pytest.mark.parametrize("kind", sorted(SUPPORTED), ids=type_name)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_bytes_give_gguf_s_float32_bit_for_bit(kind: int, data: st.DataObject) -> None:
    """Whatever the bytes: scales may be NaN, infinite, zero or denormal."""
    rows, blocks = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    n_bytes = rows * blocks * GGML_TYPES[kind].n_bytes
    if data.draw(st.booleans()):
        content = data.draw(st.binary(min_size=n_bytes, max_size=n_bytes))
    else:
        content = np.random.default_rng(data.draw(st.integers(0, 2**32))).bytes(n_bytes)
    raw = np.frombuffer(content, np.uint8).reshape(rows, -1).copy()
    assert_same_bits(dequantize(torch.from_numpy(raw), kind).numpy(), reference(raw, kind))


@pytest.mark.parametrize("kind", sorted(SUPPORTED - {1, 30}), ids=type_name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_the_float32_value_rounded_once(kind: int, dtype: torch.dtype) -> None:
    values = np.random.default_rng(kind).standard_normal((4, 512)).astype(np.float32)
    raw = quantize(values, gguf.GGMLQuantizationType(kind)).view(np.uint8)
    want = torch.from_numpy(reference(raw, kind).copy()).to(dtype)
    assert torch.equal(dequantize(torch.from_numpy(raw), kind, dtype), want)


@pytest.mark.parametrize("kind", OTHERS, ids=type_name)
def test_other_types_are_dequantised_on_the_host_by_gguf(kind: int) -> None:
    raw = np.random.default_rng(kind).integers(0, 256, (2, 3 * GGML_TYPES[kind].n_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        assert_same_bits(dequantize_on_host(torch.from_numpy(raw), kind).numpy(), reference(raw, kind))
    with pytest.raises(UnsupportedError, match=type_name(kind)):
        dequantize(torch.from_numpy(raw), kind)
