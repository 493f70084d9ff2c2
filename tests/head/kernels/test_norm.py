"""RMSNorm, alone and with what is added to the residual stream, against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.head.kernels import norm as kernel
from hybrid.head.kernels.choice import Kernels
from hybrid.head.norm import LayerNorm, Norm, RMSNorm, add_and_norm, same


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(1, 9),
    dim=st.sampled_from([1, 7, 64, 96, 576, 1000]),
    post=st.booleans(),
    normed=st.booleans(),
    scale=st.sampled_from([1.0, 0.22]),
    size=st.sampled_from([1e-4, 1.0, 1e6]),
    seed=st.integers(0, 1000),
)
def test_a_sum_and_its_norm_are_torch_s(
    n: int, dim: int, post: bool, normed: bool, scale: float, size: float, seed: int, device: torch.device
) -> None:
    torch.manual_seed(seed)
    h, more = torch.randn(n, dim) * size, torch.randn(n, dim)
    weights = torch.randn(2, dim)
    kernels = Kernels(1)
    got = kernels.add_and_norm(
        h.to(device), more.to(device), weights[0].to(device) if post else None,
        weights[1].to(device) if normed else None, 1e-6, scale,
    )  # fmt: skip
    assert kernels.notes == []
    assert got is not None
    want = h + scale * (F.rms_norm(more, (dim,), weights[0], 1e-6) if post else more)
    assert torch.allclose(got[0].cpu(), want, rtol=1e-6, atol=1e-6 * max(1.0, size))
    if normed:
        want = F.rms_norm(want, (dim,), weights[1], 1e-6)
    assert torch.allclose(got[1].cpu(), want, rtol=2e-5, atol=1e-5 if normed else 1e-6 * max(1.0, size))


def test_heads_of_a_row_are_normalised_one_by_one(device: torch.device) -> None:
    x, weight, kernels = torch.randn(3, 4 * 32), torch.randn(32), Kernels(1)
    got = RMSNorm(weight.to(device), 1e-6, kernels)(x.to(device))
    assert torch.allclose(got.cpu(), RMSNorm(weight, 1e-6)(x), atol=1e-5)
    assert kernels.notes == []


def test_rows_too_long_for_a_program_are_for_torch(device: torch.device) -> None:
    x = torch.randn(1, kernel.MAX_DIM + 1, device=device)
    assert Kernels(1).add_and_norm(x, None, None, x[0], 1e-6) is None
    assert torch.equal(RMSNorm(x[0], 1e-6, Kernels(1))(x), RMSNorm(x[0], 1e-6)(x))


NORMS = {
    "rms": lambda dim, kernels: RMSNorm(torch.full((dim,), 0.7), 1e-6, kernels),
    "layer": lambda dim, kernels: LayerNorm(torch.full((dim,), 0.7), None, 1e-6),
    "heads": lambda dim, kernels: RMSNorm(torch.full((dim // 2,), 0.7), 1e-6, kernels),
    "none": lambda dim, kernels: same,
}


@pytest.mark.parametrize("post", NORMS)
@pytest.mark.parametrize("norm", NORMS)
def test_the_residual_stream_is_the_same_with_kernels_whatever_norms_there_are(post: str, norm: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("its tensors are the CPU's")
    h, more, kernels = torch.randn(2, 64), torch.randn(2, 64), Kernels(1)

    def both(kernels: Kernels | None) -> tuple[Norm, Norm]:
        return NORMS[post](64, kernels), NORMS[norm](64, kernels)

    (first, second), (plain_first, plain_second) = both(kernels), both(None)
    got = add_and_norm(h, more, first, 0.5, second)
    want = add_and_norm(h, more, plain_first, 0.5, plain_second)
    assert kernels.notes == []
    for ours, theirs in zip(got, want, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_the_bytes_that_must_move() -> None:
    assert kernel.moved_bytes(1, 4096, add=True, norm=True) == 4 * 4096 * (4 + 1)
    assert kernel.moved_bytes(8, 64, add=False, norm=True) == 4 * 64 * (16 + 1)
