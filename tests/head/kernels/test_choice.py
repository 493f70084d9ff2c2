"""Which kernels run where, and what happens when they do not: torch computes the same, and a sentence says so."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hybrid.errors import OutOfMemoryError
from hybrid.head.device import Compute
from hybrid.head.kernels import choice, matvec, tiles
from hybrid.head.kernels.choice import Kernels, supported
from hybrid.head.linear import QuantLinear, Workspace
from tests.head.kernels.blocks import in_planes, numbers, quantised

CUDA = torch.device("cuda")


def on_card(patch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None = None) -> None:
    patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    patch.setattr(torch.version, "hip", hip)


def test_turing_and_newer_and_amd_run_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, expected in (((7, 0), False), ((7, 5), True), ((8, 6), True), ((12, 0), True)):
        on_card(monkeypatch, capability)
        assert supported(CUDA) is expected
    on_card(monkeypatch, (6, 0), hip="6.4")
    assert supported(CUDA, 12)
    assert not supported(CUDA, 16)  # IQ2_XXS has no format
    assert not supported(torch.device("mps"))
    assert not supported(torch.device("cpu"))


def test_without_triton_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    on_card(monkeypatch, (9, 0))
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: None)
    assert Kernels.on(CUDA) is None


def test_a_gpu_gets_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    on_card(monkeypatch, (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    kernels = Kernels.on(CUDA)
    assert kernels is not None
    assert (kernels.n_multiprocessors, kernels.small) == (132, False)
    on_card(monkeypatch, (7, 5))
    turing = Kernels.on(CUDA)
    assert turing is not None
    assert turing.small


def linear(kernels: Kernels | None, device: torch.device) -> tuple[QuantLinear, torch.Tensor, torch.Tensor]:
    """A Q4_K product through the head's door, its weights as numbers, and its bias."""
    raw, bias = quantised(12, 37, 512), torch.randn(37)
    compute = Compute(device, torch.float16, False, 512 * 9, temporaries=False, kernels=kernels)
    planes = in_planes(raw, 12, 512, device)
    return QuantLinear(planes, 12, (37, 512), bias.to(device), Workspace(compute)), numbers(raw, 12), bias


@pytest.mark.parametrize("n", [1, 20])
def test_a_linear_gives_the_same_with_kernels_and_without(n: int, device: torch.device) -> None:
    kernels = Kernels(2)
    layer, weights, bias = linear(kernels, device)
    x = torch.randn(n, 512)
    want = x @ weights.T + bias
    assert torch.allclose(layer(x.to(device)).cpu(), want, atol=2e-3 * float(want.abs().max()))
    assert kernels.notes == []
    plain, *_ = linear(None, device)
    assert plain.nbytes == layer.nbytes


@pytest.mark.parametrize(("n", "family"), [(1, "matrix-vector"), (20, "dequantisation")])
def test_a_kernel_that_fails_is_replaced_by_torch_with_one_sentence(
    n: int, family: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    tries = []

    def fail(*args: object) -> None:
        tries.append(args)
        raise RuntimeError("no compiler\nmore of it")

    monkeypatch.setattr(matvec, "matvec", fail)
    monkeypatch.setattr(tiles, "dequantize", fail)
    kernels = Kernels(2)
    layer, weights, bias = linear(kernels, device)
    x = torch.randn(n, 512)
    want = x @ weights.T + bias
    for _ in range(2):
        assert torch.allclose(layer(x.to(device)).cpu(), want, atol=2e-3 * float(want.abs().max()))
    [note] = [note for note in kernels.notes if family in note]
    assert note == (
        f"The {family} kernels do not run on this device (RuntimeError: no compiler); PyTorch computes in their place, "
        "more slowly."
    )
    assert len(tries) == len(kernels.notes)  # none is tried twice
    assert layer.work.nbytes <= 512 * 9 * 2


def test_out_of_memory_is_no_reason_to_go_on_without_kernels(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    def fail(*args: object) -> None:
        raise OutOfMemoryError("full")

    monkeypatch.setattr(matvec, "matvec", fail)
    kernels = Kernels(2)
    layer, *_ = linear(kernels, device)
    with pytest.raises(OutOfMemoryError):
        layer(torch.randn(1, 512, device=device))
    assert kernels.notes == []
