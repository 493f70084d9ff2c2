"""The KV cache to the byte: the figures users check us against."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid.schedule.kv_size import kv_bytes, kv_bytes_per_token, llama_cells
from hybrid.schedule.kv_tiers import SPILL_TOKENS, Traffic, bucket_tokens, step_traffic
from hybrid.schedule.ledger import ledger_of
from hybrid.schedule.placement import Placement
from hybrid.schedule.shape import parse_shape, shape_spec

GIB = 1 << 30
LLAMA_3_8B = shape_spec(parse_shape("layers=32,kv_heads=8,head_dim=128"))
ALL_ON_GPU = Placement(device="cuda", n_gpu_layers=32, n_ctx=8192)


def kv(placement: Placement) -> int:
    """All KV bytes of a Llama-3-8B."""
    return ledger_of(LLAMA_3_8B, placement).kv_bytes


def test_one_sequence_of_8192_tokens_is_one_gib() -> None:
    assert kv(ALL_ON_GPU) == 1_073_741_824 == GIB
    assert kv_bytes(LLAMA_3_8B, ALL_ON_GPU) == GIB


def test_twice_the_tokens_or_twice_the_sequences_is_two_gib() -> None:
    assert kv(replace(ALL_ON_GPU, n_ctx=16384)) == 2 * GIB
    assert kv(replace(ALL_ON_GPU, n_sequences=2)) == 2 * GIB


@pytest.mark.parametrize("k", [0, 1, 17, 32])
def test_it_is_one_gib_wherever_the_split_is(k: int) -> None:
    assert kv(replace(ALL_ON_GPU, n_gpu_layers=k)) == GIB


def test_128000_tokens_of_a_llama_3_8b() -> None:
    layer = LLAMA_3_8B.layers[0]
    assert kv_bytes_per_token(layer, "f16") == 4096
    assert kv_bytes_per_token(layer, "f16") // 2 * 128_000 == 262_144_000  # K alone
    placement = replace(ALL_ON_GPU, n_ctx=128_000)
    assert kv_bytes(LLAMA_3_8B, placement, 0, 1) == 524_288_000
    assert kv(placement) == 16_777_216_000


def test_a_byte_count_of_each_cache_type() -> None:
    layer = LLAMA_3_8B.layers[0]
    assert [kv_bytes_per_token(layer, t) for t in ("f32", "f16", "bf16", "q8_0")] == [8192, 4096, 4096, 2176]  # type: ignore[arg-type]


def test_windowed_layers_stop_growing() -> None:
    spec = shape_spec(parse_shape("layers=6,kv_heads=1,heads=4,head_dim=256,window=512,pattern=6"))
    assert [layer.window for layer in spec.layers] == [512] * 5 + [0]

    def sizes(n_ctx: int, **other: object) -> tuple[int, ...]:
        placement = Placement(device="cuda", n_gpu_layers=6, n_ctx=n_ctx, n_batch=128, **other)  # type: ignore[arg-type]
        return ledger_of(spec, placement).device.dynamic.kv

    assert sizes(32768) == (640 * 1024,) * 5 + (32768 * 1024,)
    assert sizes(65536)[:5] == sizes(32768)[:5]
    assert sizes(256)[0] == 256 * 1024
    assert sizes(32768, swa_full=True) == (32768 * 1024,) * 6
    assert sizes(32768, n_sequences=4) == tuple(4 * n for n in sizes(32768))


def test_llama_cpp_rounds_its_cells_up_to_256() -> None:
    spec = shape_spec(parse_shape("layers=6,kv_heads=1,heads=4,head_dim=256,window=512,pattern=6"))
    windowed, everywhere = spec.layers[0], spec.layers[5]
    placement = Placement(device="cpu", n_gpu_layers=0, n_ctx=1000, n_batch=128, n_ubatch=128)
    assert llama_cells(everywhere, placement) == 1024
    assert llama_cells(windowed, placement) == 768  # 512 + 128 rounded up
    assert llama_cells(everywhere, replace(placement, n_sequences=3, kv_unified=True)) == 3072
    assert ledger_of(spec, placement).host.dynamic.kv == (768 * 1024,) * 5 + (1024 * 1024,)


def test_a_kv_strategy_moves_the_same_bytes_to_the_host() -> None:
    base = replace(ALL_ON_GPU, n_ctx=4096)
    device = ledger_of(LLAMA_3_8B, base)
    for strategy in ("stream", "attend"):
        moved = ledger_of(LLAMA_3_8B, replace(base, kv=strategy))
        assert sum(moved.device.dynamic.kv) == 0
        assert moved.host.dynamic.kv == device.device.dynamic.kv
    stream = ledger_of(LLAMA_3_8B, replace(base, kv="stream"))
    # One layer arrives while one is read, and the rows of eight new tokens leave.
    assert stream.device.dynamic.staging == 2 * device.device.dynamic.kv[0] + 8 * 32 * 4096


def test_recorded_copies_come_in_buckets_an_eighth_too_large_at_most() -> None:
    assert [bucket_tokens(n) for n in (0, 1, 256, 257, 2048, 2049, 2305, 8191, 8192, 8193)] == [
        256, 256, 256, 512, 2048, 2304, 2560, 8192, 8192, 9216,
    ]  # fmt: skip
    for n in range(2048, 200_000, 77):
        assert n <= bucket_tokens(n) <= n * 9 / 8
        assert bucket_tokens(bucket_tokens(n)) == bucket_tokens(n)
    placed = replace(ALL_ON_GPU, n_ctx=8192, kv="stream")
    row = 32 * 4096  # of all layers
    assert step_traffic(LLAMA_3_8B, placed, 5000) == Traffic(5000 * row, row)
    assert step_traffic(LLAMA_3_8B, placed, 5000, recorded=True) == Traffic(5120 * row, row)
    assert step_traffic(LLAMA_3_8B, placed, 8191, recorded=True) == Traffic(8191 * row, row)


def test_tiered_keeps_what_its_budget_allows() -> None:
    base = replace(ALL_ON_GPU, n_ctx=4096, kv="tiered")
    everything = 4096 * 32 * 4096
    a_block = SPILL_TOKENS * 32 * 4096
    for budget, here in ((None, everything), (0, 0), (100 << 20, 96 << 20), (1 << 40, everything)):
        ledger = ledger_of(LLAMA_3_8B, replace(base, kv_budget=budget))
        assert sum(ledger.device.dynamic.kv) == here  # 100 MiB are 800 tokens, or 12 whole blocks and a half
        assert ledger.kv_bytes == everything + (a_block if 0 < here < everything else 0)


def test_windowed_layers_stay_on_the_device_unless_they_are_told_to_go() -> None:
    spec = shape_spec(parse_shape("layers=6,kv_heads=1,heads=4,head_dim=256,window=512,pattern=6"))
    base = Placement(device="cuda", n_gpu_layers=6, n_ctx=8192, kv="stream")
    assert len(ledger_of(spec, base).device.dynamic.kv) == 5
    assert len(ledger_of(spec, replace(base, kv_keep_sliding=False)).device.dynamic.kv) == 0
