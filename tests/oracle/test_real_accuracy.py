"""The accuracy table of `scripts/eval_split.py`, one row of it, as a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid.model.catalog import find_entry
from scripts import eval_split

TEXT = Path(eval_split.__file__).with_name("alice.txt")


@pytest.mark.real
def test_half_a_real_model_on_the_gpu_is_as_accurate_as_llama_cpp() -> None:
    if not find_entry("smollm2-135m").pulled:
        pytest.skip("smollm2-135m is not pulled: hybrid models pull smollm2-135m")
    (row,) = eval_split.evaluate("smollm2-135m", TEXT.read_text(), 500, [15])
    assert row["head"] <= eval_split.HEAD_BOUND
    assert row["tail"] == 0.0
    assert row["x exact"] <= eval_split.KL_BOUND
