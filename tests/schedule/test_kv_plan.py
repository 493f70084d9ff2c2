"""What a request for a KV strategy becomes: budgets, threads, and what is refused before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hybrid.errors import BadRequestError, OutOfMemoryError, UnsupportedError
from hybrid.schedule import auto, scheduler
from hybrid.schedule.kv_checks import kv_refusal
from hybrid.schedule.ledger import ledger_of
from hybrid.schedule.placement import KV_STRATEGIES, Placement
from hybrid.schedule.scheduler import Request, plan
from hybrid.schedule.shape import parse_shape, shape_spec
from hybrid.schedule.shares import with_threads
from tests.schedule.test_plan import GIB, LLAMA_3_8B, with_gpu

GEMMA = shape_spec(parse_shape("layers=6,kv_heads=1,heads=4,head_dim=256,window=512,pattern=6"))


def placed(**request: Any) -> Placement:
    return plan(LLAMA_3_8B, Request(**{"n_gpu_layers": "all", "n_ctx": 32768, **request})).placement


def test_tiered_takes_the_vram_that_the_rest_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, 8 * GIB)
    placement = placed(kv="tiered", vram_reserve=GIB)
    assert placement.kv_budget is not None
    used = ledger_of(LLAMA_3_8B, placement).vram_bytes
    assert used <= 7 * GIB < used + 64 * 32 * 4096  # no other block of 64 tokens fits
    assert ledger_of(LLAMA_3_8B, replace(placement, kv="device")).vram_bytes > 7 * GIB


def test_tiered_is_device_where_everything_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, 24 * GIB)
    placement = placed(kv="tiered")
    assert placement.kv_budget is None
    ledger, device = (ledger_of(LLAMA_3_8B, replace(placement, kv=kv)) for kv in ("tiered", "device"))  # type: ignore[arg-type]
    assert ledger.vram_bytes == device.vram_bytes


def test_a_budget_that_is_given_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, 24 * GIB)
    assert placed(kv="tiered", kv_budget=GIB).kv_budget == GIB
    assert placed(kv="tiered", kv_budget=0).kv_budget == 0


def test_a_strategy_without_a_head_is_said_to_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (scheduler, auto):
        monkeypatch.setattr(module, "ram_budget", lambda: 64 * GIB)
    for kv in KV_STRATEGIES:
        notes = plan(LLAMA_3_8B, Request(n_gpu_layers=0, n_ctx=512, kv=kv)).notes
        assert any(f"--kv {kv} changes nothing" in note for note in notes) == (kv != "device")


def test_auto_layers_come_before_the_recent_part_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, 7 * GIB)
    tiered, device = (placed(kv=kv, n_gpu_layers="auto") for kv in ("tiered", "device"))
    assert tiered.n_gpu_layers == 32 > device.n_gpu_layers


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"kv": "attend", "kv_budget": 1}, "--kv tiered"),
        ({"kv": "tiered", "kv_budget": -1}, "0 or more"),
        ({"kv": "tiered", "kv_budget": "much"}, "whole number of bytes"),
        ({"kv": "cloud"}, "one of device, stream, attend, tiered"),
        ({"kv_dtype": "q4_0"}, "one of f32, f16, bf16, q8_0"),
    ],
)
def test_a_senseless_request_is_one_sentence(request_: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        placed(device="cpu", **request_)


def test_a_cache_that_the_ram_cannot_hold_is_refused_under_every_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    for kv in KV_STRATEGIES:
        for module in (scheduler, auto):
            monkeypatch.setattr(module, "ram_budget", lambda: 1 << 60)
        enough = ledger_of(LLAMA_3_8B, placed(device="cpu", kv=kv)).ram_bytes
        for module in (scheduler, auto):
            monkeypatch.setattr(module, "ram_budget", lambda enough=enough: enough)
        placed(device="cpu", kv=kv)
        with pytest.raises(OutOfMemoryError, match="of RAM"):
            placed(device="cpu", kv=kv, n_ctx=131072)


@pytest.mark.parametrize("kv", KV_STRATEGIES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_pools_that_work_at_the_same_time_never_exceed_the_cores(kv: Any, device: str) -> None:
    for cores in (2, 3, 8, 64):
        for k in range(33):
            p = with_threads(Placement(device=device, n_gpu_layers=k, n_ctx=512, kv=kv), LLAMA_3_8B, cores)
            assert min(p.n_threads_head, p.n_threads_tail, p.n_threads_tail_batch, p.n_threads_attend) >= 1
            assert max(p.n_threads_tail, p.n_threads_attend) <= cores  # decode: one after the other
            if 0 < k < 32:
                assert p.n_threads_head + p.n_threads_tail_batch <= cores  # prefill
            if k and kv == "tiered":
                near = min(p.n_threads_head, p.n_threads_attend)  # what the cache leaves an emulated device meanwhile
                assert near + p.n_threads_attend <= cores  # both parts at once


@pytest.mark.parametrize("kv", KV_STRATEGIES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_strategy_takes_no_core_from_what_is_no_attention(kv: Any, device: str) -> None:
    for cores in (1, 2, 3, 8):
        for k in (0, 1, 16, 32):
            p = Placement(device=device, n_gpu_layers=k, n_ctx=512)
            heads = {with_threads(replace(p, kv=name), LLAMA_3_8B, cores).n_threads_head for name in ("device", kv)}
            assert len(heads) == 1


@pytest.mark.parametrize("kv", KV_STRATEGIES)
def test_q8_0_needs_heads_of_whole_blocks_in_either_half(kv: Any) -> None:
    odd = shape_spec(parse_shape("layers=2,kv_heads=2,head_dim=80"))
    for k in (0, 1, 2):
        with pytest.raises(UnsupportedError, match="blocks of 32 values"):
            plan(odd, Request(n_gpu_layers=k, device="cpu", n_ctx=512, kv=kv, kv_dtype="q8_0"))
        plan(odd, Request(n_gpu_layers=k, device="cpu", n_ctx=512, kv=kv, kv_dtype="bf16"))


def test_quantised_values_without_flash_attention_are_refused() -> None:
    grok = replace(LLAMA_3_8B, architecture="grok")
    split = Placement(device="cpu", n_gpu_layers=16, n_ctx=512, kv_dtype="q8_0")
    assert "flash attention" in (kv_refusal(grok, split) or "")
    assert kv_refusal(grok, replace(split, n_gpu_layers=32)) is None  # llama.cpp has no cache then
    assert kv_refusal(LLAMA_3_8B, split) is None


def test_windowed_layers_do_not_count_against_the_budget() -> None:
    base = Placement(device="cuda", n_gpu_layers=6, n_ctx=8192, n_batch=128, kv="tiered", kv_budget=1 << 20)
    kept, moved = (ledger_of(GEMMA, replace(base, kv_keep_sliding=keep)).device.dynamic.kv for keep in (True, False))
    assert kept == (640 * 1024,) * 5 + (1 << 20,)
    assert sum(moved) <= 1 << 20
