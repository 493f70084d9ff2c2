"""Architectures through the kernels and recorded, against plain torch: whatever heads, norms, experts and windows they
have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybrid.head.kernels.attention import MAX_ROWS_SMALL
from hybrid.head.kernels.choice import Kernels
from hybrid.head.linear import ExpertLinear
from tests.architectures.models import MODELS, TESTED
from tests.architectures.test_head import _two
from tests.head.heads import open_head, relative, some_tokens
from tests.head.kernels.test_graphs import recorder
from tests.head.kernels.test_head import compute, run
from tests.tiny_arch import write_arch


def compare(name: str, types: str, folder: Path, device: torch.device) -> None:
    chosen, tokens = TESTED[types], some_tokens(14)
    sizes = {**MODELS[name].sizes, **chosen.sizes}
    model = replace(MODELS[name], n_layers=2, sizes=sizes, keys=_two(MODELS[name].keys))
    path = write_arch(folder / "m.gguf", model, chosen.kinds, expert_kind=chosen.expert_kind)
    kernels = Kernels(2)
    how = replace(compute(device, kernels), recorder=recorder(device))
    fast = open_head(path, compute=how, device=device.type)
    plain = open_head(path, compute=compute(device, None), device=device.type)
    group = max(layer.n_heads // layer.n_kv_heads for layer in fast.spec.layers[:2])
    few = [2] if 2 * group <= MAX_ROWS_SMALL else [1, 1]  # more rows of a float32 cache are PyTorch's, and that is said
    chunks = [10, *few, 1, 1]
    assert (
        relative(run(fast, tokens, chunks), run(plain, tokens, chunks)) < 5e-4
    )  # GELU comes from a table of float16 on the CPU
    assert fast.notes == []
    fast.close()
    plain.close()


@pytest.mark.slow
@pytest.mark.parametrize("types", TESTED)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_architecture_with_kernels_is_the_same(
    name: str, types: str, tmp_path: Path, device: torch.device
) -> None:
    compare(name, types, tmp_path, device)


@pytest.mark.slow
def test_experts_of_few_tokens_are_not_asked_one_by_one(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host does not wait for the router's choice."""

    def one_by_one(*args: object) -> None:
        raise AssertionError("asked one by one")

    monkeypatch.setattr(ExpertLinear, "__call__", one_by_one)
    model = replace(MODELS["qwen3moe"], n_layers=2)
    path = write_arch(tmp_path / "m.gguf", model, TESTED["blocks of 32"].kinds)
    head = open_head(path, compute=compute(device, None), device=device.type)
    with pytest.raises(AssertionError, match="one by one"):
        run(head, some_tokens(1), [1])
    head.close()
    head = open_head(path, compute=compute(device, Kernels(2)), device=device.type, n_batch=2, n_ctx=8)
    run(head, some_tokens(2), [2])
    head.close()
