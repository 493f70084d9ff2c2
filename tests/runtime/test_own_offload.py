"""llama.cpp's own GPU layers: refused where it has no GPU, k = 0 with none, a Placement like any other with some."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid import Hybrid
from hybrid.errors import BadRequestError, UnsupportedError
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.model.spec import ModelSpec
from hybrid.schedule import own_offload, scheduler
from hybrid.schedule.machine import Gpu
from hybrid.schedule.profile import Profile, Record
from hybrid.schedule.scheduler import Request, plan
from hybrid.tail.context import context_params

GIB = 1 << 30


@pytest.fixture
def spec(llama_f32: Path) -> ModelSpec:
    with ModelFile(llama_f32) as file:
        return read_spec(file)


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if llama.cpp had been built with a GPU backend."""
    monkeypatch.setattr(own_offload, "supports_offload", lambda: True)


def test_this_build_has_none_and_says_so(llama_f32: Path) -> None:
    for layers in (2, "all", -1, 99):
        with pytest.raises(UnsupportedError, match="built without a GPU"):
            Hybrid(llama_f32, engine="llama.cpp", n_gpu_layers=layers, n_ctx=64)


@pytest.mark.parametrize("layers", [0, "auto"])
def test_with_no_layers_it_is_k_0(llama_f32: Path, layers: int | str) -> None:
    with (
        Hybrid(llama_f32, engine="llama.cpp", n_gpu_layers=layers, n_ctx=64) as own,
        Hybrid(llama_f32, n_gpu_layers=0, n_ctx=64) as ours,
    ):
        assert own.placement == ours.placement
        options: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        assert own.generate("Hello", **options).tokens == ours.generate("Hello", **options).tokens


@pytest.mark.parametrize(
    ("asked", "given"), [(1, 1), (3, 3), (4, 5), (99, 5), ("all", 5), ("auto", 5), (-1, 5), ("2", 2)]
)
def test_layers_are_llama_cpps_and_all_takes_the_output_head_along(
    spec: ModelSpec, with_gpu: None, asked: int | str, given: int
) -> None:
    for offload_kqv in (True, False):
        request = Request(engine="llama.cpp", n_gpu_layers=asked, n_ctx=64, offload_kqv=offload_kqv)
        placement = plan(spec, request).placement
        assert (placement.n_gpu_layers, placement.llama_gpu_layers) == (0, given)
        assert placement.offload_kqv is offload_kqv
        params = context_params(placement, 1)
        assert (params.offload_kqv, params.op_offload) == (offload_kqv, True)
        assert "llama.cpp's GPU" in placement.where
        assert placement.to_dict()["llama_gpu_layers"] == given


def test_a_split_keeps_llama_cpp_off_the_gpu(spec: ModelSpec, with_gpu: None) -> None:
    for layers in (0, 2):
        placement = plan(spec, Request(n_gpu_layers=layers, device="cpu", n_ctx=64)).placement
        assert placement.llama_gpu_layers == 0
        params = context_params(placement, 1)
        assert (params.offload_kqv, params.op_offload) == (False, False)


def test_auto_gives_llama_cpp_what_cannot_be_split_where_it_fits(
    spec: ModelSpec, with_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    strange = replace(spec, unsupported="this program does not know it")
    monkeypatch.setattr(scheduler, "default_device", lambda: None)
    for free, layers, words in ((8 * GIB, 5, "llama.cpp runs all of it"), (GIB // 4, 0, "are free")):
        gpu = Gpu(device="cuda:0", name="x", total_bytes=8 * GIB, free_bytes=free)
        monkeypatch.setattr(own_offload.facts, "gpus", lambda gpu=gpu: (gpu,))
        found = plan(strange, Request(n_ctx=64))
        assert found.placement.llama_gpu_layers == layers
        assert any(words in note for note in found.notes)
        assert plan(spec, Request(n_ctx=64)).placement.llama_gpu_layers == 0
        assert plan(strange, Request(n_ctx=64, engine="hybrid")).placement.llama_gpu_layers == 0
        assert plan(strange, Request(n_ctx=64, n_gpu_layers=0)).placement.llama_gpu_layers == 0


@pytest.mark.parametrize("request_", [{"engine": "other"}, {"engine": "llama.cpp", "n_gpu_layers": "many"}])
def test_senseless_requests_are_refused(spec: ModelSpec, request_: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match="must be"):
        plan(spec, Request(n_ctx=64, **request_))


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize("torch_has_a_gpu", [True, False])
def test_auto_takes_llama_cpps_own_layers_where_they_were_measured_to_be_quicker(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, torch_has_a_gpu: bool
) -> None:
    gpu = Gpu(device="cuda:0", name="x", total_bytes=8 * GIB, free_bytes=8 * GIB)
    monkeypatch.setattr(own_offload.facts, "gpus", lambda: (gpu,))
    monkeypatch.setattr(scheduler, "default_device", lambda: "cuda" if torch_has_a_gpu else None)

    def measured(tok_per_s: float, **request: Any) -> Record:
        placement = plan(spec, Request(n_ctx=64, **request)).placement
        return Record(placement=placement, source="run", at="2026-01-01", depth=32, decode_s=(1 / tok_per_s,))

    def layers(*records: Record, **request: Any) -> tuple[int, int]:
        found = plan(spec, Request(n_ctx=64, **request), Profile(records=records))
        if found.placement.llama_gpu_layers:
            assert any("llama.cpp's own GPU" in note and "measured" in note for note in found.notes)
        return found.placement.n_gpu_layers, found.placement.llama_gpu_layers

    ours = 4 if torch_has_a_gpu else 0
    mine = measured(30, n_gpu_layers=ours)
    quick, slow = (measured(speed, engine="llama.cpp", n_gpu_layers=3) for speed in (50, 10))
    assert layers(mine) == (ours, 0)
    assert layers(mine, quick) == (0, 3)
    assert layers(mine, slow) == (ours, 0)
    assert layers(mine, quick, engine="hybrid") == (ours, 0)  # what was asked for otherwise stays
    assert layers(mine, quick, kv="attend") == (ours, 0)
    monkeypatch.setattr(own_offload.facts, "gpus", lambda: (replace(gpu, free_bytes=GIB // 4),))
    assert layers(mine, quick)[1] == 0  # it no longer fits
