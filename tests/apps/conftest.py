from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid import Hybrid
from hybrid.apps import tune as app
from tests.apps.tuning import Fake, Speed
from tests.tiny import write_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama that was "trained" for a long context; it has a token a letter."""
    folder = tmp_path_factory.mktemp("models")
    return write_tiny(
        folder / "tiny.gguf", n_layers=2, n_embd=64, n_heads=2, n_kv_heads=1, head_dim=32, n_ff=64, n_ctx=8192
    )


@pytest.fixture(scope="session")
def model(tiny: Path) -> Iterator[Hybrid]:
    with Hybrid(tiny, n_gpu_layers=0, n_ctx=1024, n_batch=128, n_threads=1) as loaded:
        yield loaded


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Fake]:
    """`faked(seconds)` replaces the processes; profiles are in a folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(app, "run_calibration", lambda *args, **others: [])

    def install(seconds: Speed, **others: Any) -> Fake:
        fake = Fake(seconds, **others)
        monkeypatch.setattr(app, "run_trial", fake.run_trial)
        return fake

    return install
