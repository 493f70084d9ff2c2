"""The quantised linear: tile by tile on quantised bytes equals one product with expanded weights."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from hybrid.head.dequant import SUPPORTED, dequantize
from hybrid.head.device import Compute
from hybrid.head.linear import QuantLinear, Workspace
from hybrid.model.ggml_types import type_name
from tests.tiny import quantize

CPU = torch.device("cpu")
KEEP = Compute(CPU, torch.float32, expand=False, tile_values=512 * 7)  # 7 rows a tile: 30 rows leave a rest


def weights(kind: int, rows: int = 30, n_in: int = 512) -> torch.Tensor:
    values = np.random.default_rng(kind).standard_normal((rows, n_in)).astype(np.float32)
    return torch.from_numpy(quantize(values, gguf.GGMLQuantizationType(kind)).view(np.uint8))


@pytest.mark.parametrize("kind", sorted(SUPPORTED), ids=type_name)
@pytest.mark.parametrize("with_bias", [False, True])
def test_kept_quantised_equals_expanded(kind: int, with_bias: bool) -> None:
    raw, bias = weights(kind), torch.randn(30) if with_bias else None
    x = torch.randn(5, 512)
    kept = QuantLinear(raw, kind, (30, 512), bias, Workspace(KEEP))
    expanded = QuantLinear(dequantize(raw, kind), None, (30, 512), bias, Workspace(KEEP))
    want = expanded(x)
    assert (kept(x) - want).abs().max() <= 2e-6 * want.abs().max()  # products of other sizes add in another order
    assert kept.nbytes == raw.nbytes + (120 if with_bias else 0)
    assert expanded.nbytes == 30 * 512 * 4 + (120 if with_bias else 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_products_take_and_give_float32(dtype: torch.dtype) -> None:
    compute = Compute(CPU, dtype, expand=False, tile_values=512 * 7)
    raw, bias, x = weights(12), torch.randn(30), torch.randn(5, 512)
    y = QuantLinear(raw, 12, (30, 512), bias, Workspace(compute))(x)
    want = x.to(dtype).float() @ dequantize(raw, 12).to(dtype).float().T + bias
    assert y.dtype == torch.float32
    assert (y - want).abs().max() <= want.abs().max() * torch.finfo(dtype).eps


def test_weights_stored_in_the_compute_dtype_are_used_as_they_are() -> None:
    compute = Compute(CPU, torch.bfloat16, expand=False, tile_values=512)
    work, raw = Workspace(compute), weights(30)
    linear = QuantLinear(raw, 30, (30, 512), None, work)
    linear(torch.randn(2, 512))
    assert linear.weight.data_ptr() == raw.data_ptr()
    assert work.nbytes == 0


def test_all_linears_share_one_workspace_as_large_as_the_largest_tile() -> None:
    work = Workspace(KEEP)
    for kind in (12, 8, 14):
        QuantLinear(weights(kind), kind, (30, 512), None, work)(torch.randn(1, 512))
    assert work.nbytes == 7 * 512 * 4
