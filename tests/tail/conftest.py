"""Fixtures of the tail's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid.tail.tail import Tail
from tests.oracle.compare import open_tail
from tests.tiny import write_tiny


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four global layers in F32."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "llama.gguf", n_layers=4)


@pytest.fixture(scope="session")
def tiny_gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven layers in F32, all but one with a window of 16 tokens."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "gemma.gguf", "gemma3", n_layers=7, window=16, n_ctx=2048)


@pytest.fixture
def open_tails() -> Iterator[Callable[..., Tail]]:
    """Opens tails that are closed after the test."""
    tails: list[Tail] = []

    def open_one(path: Path, k: int, **more: Any) -> Tail:
        tails.append(open_tail(path, k, **more))
        return tails[-1]

    yield open_one
    for tail in tails:
        tail.close()
