"""What every test shares: the real models; and nothing that a person measured on this machine is read or written."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybrid.model.catalog import catalog

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)  # under nohup the programs the tests start would ignore it, too


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Machines and profiles are remembered in a folder of the session's own, also by the processes it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(params=["smollm2-135m", "gemma3-270m"])
def real_model(request: pytest.FixtureRequest) -> Path:
    """The file of a pulled catalogue model; the test is skipped, visibly, where it was not pulled."""
    entry = catalog()[request.param]
    if not entry.pulled:
        pytest.skip(f"{entry.name} is not pulled: hybrid models pull {entry.name}")
    return entry.path
