"""`auto`: what was measured decides, if it still fits; a failed allocation costs a layer."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from hybrid import Hybrid
from hybrid.errors import HostMemoryError, OutOfMemoryError
from hybrid.model.file import ModelFile
from hybrid.runtime import loaded
from hybrid.runtime.engine import Engine
from hybrid.schedule import auto, facts, scheduler
from hybrid.schedule.identity import identify
from hybrid.schedule.machine import Gpu
from hybrid.schedule.placement import Placement
from hybrid.schedule.profile import Profile, ProfileStore, Record
from hybrid.schedule.scheduler import Request, plan
from hybrid.schedule.shape import parse_shape, shape_spec
from tests.tiny import write_tiny

GIB = 1 << 30
LLAMA_3_8B = shape_spec(parse_shape("layers=32,kv_heads=8,head_dim=128"))


@pytest.fixture
def eight_gib(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU with 8 GiB, and RAM enough; call it with other free bytes."""

    def set_free(free: int) -> None:
        gpu = Gpu(device="cuda:0", name="Card", total_bytes=8 * GIB, free_bytes=free)
        monkeypatch.setattr(facts, "gpus", lambda: (gpu,))

    monkeypatch.setattr(scheduler, "default_device", lambda: "cuda")
    for module in (scheduler, auto):
        monkeypatch.setattr(module, "ram_budget", lambda: 64 * GIB)
    monkeypatch.setattr(scheduler, "available_ram", lambda: 64 * GIB)
    set_free(7 * GIB)
    return set_free


def measured(placement: Placement, tok_per_s: float, days_ago: int = 0, **other: Any) -> Record:
    at = (datetime.now().astimezone() - timedelta(days=days_ago)).isoformat(timespec="seconds")
    return Record(placement=placement, source="run", at=at, depth=1000, decode_s=(1 / tok_per_s,) * 3, **other)


def at(k: int) -> Placement:
    """What a run with `-ngl k` has, so that records are of the very placements `auto` weighs."""
    return plan(LLAMA_3_8B, Request(n_gpu_layers=k, n_ctx=4096)).placement


def chosen(*records: Record, **request: Any) -> tuple[int, str]:
    found = plan(LLAMA_3_8B, Request(n_ctx=4096, **request), Profile(records=records))
    return found.placement.n_gpu_layers, next(note for note in found.notes if "layers on cuda" in note)


@pytest.mark.usefixtures("eight_gib")
def test_what_was_measured_to_be_quickest_is_taken_and_said() -> None:
    analytic, line = chosen()
    assert analytic > 20
    assert "measured" not in line
    k, line = chosen(measured(at(analytic), 10), measured(at(12), 18.2, days_ago=1))
    assert k == 12
    assert line.startswith("12 of 32 layers on cuda: ")
    assert line.endswith("; measured 18.2 tok/s yesterday.")
    assert "of 7.0 GiB free" in line


@pytest.mark.usefixtures("eight_gib")
def test_the_analytic_choice_stays_until_something_was_measured_to_be_quicker() -> None:
    analytic, _ = chosen()
    k, line = chosen(measured(at(analytic), 30), measured(at(12), 18.2))
    assert k == analytic
    assert "measured 30.0 tok/s today" in line


def test_a_measured_choice_that_no_longer_fits_is_not_taken(eight_gib: Any) -> None:
    records = measured(at(chosen()[0]), 10), measured(at(20), 40), measured(at(4), 20)
    assert chosen(*records)[0] == 20
    eight_gib(3 * GIB)
    k, line = chosen(*records)
    assert k < 20
    assert "40.0" not in line
    assert chosen(*records, vram_reserve=0)[0] >= k


@pytest.mark.usefixtures("eight_gib")
def test_failures_and_other_kinds_of_runs_decide_nothing() -> None:
    analytic, _ = chosen()
    failed = replace(measured(at(12), 100), decode_s=(), failure="killed")
    other = measured(replace(at(12), kv_dtype="f32"), 100)
    many = measured(replace(at(12), n_sequences=4), 100)
    assert chosen(failed, other, many)[0] == analytic


@pytest.mark.usefixtures("eight_gib")
def test_speeds_at_other_contexts_and_chunks_count() -> None:
    analytic, _ = chosen()
    elsewhere = replace(at(12), n_ctx=2048, n_batch=64, n_ubatch=64)
    assert chosen(measured(at(analytic), 10), measured(elsewhere, 18.2))[0] == 12


# -- with a model ------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "m.gguf", n_layers=4, seed=hash(str(tmp_path)) % 1000)


def store_of(model: Path) -> ProfileStore:
    with ModelFile(model) as file:
        return ProfileStore(identify(file))


def test_every_run_adds_its_speed(tiny: Path) -> None:
    with Hybrid(tiny, n_gpu_layers=2, device="cpu", n_ctx=512) as model:
        model.generate([5] * 80, max_tokens=30, temperature=0, ignore_eos=True)
        done = model.generate([5] * 80 + [6] * 20, max_tokens=24, temperature=0, ignore_eos=True)
        model.generate([7], max_tokens=3)  # too little to tell a speed
    first, second = store_of(tiny).load().records
    assert first.placement == second.placement == done.placement
    assert (first.depth, first.n_prompt, len(first.decode_s), len(first.prefill_s)) == (95, 80, 1, 1)
    assert second.prefill_s == ()  # most of the prompt was there already
    assert 1 / second.decode_s[0] == pytest.approx(done.timings.decode_tok_per_s)


def test_auto_rests_on_runs_on_the_emulated_device_too(tiny: Path) -> None:
    with Hybrid(tiny, device="cpu", n_ctx=256) as model:
        assert model.placement.n_gpu_layers == 0
    with Hybrid(tiny, n_gpu_layers=3, device="cpu", n_ctx=256) as model:
        store_of(tiny).add(measured(model.placement, 5000))
        store_of(tiny).add(measured(replace(model.placement, n_gpu_layers=0), 50))
    with Hybrid(tiny, device="cpu", n_ctx=256) as model:
        assert model.placement.n_gpu_layers == 3
        assert any("3 of 4 layers on the emulated GPU: measured 5000.0 tok/s today" in note for note in model.notes)


def test_a_failed_allocation_costs_a_layer_and_is_said(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Hybrid(tiny, n_gpu_layers=4, device="cpu", n_ctx=256) as model:
        store_of(tiny).add(measured(model.placement, 5000))

    class Tight(Engine):
        def __init__(self, *args: Any, **others: Any) -> None:
            if args[2].n_gpu_layers > 2:
                raise OutOfMemoryError("The KV cache needs more than there is.")
            super().__init__(*args, **others)

    monkeypatch.setattr(loaded, "Engine", Tight)
    with Hybrid(tiny, device="cpu", n_ctx=256) as model:
        assert model.placement.n_gpu_layers == 2
        assert sum("did not fit after all" in note for note in model.notes) == 2
        assert "4 layers did not fit after all, 3 are tried" in " ".join(model.notes)
        assert model.generate([5] * 8, max_tokens=2, ignore_eos=True).tokens
    with pytest.raises(OutOfMemoryError):
        Hybrid(tiny, n_gpu_layers=3, device="cpu", n_ctx=256)  # what a person asked for is not changed


@pytest.mark.usefixtures("eight_gib")
def test_ram_that_does_not_suffice_costs_no_layer(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    class Full(Engine):
        def __init__(self, *args: Any, **others: Any) -> None:
            tried.append(args[2].n_gpu_layers)
            raise HostMemoryError("llama.cpp could not load the model: out of memory.")

    monkeypatch.setattr(loaded, "Engine", Full)
    with pytest.raises(HostMemoryError, match="could not load"):
        Hybrid(tiny, n_ctx=256)
    assert tried == [4]  # a layer fewer on the GPU is one more in the RAM


@pytest.mark.parametrize(
    "options", [{"kv": "tiered", "n_ctx": 200_000}, {"n_sequences": "auto", "most_sequences": 64, "n_ctx": 16384}]
)
def test_what_a_failed_layer_leaves_goes_to_nothing_else(
    tiny: Path, eight_gib: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Placement] = []
    eight_gib(700 << 20)

    class Tight(Engine):
        def __init__(self, *args: Any, **others: Any) -> None:
            tried.append(args[2])
            eight_gib((700 - 20 * len(tried)) << 20)  # what has failed may hold memory still
            raise OutOfMemoryError("The GPU is full.")

    monkeypatch.setattr(loaded, "Engine", Tight)
    with pytest.raises(OutOfMemoryError, match="GPU is full"):
        Hybrid(tiny, vram_reserve=0, **{"n_ctx": 512, **options})
    assert [p.n_gpu_layers for p in tried] == list(range(tried[0].n_gpu_layers, -1, -1))
    assert len({(p.n_ctx, p.n_sequences, p.kv, p.kv_budget) for p in tried}) == 1


def test_a_damaged_profile_is_one_line_and_no_more(tiny: Path) -> None:
    store = store_of(tiny)
    store.path.parent.mkdir(parents=True, exist_ok=True)
    store.path.write_text("{")
    with Hybrid(tiny, n_ctx=256) as model:
        assert sum("damaged" in note for note in model.notes) == 1
        model.generate([5] * 80, max_tokens=20, temperature=0, ignore_eos=True)
    assert len(store.load().records) == 1


def test_a_home_that_cannot_be_written_does_not_break_a_run(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    with Hybrid(tiny, n_ctx=256) as model:
        assert len(model.generate([5] * 80, max_tokens=20, temperature=0, ignore_eos=True).tokens) == 20
