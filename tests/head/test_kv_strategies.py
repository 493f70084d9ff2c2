"""Every KV strategy against `device`: precisions, grouped heads, windows, soft caps, sinks, several sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.errors import BadRequestError
from hybrid.head import attention
from hybrid.head.kv import host, tiered
from hybrid.head.kv.base import QKV
from hybrid.head.kv.bus import Moved
from hybrid.head.kv.cache import LayeredKVCache, open_cache
from hybrid.model.spec import FfnSpec, LayerSpec
from hybrid.schedule import kv_tiers
from hybrid.schedule.kv_size import kv_bytes_per_token
from hybrid.schedule.kv_tiers import Traffic, layer_traffic
from hybrid.schedule.placement import KV_DTYPES, KVDtype, Placement

CPU = torch.device("cpu")
N_CTX, N_BATCH, N_SEQUENCES = 60, 12, 2
OTHERS: dict[str, tuple[dict[str, Any], int | None]] = {
    "stream": ({"kv": "stream"}, None),
    "stream, windows too": ({"kv": "stream", "kv_keep_sliding": False}, None),
    "attend": ({"kv": "attend"}, None),
    "attend, windows too": ({"kv": "attend", "kv_keep_sliding": False}, None),
    "tiered, 8 tokens": ({"kv": "tiered"}, 8),
    "tiered, 24 tokens, windows too": ({"kv": "tiered", "kv_keep_sliding": False}, 24),
}
"""Placement, and the tokens of a sequence that its budget keeps on the device."""


@contextmanager
def blocks_of(n_values: int) -> Iterator[None]:
    """Blocks of seven rows of n_values, that a tiny context has several of."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (attention, kv_tiers):
            patch.setattr(module, "CONVERT_BYTES", 4 * n_values * 7)
        patch.setattr(kv_tiers, "SPILL_TOKENS", 4)
        for module in (host, kv_tiers):
            patch.setattr(module, "SHORT_TOKENS", 5)
        yield


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    with blocks_of(64):
        yield


def layers(n_kv_heads: int, group: int, windows: tuple[int, ...], softcap: float) -> list[LayerSpec]:
    """Keys of 32 values and values of 64: one block of q8_0, and two."""
    return [
        LayerSpec(i, n_kv_heads * group, n_kv_heads, 32, 64, window, None, FfnSpec("silu", 1), 0.2, {}, softcap)
        for i, window in enumerate(windows)
    ]


def placement(specs: list[LayerSpec], dtype: KVDtype, chosen: dict[str, Any], tokens: int | None) -> Placement:
    """With a budget that keeps `tokens` tokens of each sequence on the device."""
    base = Placement(
        device="cpu",
        n_gpu_layers=len(specs),
        n_ctx=N_CTX,
        n_batch=N_BATCH,
        n_sequences=N_SEQUENCES,
        kv_dtype=dtype,
        **chosen,
    )
    if tokens is None:
        return base
    moving = [spec for spec in specs if not (spec.window and base.kv_keep_sliding)]
    whole = sum(min(tokens, kv_tiers.cached_tokens(spec, base)) * kv_bytes_per_token(spec, dtype) for spec in moving)
    return replace(base, kv_budget=N_SEQUENCES * whole)


class Pair:
    """The same batches through two caches, whose outputs must agree."""

    def __init__(self, specs: list[LayerSpec], ours: Placement, sinks: bool, seed: int) -> None:
        self.specs = specs
        self.caches = [open_cache(specs, p, CPU) for p in (replace(ours, kv="device", kv_budget=None), ours)]
        self.random = torch.Generator().manual_seed(seed)
        self.sinks = [torch.randn(spec.n_heads, generator=self.random) if sinks else None for spec in specs]

    @property
    def ours(self) -> LayeredKVCache:
        return self.caches[1]

    def feed(self, parts: list[tuple[int, int]]) -> None:
        """Append n tokens to each sequence: (sequence, n)."""
        starts = [self.ours.length(seq) for seq, _ in parts]
        positions = torch.tensor([p0 + i for p0, (_, n) in zip(starts, parts, strict=True) for i in range(n)])
        seqs = torch.tensor([seq for seq, n in parts for _ in range(n)])
        for i, spec in enumerate(self.specs):
            q, k, v = (
                torch.randn(len(seqs), heads, dim, generator=self.random)
                for heads, dim in ((spec.n_heads, 32), (spec.n_kv_heads, 32), (spec.n_kv_heads, 64))
            )
            for cache in self.caches:
                if i + 1 < len(self.specs):
                    cache.prefetch(i + 1, positions, seqs)
            want, got = (cache.attend(i, QKV(q, k, v, self.sinks[i]), positions, seqs) for cache in self.caches)
            torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)

    def decode(self) -> None:
        """One token for each sequence that has room."""
        if parts := [(seq, 1) for seq in range(N_SEQUENCES) if self.ours.length(seq) < N_CTX]:
            self.feed(parts)


@pytest.mark.parametrize("strategy", OTHERS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_every_strategy_attends_as_device_does(strategy: str, data: st.DataObject) -> None:
    specs = layers(
        data.draw(st.sampled_from([1, 2])),
        data.draw(st.sampled_from([1, 3, 4])),
        data.draw(st.sampled_from([(0,), (0, 0, 0), (7, 0, 7), (7, 7, 0, 0), (7, 9)])),
        data.draw(st.sampled_from([0.0, 3.0])),
    )
    chosen = placement(specs, data.draw(st.sampled_from(KV_DTYPES)), *OTHERS[strategy])
    pair = Pair(specs, chosen, data.draw(st.booleans()), data.draw(st.integers(0, 1000)))
    for _ in range(data.draw(st.integers(1, 14))):
        seq = data.draw(st.integers(0, N_SEQUENCES - 1))
        action = data.draw(st.sampled_from(["feed", "feed", "feed", "decode", "trim", "copy", "exchange", "prefetch"]))
        held = pair.ours.length(seq)
        if action == "feed" and held < N_CTX:
            pair.feed([(seq, data.draw(st.integers(1, min(N_BATCH, N_CTX - held))))])
        elif action == "decode":
            pair.decode()
        elif action == "trim":
            n = data.draw(st.integers(0, held))
            kept = [cache.trim(seq, n) for cache in pair.caches]
            assert kept[0] == kept[1]
        elif action == "copy":
            dst, n = data.draw(st.integers(0, N_SEQUENCES - 1)), data.draw(st.integers(0, held))
            outcomes = []
            for cache in pair.caches:
                try:
                    cache.copy(seq, dst, n)
                    outcomes.append(True)
                except BadRequestError:
                    outcomes.append(False)
            assert outcomes[0] == outcomes[1]
        elif action == "prefetch":  # for a batch that never comes
            where = torch.tensor([held]), torch.tensor([seq])
            pair.ours.prefetch(data.draw(st.integers(0, len(specs) - 1)), *where)
        elif action == "exchange":  # each continues what the other has saved
            states = [cache.save(seq) for cache in pair.caches]
            assert states[0] == states[1]
            for cache in pair.caches:
                assert cache.load(seq, states[0]) == held
    pair.decode()


@pytest.mark.parametrize("strategy", OTHERS)
@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_what_a_token_moves_is_what_arithmetic_says(strategy: str, dtype: KVDtype) -> None:
    """Every step of a sequence's growth, counted by the copies themselves."""
    specs = layers(2, 2, (7, 0, 0, 7), 0.0)
    chosen = placement(specs, dtype, *OTHERS[strategy])
    pair, found = Pair(specs, chosen, False, 0), kv_tiers.tiers(specs, chosen)
    moved = pair.ours.moved
    for depth in range(N_CTX):
        before = Traffic(moved.to_device, moved.to_host)
        pair.decode()
        step = [layer_traffic(spec, tier, chosen, depth) for spec, tier in zip(specs, found, strict=True)]
        assert before + sum(step, Traffic()) == Traffic(moved.to_device, moved.to_host), depth
    assert moved.to_device > 0
    assert pair.caches[0].moved == Moved()


def test_stream_fetches_what_is_seen_and_attend_a_few_vectors() -> None:
    """The figures by hand: 2 heads of 32 + 64 values in two bytes, four query heads."""
    (spec,) = layers(2, 2, (0,), 0.0)
    row, sequences = 2 * (32 + 64) * 2, N_SEQUENCES
    for chosen, to_device, to_host in (
        (OTHERS["stream"], 40 * row, row),
        (OTHERS["attend"], 4 * 4 * 64, row + 4 * 4 * 32),
        (OTHERS["tiered, 8 tokens"], 4 * 4 * 65, 4 * row + 4 * 4 * 32),  # the 41st token is one too many
    ):
        placed = placement([spec], "f16", *chosen)
        (tier,) = kv_tiers.tiers([spec], placed)
        assert layer_traffic(spec, tier, placed, 40) == Traffic(sequences * to_device, sequences * to_host)


def test_tiered_shares_the_cores_only_while_the_cpu_attends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until something has spilled no job is begun and nothing is merged; then each side of a step has its cores."""
    specs = layers(2, 2, (0,), 0.0)
    placed = placement(specs, "f16", {"kv": "tiered"}, kv_tiers.SPILL_TOKENS)
    pair = Pair(specs, replace(placed, n_threads_head=2, n_threads_attend=1), False, 0)
    jobs, threads = [], []
    begin, near = host.HostSide.begin, tiered.TieredLayer._near_part

    def began(side: host.HostSide, *parts: Any) -> Any:
        jobs.append(torch.get_num_threads())
        return begin(side, *parts)

    def nearby(layer: tiered.TieredLayer, *parts: Any) -> Any:
        threads.append(torch.get_num_threads())
        return near(layer, *parts)

    monkeypatch.setattr(host.HostSide, "begin", began)
    monkeypatch.setattr(tiered.TieredLayer, "_near_part", nearby)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        while pair.ours.length(0) < kv_tiers.SPILL_TOKENS:
            pair.feed([(0, 1)])
        assert (jobs, threads) == ([], [])
        pair.feed([(0, 1)])
        assert (jobs, threads) == ([2], [1])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("budget", [0, 1, 5000, 20_000, 100_000, 10_000_000])
def test_tiered_keeps_within_its_budget_and_uses_it(budget: int) -> None:
    specs = layers(2, 2, (7, 0, 0, 7), 0.0)
    placed = replace(placement(specs, "f16", {"kv": "tiered", "kv_keep_sliding": False}, None), kv_budget=budget)
    row = N_SEQUENCES * kv_bytes_per_token(specs[0], "f16")
    found = kv_tiers.tiers(specs, placed)
    used = sum(tier.device for tier in found) * row
    assert used <= budget
    whole = sum(kv_tiers.cached_tokens(spec, placed) for spec in specs) * row
    assert used == whole or used + len(specs) * kv_tiers.SPILL_TOKENS * row > budget
