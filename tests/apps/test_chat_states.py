"""The folder of KV states: bounded, the oldest go, and what it cannot do costs time and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hybrid import Hybrid
from hybrid.apps.chat.states import StateFolder
from hybrid.errors import BadRequestError
from tests.tiny import write_tiny

PROMPT = [5, 6, 7, 8] * 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    model = Hybrid(write_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf", n_layers=2), n_ctx=256, n_threads=1)
    model.generate(PROMPT, max_tokens=1, temperature=0)
    return model


def test_a_state_comes_back_and_an_absent_or_damaged_one_says_so(model: Hybrid, tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "states", 1 << 30)
    assert folder.save("1", model) is None
    assert (tmp_path / "states").stat().st_mode & 0o077 == 0
    assert folder.restore("1", model) == model.n_used
    with pytest.raises(BadRequestError, match="not saved"):
        folder.restore("2", model)
    (tmp_path / "states" / "1.state").write_bytes(b"HYBSTATE")
    with pytest.raises(BadRequestError, match="too short"):
        folder.restore("1", model)


def test_the_oldest_states_are_dropped(model: Hybrid, tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, 1 << 30)
    folder.save("1", model)
    size = (tmp_path / "1.state").stat().st_size
    folder.limit = 2 * size + size // 2
    for age, key in enumerate("23"):
        folder.save(key, model)
        os.utime(tmp_path / f"{key}.state", (1000 + age, 1000 + age))
    os.utime(tmp_path / "1.state", (2000, 2000))
    folder.save("4", model)
    assert {path.name for path in tmp_path.iterdir()} == {"1.state", "4.state"}


def test_what_is_too_large_or_cannot_be_written_is_said(model: Hybrid, tmp_path: Path) -> None:
    assert "--state-limit" in (StateFolder(tmp_path, 1000).save("1", model) or "")
    assert StateFolder(tmp_path, 0).save("1", model) is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert "was not saved" in (StateFolder(tmp_path / "file" / "states", 1 << 30).save("1", model) or "")
