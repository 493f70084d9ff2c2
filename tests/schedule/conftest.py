"""Fixtures of the scheduler's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid.model.catalog import catalog


@pytest.fixture(params=["smollm2-135m", "gemma3-270m"])
def real_model(request: pytest.FixtureRequest) -> Path:
    """The file of a pulled catalogue model; the test is skipped, visibly, where it was not pulled."""
    entry = catalog()[request.param]
    if not entry.pulled:
        pytest.skip(f"{entry.name} is not pulled: hybrid models pull {entry.name}")
    return entry.path
