"""Kernels run on a GPU where there is one, otherwise through Triton's interpreter (see `tests/conftest.py`)."""

from __future__ import annotations

import pytest
import torch

from scripts.triton_interpreter import mend_bfloat16

pytest.importorskip("triton", reason="Triton has no package for this system")
if not torch.cuda.is_available():
    mend_bfloat16()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run in these tests."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
