"""KV strategies on a CUDA device: real streams, events and pinned pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybrid.head.head import Head
from tests.head.conftest import heads  # noqa: F401 - a fixture
from tests.head.heads import relative, some_tokens
from tests.tiny import write_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

STRATEGIES: dict[str, dict[str, Any]] = {
    "stream": {"kv": "stream"},
    "attend": {"kv": "attend"},
    "tiered": {"kv": "tiered", "kv_budget": 64 * 6 * 2 * 2 * 64 * 2},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kv_dtype", ["f16", "q8_0"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_every_strategy_computes_what_device_does(
    architecture: str,
    kv_dtype: str,
    strategy: str,
    heads: Callable[..., Head],  # noqa: F811
    tmp_path: Path,
) -> None:
    path = write_tiny(tmp_path / "m.gguf", architecture, n_layers=6, window=16)
    tokens, chunks = some_tokens(200), [100, 60, 20, *[1] * 20]
    placed = {"device": "cuda", "kv_dtype": kv_dtype, "kv_keep_sliding": False}
    device = run_on_host(heads(path, **placed), tokens, chunks)
    head = heads(path, **placed, **STRATEGIES[strategy])
    for _ in range(3):
        assert relative(run_on_host(head, tokens, chunks), device) < 1e-2  # what its half-precision products explain
        head.cache.trim(0, 0)
    assert head.notes == []
    assert head.cache.moved.to_host > 0


def run_on_host(head: Head, tokens: np.ndarray, chunks: list[int]) -> np.ndarray:
    """As `tests.head.heads.run`, from a GPU."""
    out, start = [], 0
    for n in chunks:
        where = np.arange(start, start + n)
        out.append(head.forward(tokens[start : start + n], where, np.zeros(n, int)).cpu().numpy())
        start += n
    return np.concatenate(out)
