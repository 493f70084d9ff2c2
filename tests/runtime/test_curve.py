"""Which engines share a batch curve: those whose steps cost the same."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.runtime import curve as curves
from hybrid.runtime.engine import Engine
from hybrid.schedule.kv_size import kv_bytes_per_token
from hybrid.schedule.kv_tiers import SPILL_TOKENS
from hybrid.schedule.placement import Placement


def test_a_tiered_cache_is_known_by_what_its_budget_holds(
    llama_f32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ModelFile(llama_f32) as file:
        spec = read_spec(file)
        block = 2 * SPILL_TOKENS * kv_bytes_per_token(spec.layers[0], "f16")

        def curve(budget: int) -> curves.BatchCurve:
            placement = Placement(
                device="cpu", n_gpu_layers=2, n_ctx=256, n_batch=32, n_ubatch=32, kv="tiered", kv_budget=budget
            )
            with closing(Engine(file, spec, placement)) as engine:
                return curves.curve_of(engine, tmp_path)

        first = curve(2 * block)
        monkeypatch.setattr(curves, "measure", lambda engine: pytest.fail("measured again"))
        assert curve(2 * block + block // 2) == first
        with pytest.raises(pytest.fail.Exception):
            curve(block)
