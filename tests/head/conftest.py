"""Fixtures of the head's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hybrid.head.head import Head
from tests.head.heads import open_head
from tests.tiny import write_tiny


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Tiny products gain nothing from more threads, and lose much where the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four global layers in F32."""
    return write_tiny(tmp_path_factory.mktemp("head") / "llama.gguf", n_layers=4)


@pytest.fixture(scope="session")
def tiny_gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven layers in F32, the sixth global, the others with a window of 16 tokens."""
    return write_tiny(tmp_path_factory.mktemp("head") / "gemma.gguf", "gemma3", n_layers=7, window=16)


@pytest.fixture
def heads() -> Iterator[Callable[..., Head]]:
    """`open_head`, closing what it opened after the test."""
    opened: list[Head] = []

    def open_one(*args: object, **more: object) -> Head:
        opened.append(open_head(*args, **more))  # type: ignore[arg-type]
        return opened[-1]

    yield open_one
    for head in opened:
        head.close()
