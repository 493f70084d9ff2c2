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
from hybrid.head.feed_forward import Dense
from hybrid.head.head import Head
from hybrid.head.kernels.choice import Kernels
from tests.head.heads import relative, some_tokens
from tests.tiny import write_tiny

SMALL: dict[str, Any] = {"n_layers": 2, "n_embd": 64, "n_ff": 96, "head_dim": 32, "n_heads": 2, "n_kv_heads": 1}
MIXED = [T.Q8_0, T.Q8_0, T.Q5_0, T.F16, T.Q4_0, T.Q4_0, T.Q8_0]
"""Of a layer's matrices: q and k of one type, v of another; gate and up of one."""
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
    tolerance = 5e-4 if architecture == "gemma3" else 2e-5  # GELU comes from a table of float16 on the CPU
    assert relative(run(fast, tokens, chunks), run(plain, tokens, chunks)) < tolerance
    assert fast.notes == plain.notes == []
    assert fast.weight_bytes == plain.weight_bytes


@pytest.mark.parametrize("kinds", [[T.Q8_0], pytest.param(MIXED, marks=pytest.mark.slow)], ids=["one type", "mixed"])
def test_matrices_with_the_same_input_and_type_are_one(
    kinds: list[T], heads: Callable[..., Head], tmp_path: Path, device: torch.device
) -> None:
    """With biases. Of many tokens, each is multiplied by itself; none is held twice."""
    path = write_tiny(tmp_path / "m.gguf", "llama", kind=kinds, biases=True, **{**SMALL, "n_layers": 1})
    placed = {"device": device.type, "kv_dtype": "f32", "n_ctx": 64, "n_batch": 32}
    fast, plain = (heads(path, compute=compute(device, kernels), **placed) for kernels in (Kernels(2), None))
    attention, ffn = fast._blocks[0].attention, fast._blocks[0].feed_forward
    assert [len(joined.parts) for joined in attention.qkv] == ([3] if len(kinds) == 1 else [2, 1])
    assert isinstance(ffn, Dense)
    assert [part.n_out for part in ffn.parts] == [96, 96]
    assert ffn.whole is not None
    tokens = some_tokens(20)
    assert relative(run(fast, tokens, [16, 2, 1, 1]), run(plain, tokens, [16, 2, 1, 1])) < 1e-5
    assert fast.notes == []
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
    assert len(broken.notes) == 5
    assert all("(RuntimeError: Failed to find C compiler)" in note for note in broken.notes)
    tokens = some_tokens(20)
    assert relative(run(broken, tokens, [16, 2, 1, 1]), run(plain, tokens, [16, 2, 1, 1])) < 1e-6
