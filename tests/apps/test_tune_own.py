"""Tuning where llama.cpp was built with a GPU: its own layers are candidates like ours. Speeds are made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid.apps import tune_candidates
from hybrid.errors import BadRequestError, UnsupportedError
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.report import plot
from hybrid.schedule import facts, own_offload
from hybrid.schedule.machine import Gpu
from hybrid.schedule.placement import Placement
from tests.apps.tuning import Fake, inner, run, small_model


@pytest.fixture
def own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if llama.cpp had been built with a GPU, of which PyTorch knows nothing."""
    gpu = Gpu(device="cuda:0", name="Card", total_bytes=8 << 30, free_bytes=7 << 30)
    monkeypatch.setattr(facts, "gpus", lambda: (gpu,))
    monkeypatch.setattr(own_offload, "supports_offload", lambda: True)
    monkeypatch.setattr(tune_candidates, "default_device", lambda: None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return small_model(tmp_path)


@pytest.mark.usefixtures("own_gpu")
@pytest.mark.parametrize("engine", ["auto", "llama.cpp"])
def test_llama_cpps_own_gpu_is_a_candidate_where_it_has_one(
    model: Path, faked: Callable[..., Fake], engine: str
) -> None:
    fake = faked(lambda p: 0.02 - 0.001 * p.llama_gpu_layers)
    report = run(model, device=None, engine=engine, n_batch=64)
    winner = report.rows[report.best or 0].placement
    assert (winner.n_gpu_layers, winner.llama_gpu_layers, winner.offload_kqv) == (0, 13, True)
    assert report.command.endswith("--engine llama.cpp -ngl all -c 256 -b 64")
    assert all(c.placement.n_gpu_layers == 0 and c.vram_budget is None for c in fake.ran)
    assert any(c.placement.n_offloaded == 0 for c in fake.ran)
    assert report.rows[report.best or 0].vram_bytes > 0
    assert not report.emulated
    assert not any("No GPU" in note for note in report.notes)
    assert all(row.placement.llama_gpu_layers == 0 for row in run(model, device=None, engine="hybrid").rows)
    assert all(row.placement.llama_gpu_layers == 0 for row in run(model, device="cpu").rows)


@pytest.mark.usefixtures("own_gpu")
def test_what_llama_cpps_gpu_cannot_hold_is_left_out(model: Path, faked: Callable[..., Fake]) -> None:
    faked(inner)
    with ModelFile(model) as file:
        spec = read_spec(file)
    whole = Placement(device="cuda:0", n_gpu_layers=0, n_ctx=256, llama_gpu_layers=13, offload_kqv=True)
    half = own_offload.own_vram_bytes(spec, replace(whole, llama_gpu_layers=6))
    assert (
        half
        < own_offload.own_vram_bytes(spec, replace(whole, offload_kqv=False))
        < own_offload.own_vram_bytes(spec, whole)
    )
    report = run(model, device=None, vram_bytes=half)
    rows = [row.placement for row in report.rows if row.placement.llama_gpu_layers]
    assert max(p.llama_gpu_layers for p in rows if p.offload_kqv) == 6
    assert all(p.llama_gpu_layers > 6 for p in rows if not p.offload_kqv)
    assert all(row.vram_bytes <= half for row in report.rows)
    plot.plot_tuning(report, model.parent / "own.svg")
    assert any(not p.offload_kqv for p in rows)
    assert "llama.cpp -nkvo" in (model.parent / "own.svg").read_text()


def test_its_engine_is_refused_where_it_has_no_gpu(model: Path, faked: Callable[..., Fake], monkeypatch: Any) -> None:
    monkeypatch.setattr(own_offload, "supports_offload", lambda: False)
    faked(inner)
    with pytest.raises(UnsupportedError, match="built without a GPU"):
        run(model, device=None, engine="llama.cpp")
    with pytest.raises(BadRequestError, match="--device"):
        run(model, device="cpu", engine="llama.cpp")
