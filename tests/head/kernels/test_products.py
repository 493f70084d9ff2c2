"""Quantised products and dequantised tiles against `gguf.dequantize`, for every type."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid.head import activation
from hybrid.head.activation import Nonlinearity
from hybrid.head.kernels.choice import Kernels
from hybrid.head.kernels.formats import FEW_TOKENS, FORMATS, Planes, Stack
from hybrid.model.ggml_types import type_name
from hybrid.model.spec import Activation
from tests.head.kernels.blocks import any_bytes, in_planes, numbers, quantised, width

KINDS = pytest.mark.parametrize("kind", sorted(FORMATS), ids=type_name)


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


@KINDS
@settings(max_examples=3, deadline=None)
@given(
    n_rows=st.integers(1, 6),
    n_blocks=st.integers(1, 3),
    tokens=st.integers(1, FEW_TOKENS),
    n_sm=st.sampled_from([1, 200]),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_product_is_that_of_the_dequantised_weights(
    kind: int, n_rows: int, n_blocks: int, tokens: int, n_sm: int, with_bias: bool, seed: int, device: torch.device
) -> None:
    """Whatever the shape, whole or split; beside float64 sums, within what float32 sums explain."""
    torch.manual_seed(seed)
    n_in = width(kind, n_blocks)
    raw = quantised(kind, n_rows, n_in, seed=seed)
    x, bias = torch.randn(tokens, n_in), torch.randn(n_rows) if with_bias else None
    planes = in_planes(raw, kind, n_in, device)
    kernels = Kernels(n_sm)
    got = kernels.matvec(planes, x.to(device), None if bias is None else bias.to(device))
    assert kernels.notes == []
    assert got is not None
    weights = numbers(raw, kind).double()
    want = x.double() @ weights.T + (0 if bias is None else bias.double())
    bound = x.double().abs() @ weights.abs().T + (0 if bias is None else bias.double().abs())
    assert got.shape == want.shape
    assert ((got.cpu().double() - want).abs() <= 2e-6 * bound + 1e-30).all()


@pytest.fixture
def gelu_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from llama.cpp's table of float16 numbers, which the CPU reads it from."""
    monkeypatch.setitem(activation.ACTIVATIONS, "gelu", partial(torch.nn.functional.gelu, approximate="tanh"))


@pytest.mark.usefixtures("gelu_itself")
@pytest.mark.parametrize("act", ["silu", "gelu", "swiglu_oai"])
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    half=st.integers(1, 6),
    tokens=st.integers(1, FEW_TOKENS),
    gated=st.booleans(),
    n_sm=st.sampled_from([1, 200]),
    with_bias=st.booleans(),
    size=st.sampled_from([1.0, 30.0]),
    seed=st.integers(0, 1000),
)
def test_an_activated_product_is_the_activation_of_the_product(
    act: Activation, half: int, tokens: int, gated: bool, n_sm: int, with_bias: bool, size: float, seed: int,
    device: torch.device,
) -> None:  # fmt: skip
    """Gate and up, or one matrix, and what becomes of them: in one launch, or after the splits have been added up."""
    torch.manual_seed(seed)
    n_in, then = 32 * 70, Nonlinearity(act, gated)  # three steps of units, so that columns can be split
    raw = quantised(8, 2 * half, n_in, seed=seed, size=n_in**-0.5)
    x, bias = torch.randn(tokens, n_in) * size, torch.randn(2 * half) if with_bias else None
    kernels = Kernels(n_sm)
    got = kernels.matvec(in_planes(raw, 8, n_in, device), x.to(device), None if bias is None else bias.to(device), then)
    assert kernels.notes == []
    assert got is not None
    product = x.double() @ numbers(raw, 8).double().T + (0 if bias is None else bias.double())
    want = then(product)
    assert got.shape == want.shape == (tokens, half if gated else 2 * half)
    assert torch.allclose(got.cpu().double(), want, rtol=1e-4, atol=1e-5 * size * size)


@pytest.mark.parametrize("act", ["silu", "gelu", "swiglu_oai"])
def test_activations_of_extreme_numbers_are_torch_s(act: Activation, device: torch.device) -> None:
    x = torch.tensor([-1e30, -1e4, -90.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 90.0, 1e4, 1e30]).view(-1, 1)
    raw = torch.zeros(1, 16 * 4, dtype=torch.uint8)
    raw.view(torch.float32)[0, 0] = 1.0
    for rows in x.split(FEW_TOKENS):
        padded = torch.zeros(len(rows), 16)
        padded[:, :1] = rows
        got = Kernels(1).matvec(in_planes(raw, 0, 16, device), padded.to(device), None, Nonlinearity(act, False))
        assert got is not None
        assert torch.allclose(got.cpu(), Nonlinearity(act, False)(rows), rtol=2e-3, atol=1e-6)


def test_a_part_of_a_matrix_is_multiplied_and_dequantised_where_it_lies(device: torch.device) -> None:
    raw = quantised(12, 11, 512)
    planes, x, kernels = in_planes(raw, 12, 512, device), torch.randn(2, 512), Kernels(1)
    assert sum(planes.part(at, n).nbytes for at, n in ((0, 4), (4, 7))) == planes.nbytes
    part, want = planes.part(4, 6).part(1, 5), numbers(raw, 12)[5:10]
    assert torch.equal(part.rows(0, 99), raw[5:10])
    got, out = kernels.matvec(part, x.to(device), None), poisoned(4, 512, dtype=torch.float32, device=device)
    assert got is not None
    assert torch.allclose(got.cpu(), x @ want.T, atol=1e-4)
    assert kernels.dequantize(part, 1, 5, out)
    assert torch.equal(out.cpu(), want[1:])


@pytest.mark.parametrize("n_sm", [1, 200])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("then", [None, Nonlinearity("silu", True)])
def test_each_row_is_multiplied_by_its_own_experts(
    n_sm: int, with_bias: bool, then: Nonlinearity | None, device: torch.device
) -> None:
    n_experts, n_rows, n_in = 3, 6, 32 * 70  # three steps of units, so that columns can be split
    raw = quantised(2, n_experts * n_rows, n_in, size=n_in**-0.5)
    data = torch.empty(n_experts, n_rows * raw.shape[1], dtype=torch.uint8, device=device)
    planes = [Planes(each, 2, (n_rows, n_in)) for each in data]
    for i, each in enumerate(planes):
        each.write(0, raw[i * n_rows : (i + 1) * n_rows].to(device))
    bias = torch.randn(n_experts, n_rows) if with_bias else None
    x, chosen = torch.randn(2, n_in), torch.tensor([2, 0, 2, 1])
    stack, kernels = Stack(planes[0], None if bias is None else bias.to(device)), Kernels(n_sm)
    got = kernels.expert_matvec(stack, x.to(device), chosen.to(device), then)
    assert kernels.notes == []
    assert got is not None
    weights = numbers(raw, 2).view(n_experts, n_rows, n_in).double()
    twice = x.double().repeat_interleave(2, 0)
    want = torch.einsum("ti,tri->tr", twice, weights[chosen]) + (0 if bias is None else bias[chosen])
    assert torch.allclose(got.cpu().double(), want if then is None else then(want), atol=1e-5)


@KINDS
def test_a_tile_is_the_float32_value_rounded_once(kind: int, device: torch.device) -> None:
    """Bit for bit, of any bytes; rows outside the tile are left alone."""
    n_in = width(kind, 2)
    raw = any_bytes(kind, 9, n_in, seed=kind)
    planes, kernels = in_planes(raw, kind, n_in, device), Kernels(2)
    for dtype in (torch.float32, torch.bfloat16):
        out = poisoned(9, n_in, dtype=dtype, device=device)
        assert kernels.dequantize(planes, 2, 8, out[2:8])
        assert out[:2].isnan().all()
        assert out[8:].isnan().all()
        got, want = out[2:8].cpu().float(), numbers(raw, kind)[2:8].to(dtype).float()
        assert ((got == want) | (got.isnan() & want.isnan())).all()
    assert kernels.notes == []


@pytest.mark.parametrize("size", [1e-7, 1e4])
def test_sums_far_outside_float16_s_range_are_right(size: float, device: torch.device) -> None:
    raw, x = quantised(8, 3, 96, size=size), torch.randn(2, 96) * 1e6
    got = Kernels(2).matvec(in_planes(raw, 8, 96, device), x.to(device), None)
    assert got is not None
    want = x.double() @ numbers(raw, 8).double().T
    assert torch.allclose(got.cpu().double(), want, rtol=1e-5, atol=1e-6 * float(want.abs().max()))


def test_infinite_scales_stay_infinite_and_in_their_row(device: torch.device) -> None:
    raw = quantised(8, 4, 64)
    raw[2, :2] = torch.tensor([0, 0x7C], dtype=torch.uint8)  # d = inf
    got = Kernels(2).matvec(in_planes(raw, 8, 64, device), torch.ones(1, 64, device=device), None)
    assert got is not None
    assert not got[0, 2].isfinite()
    assert got[0, [0, 1, 3]].isfinite().all()


def test_many_tokens_are_not_for_the_matvec(device: torch.device) -> None:
    raw = quantised(8, 4, 64)
    assert Kernels(2).matvec(in_planes(raw, 8, 64, device), torch.ones(FEW_TOKENS + 1, 64, device=device), None) is None
