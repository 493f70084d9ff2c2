"""Fixtures of the architectures' tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.architectures.models import MODELS
from tests.tiny_arch import write_arch


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Tiny products gain nothing from more threads, and lose much where the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The F32 file of a model of `MODELS`, written once."""
    room = tmp_path_factory.mktemp("architectures")

    def path(name: str, **more: Any) -> Path:
        file = room / f"{name}.gguf"
        return file if file.exists() else write_arch(file, MODELS[name], **more)

    return path
