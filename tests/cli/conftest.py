"""What the tests of the command line share: a tiny model, and the program run as a person runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny import write_tiny

HYBRID = [sys.executable, "-m", "hybrid.cli"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with 4 layers."""
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf", n_layers=4)


@pytest.fixture(scope="session")
def tiny_gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random gemma3 with 7 layers, six of them with a window of 16 tokens."""
    return write_tiny(tmp_path_factory.mktemp("models") / "gemma.gguf", "gemma3", n_layers=7)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which nothing of the person's own is touched."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("HYBRID_", "XDG_"))}
    terminal = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}  # a pipe to us does not answer where its cursor is
    return {**keep, **terminal, "HOME": str(tmp_path), "HYBRID_MODELS": str(tmp_path / "none")}


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(environment: dict[str, str]) -> Run:
    """`run("inspect", path)` -> the finished process; stdin is empty unless `input` is given."""

    def call(*args: str | Path, input: str = "", **extra: str) -> subprocess.CompletedProcess[str]:
        command = [*HYBRID, *map(str, args)]
        env = {**environment, **extra}
        return subprocess.run(command, input=input, env=env, capture_output=True, text=True, timeout=300)

    return call
