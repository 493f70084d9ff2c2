"""Kernels on a real GPU. `tests/head/kernels` runs there too, where there is one; this is what only a GPU can show."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as T

from hybrid.head.device import Compute
from hybrid.head.head import Head
from scripts.gpu_check import Bench, check
from tests.gpu.test_kv import run_on_host
from tests.head.conftest import heads  # noqa: F401 - a fixture
from tests.head.heads import relative, some_tokens
from tests.tiny import write_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CUDA = torch.device("cuda")


def test_this_gpu_has_kernels() -> None:
    kernels = Compute.on(CUDA).kernels
    assert kernels is not None
    assert kernels.n_multiprocessors > 0


def test_a_head_runs_them_without_a_word(heads: Callable[..., Head], tmp_path: Path) -> None:  # noqa: F811
    path = write_tiny(tmp_path / "m.gguf", kind=[T.Q4_K, T.Q6_K, T.Q8_0, T.Q4_0])
    placed: dict[str, Any] = {"device": "cuda", "kv_dtype": "f16"}
    fast = heads(path, **placed)
    assert fast.notes == []
    tokens, chunks = some_tokens(200), [150, 40, *[1] * 10]
    plain = Compute(CUDA, fast.compute.dtype, False, 1 << 25, temporaries=False)
    want = run_on_host(heads(path, compute=plain, **placed), tokens, chunks)
    assert relative(run_on_host(fast, tokens, chunks), want) < 1e-2  # what half-precision products explain


def test_the_check_that_people_run_finds_nothing_wrong() -> None:
    rows = list(check(Bench(CUDA, tiny=True)))
    assert [row for row in rows if row.ok is False] == []
    assert not any(re.search("do not run", row.note) for row in rows)
