"""A whole head through the kernels, against the same head in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as T

from hybrid.head.device import Compute
from hybrid.head.head import Head
from hybrid.head.kernels.choice import Kernels
from tests.head.heads import relative, some_tokens
from tests.tiny import write_tiny

SMALL: dict[str, Any] = {"n_layers": 2, "n_embd": 64, "n_ff": 96, "head_dim": 32, "n_heads": 2, "n_kv_heads": 1}
STRATEGIES: dict[str, dict[str, Any]] = {
    "device": {},
    "stream": {"kv": "stream"},
    "tiered": {"kv": "tiered", "kv_budget": 64 * 2 * 32 * 4},
}


def compute(device: torch.device, kernels: Kernels | None) -> Compute:
    """In float32, so that nothing but the order of sums may differ."""
    return Compute(device, torch.float32, False, 100 * 256, temporaries=False, kernels=kernels)


def run(head: Head, tokens: np.ndarray, chunks: list[int]) -> np.ndarray:
    out, start = [], 0
    for n in chunks:
        where = np.arange(start, start + n)
        out.append(head.forward(tokens[start : start + n], where, np.zeros(n, int)).cpu().numpy())
        start += n
    return np.concatenate(out)


@pytest.mark.parametrize(
    ("architecture", "strategy"),
    [
        pytest.param("gemma3", "device", marks=pytest.mark.slow),  # the interpreter is slow
        ("llama", "stream"),
        ("llama", "tiered"),
    ],
)
def test_a_head_with_kernels_is_the_head_without(
    architecture: str, strategy: str, heads: Callable[..., Head], tmp_path: Path, device: torch.device
) -> None:
    path = write_tiny(tmp_path / "m.gguf", architecture, kind=[T.Q4_0, T.Q5_1, T.Q8_0], window=16, **SMALL)
    placed = {"device": device.type, "kv_dtype": "f32", "kv_keep_sliding": False, "n_ctx": 256, "n_batch": 128}
    placed |= STRATEGIES[strategy]
    tokens, chunks = some_tokens(84), [80, 2, 1, 1]
    kernels = Kernels(2)
    fast = heads(path, 1, compute=compute(device, kernels), **placed)
    plain = heads(path, 1, compute=compute(device, None), **placed)
    assert relative(run(fast, tokens, chunks), run(plain, tokens, chunks)) < 2e-5
    assert fast.notes == plain.notes == []
    assert fast.weight_bytes == plain.weight_bytes


def test_a_head_whose_kernels_fail_says_so_at_once_and_computes_the_same(
    heads: Callable[..., Head], tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr("hybrid.head.kernels.variant.Variant.launch", fail)
    path = write_tiny(tmp_path / "m.gguf", kind=T.Q4_0, **SMALL)
    placed = {"device": device.type, "kv_dtype": "f16", "n_ctx": 64, "n_batch": 32}
    broken = heads(path, compute=compute(device, Kernels(2)), **placed)
    plain = heads(path, compute=compute(device, None), **placed)
    assert len(broken.notes) == 4
    assert all("(RuntimeError: Failed to find C compiler)" in note for note in broken.notes)
    tokens = some_tokens(20)
    assert relative(run(broken, tokens, [16, 2, 1, 1]), run(plain, tokens, [16, 2, 1, 1])) < 1e-6
