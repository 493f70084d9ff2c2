from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import write_tiny


@pytest.fixture(scope="session")
def llama_f32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "llama.gguf", "llama", n_layers=4, rope_freqs=True)


@pytest.fixture(scope="session")
def gemma3_f32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "gemma3.gguf", "gemma3", n_layers=7, window=16)
