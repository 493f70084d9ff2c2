"""Every KV strategy against full attention over everything a sequence ever held."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.errors import BadRequestError, OutOfMemoryError
from hybrid.head import attention
from hybrid.head.kv import host
from hybrid.head.kv.base import QKV, KVCache
from hybrid.head.kv.bus import Bus
from hybrid.head.kv.cache import open_cache
from hybrid.head.kv.state import MAGIC, PREFIX
from hybrid.head.memory import LiveBytes
from hybrid.model.spec import FfnSpec, LayerSpec
from hybrid.schedule import kv_tiers
from hybrid.schedule.kv_tiers import kv_staging, tiers
from hybrid.schedule.ledger import cached_tokens, kv_bytes_per_token
from hybrid.schedule.placement import KVDtype, Placement
from tests.head.test_attention import definition

CPU = torch.device("cpu")
N_CTX, N_BATCH, N_SEQUENCES = 40, 6, 3
WINDOWS = (0, 1, 5, 9)


def layer(index: int, window: int) -> LayerSpec:
    """Two KV heads for four heads; keys of 8 values, values of 4."""
    return LayerSpec(index, 4, 2, 8, 4, window, None, FfnSpec("silu", 1), 0.3, {})


LAYERS = [layer(i, window) for i, window in enumerate(WINDOWS)]
PLACEMENT = Placement(
    device="cpu", n_gpu_layers=len(LAYERS), n_ctx=N_CTX, n_batch=N_BATCH, n_sequences=N_SEQUENCES, kv_dtype="f32"
)

A_TOKEN = 4 * 2 * (8 + 4) * N_SEQUENCES
"""Bytes of a token of every sequence in one layer."""
STRATEGIES: dict[str, dict[str, Any]] = {
    "device": {},
    "stream": {"kv": "stream"},
    "stream, windows too": {"kv": "stream", "kv_keep_sliding": False},
    "attend": {"kv": "attend"},
    "attend, windows too": {"kv": "attend", "kv_keep_sliding": False},
    "tiered without limit": {"kv": "tiered"},
    "tiered without room": {"kv": "tiered", "kv_budget": 0},
    "tiered": {"kv": "tiered", "kv_budget": 12 * A_TOKEN},
    "tiered, windows too": {"kv": "tiered", "kv_budget": 4 * 4 * A_TOKEN + 40, "kv_keep_sliding": False},
}
"""Every way of placing the cache; the last two keep 12 and 4 tokens of each sequence on the device."""


class Everything:
    """What a cache should do: each sequence's whole history, attended to by the definition."""

    def __init__(self) -> None:
        self.k = [[np.zeros((0, 2, 8), np.float32) for _ in LAYERS] for _ in range(N_SEQUENCES)]
        self.v = [[np.zeros((0, 2, 4), np.float32) for _ in LAYERS] for _ in range(N_SEQUENCES)]

    def length(self, seq: int) -> int:
        return len(self.k[seq][0])

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, seq: int) -> np.ndarray:
        p0 = len(self.k[seq][layer])
        self.k[seq][layer] = np.concatenate([self.k[seq][layer], k])
        self.v[seq][layer] = np.concatenate([self.v[seq][layer], v])
        return definition(q, self.k[seq][layer], self.v[seq][layer], p0, WINDOWS[layer], 0.3, 0.0)

    def cut(self, seq: int, n: int, source: int | None = None) -> None:
        src = seq if source is None else source
        self.k[seq] = [k[:n] for k in self.k[src]]
        self.v[seq] = [v[:n] for v in self.v[src]]


def feed(
    cache: KVCache, parts: list[tuple[int, int, int]], rng: np.random.Generator, oracle: Everything | None
) -> None:
    """Append (sequence, first position, n) parts in one batch to every layer, and compare if there is an oracle."""
    positions = torch.tensor([p0 + i for _, p0, n in parts for i in range(n)])
    seqs = torch.tensor([seq for seq, _, n in parts for _ in range(n)])
    total = len(positions)
    for i in range(len(LAYERS)):
        q = rng.standard_normal((total, 4, 8)).astype(np.float32)
        k = rng.standard_normal((total, 2, 8)).astype(np.float32)
        v = rng.standard_normal((total, 2, 4)).astype(np.float32)
        cache.prefetch(i, positions, seqs)
        got = cache.attend(i, QKV(*map(torch.from_numpy, (q, k, v))), positions, seqs).numpy()
        if oracle is None:
            continue
        start = 0
        for seq, _, n in parts:
            rows = slice(start, start + n)
            want = oracle.attend(i, q[rows], k[rows], v[rows], seq)
            assert np.abs(got[rows] - want).max() < 1e-5
            start += n


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """Blocks that a tiny context has several of, and chunks that are long although they are tiny."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_tiers, "SPILL_TOKENS", 4)
        for module in (host, kv_tiers):
            patch.setattr(module, "SHORT_TOKENS", 3)
        for module in (attention, kv_tiers):
            patch.setattr(module, "CONVERT_BYTES", 4 * 24 * 5)
        yield


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=15, deadline=None)
@given(data=st.data(), swa_full=st.booleans())
def test_any_history_of_chunks_trims_copies_and_restores_attends_as_if_all_were_kept(
    strategy: str, data: st.DataObject, swa_full: bool
) -> None:
    placement = replace(PLACEMENT, swa_full=swa_full, **STRATEGIES[strategy])
    cache, oracle = open_cache(LAYERS, placement, CPU), Everything()
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    longest = [0] * N_SEQUENCES  # that each sequence has been since it was empty: a ring may have lost what was before
    for _ in range(data.draw(st.integers(1, 14))):
        seq = data.draw(st.integers(0, N_SEQUENCES - 1))
        action = data.draw(st.sampled_from(["feed", "feed", "feed", "trim", "copy", "restore"]))
        if action == "feed":
            chosen = data.draw(st.lists(st.integers(0, N_SEQUENCES - 1), min_size=1, max_size=3, unique=True))
            parts = [(s, oracle.length(s), data.draw(st.integers(1, N_BATCH))) for s in chosen]
            parts = [part for part in parts if part[1] + part[2] <= N_CTX]
            if parts:
                feed(cache, parts, rng, oracle)
        elif action == "trim":
            n = data.draw(st.integers(0, oracle.length(seq)))
            kept = cache.trim(seq, n)
            assert kept in (n, 0)
            if swa_full or n == oracle.length(seq) or longest[seq] <= N_BATCH:
                assert kept == n  # nothing can have been lost
            oracle.cut(seq, kept)
        elif action == "copy":
            dst, n = data.draw(st.integers(0, N_SEQUENCES - 1)), data.draw(st.integers(0, oracle.length(seq)))
            try:
                cache.copy(seq, dst, n)
            except BadRequestError:
                assert not swa_full
                assert n < oracle.length(seq)
            else:
                oracle.cut(dst, n, source=seq)
                longest[dst] = longest[seq]
        else:
            dst = data.draw(st.integers(0, N_SEQUENCES - 1))
            assert cache.load(dst, cache.save(seq)) == oracle.length(seq)
            oracle.cut(dst, oracle.length(seq), source=seq)
            longest[dst] = longest[seq]
        longest = [max(n, oracle.length(s)) if oracle.length(s) else 0 for s, n in enumerate(longest)]
    feed(cache, [(s, oracle.length(s), 1) for s in range(N_SEQUENCES) if oracle.length(s) < N_CTX], rng, oracle)


@pytest.mark.parametrize("swa_full", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_bytes_on_the_device_are_each_layers_room(swa_full: bool, dtype: KVDtype) -> None:
    placement = replace(PLACEMENT, swa_full=swa_full, kv_dtype=dtype)
    cache = open_cache(LAYERS, placement, CPU)
    by_hand = sum(N_SEQUENCES * cached_tokens(spec, placement) * kv_bytes_per_token(spec, dtype) for spec in LAYERS)
    assert cache.nbytes == by_hand
    feed(cache, [(0, 0, N_BATCH)], np.random.default_rng(0), None)
    assert cache.nbytes == by_hand


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_bytes_on_both_sides_are_the_ledgers(strategy: str, dtype: KVDtype) -> None:
    placement = replace(PLACEMENT, kv_dtype=dtype, **STRATEGIES[strategy])
    with LiveBytes() as count:
        cache = open_cache(LAYERS, placement, CPU)
    between = kv_staging(LAYERS, placement)
    rows = [N_SEQUENCES * kv_bytes_per_token(spec, dtype) for spec in LAYERS]
    found = tiers(LAYERS, placement)
    assert cache.nbytes == sum(t.device * size for t, size in zip(found, rows, strict=True)) + between[0]
    assert cache.host_nbytes == sum(t.host * size for t, size in zip(found, rows, strict=True)) + between[1]
    assert count.now == cache.nbytes  # an emulated device's bytes are told from the host's


def test_a_trim_past_the_window_empties_the_sequence_and_no_other() -> None:
    cache, rng = open_cache(LAYERS, PLACEMENT, CPU), np.random.default_rng(0)
    for p0 in range(0, 36, N_BATCH):
        feed(cache, [(0, p0, N_BATCH), (1, p0, N_BATCH)], rng, None)
    assert cache.trim(1, 33) == 33
    assert cache.trim(0, 2) == 0
    assert cache.length(0) == 0
    assert cache.length(1) == 33


def test_a_forward_that_stopped_between_layers_can_be_trimmed_away() -> None:
    cache, rng, oracle = open_cache(LAYERS, PLACEMENT, CPU), np.random.default_rng(0), Everything()
    feed(cache, [(0, 0, 5)], rng, oracle)
    x = torch.ones(2, 4, 8), torch.ones(2, 2, 8), torch.ones(2, 2, 4)
    cache.attend(0, QKV(*x), torch.tensor([5, 6]), torch.tensor([0, 0]))
    assert cache.trim(0, 5) == 5
    feed(cache, [(0, 5, 3)], rng, oracle)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([(0, 1, 1)], "does not continue"),
        ([(0, 0, N_BATCH + 1)], "batch size"),
        ([(0, N_CTX, 1)], "context of 40"),
        ([(N_SEQUENCES, 0, 1)], "no sequence 3"),
        ([(-1, 0, 1)], "no sequence -1"),
    ],
)
def test_a_batch_that_cannot_be_stored_is_refused(parts: list[tuple[int, int, int]], message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        feed(open_cache(LAYERS, PLACEMENT, CPU), parts, np.random.default_rng(0), None)


def test_a_cache_that_does_not_fit_names_the_bytes() -> None:
    placement = replace(PLACEMENT, n_ctx=1 << 44)
    by_hand = sum(N_SEQUENCES * cached_tokens(spec, placement) * kv_bytes_per_token(spec, "f32") for spec in LAYERS)
    with pytest.raises(OutOfMemoryError, match=f"{by_hand:,} bytes"):
        open_cache(LAYERS, placement, CPU)


def test_a_cache_in_host_memory_that_does_not_fit_names_its_bytes() -> None:
    placement = replace(PLACEMENT, n_ctx=1 << 44, kv="attend")
    with pytest.raises(OutOfMemoryError, match=f"{N_SEQUENCES * (8 * 2 * 4) << 44:,} bytes"):
        open_cache(LAYERS[:1], placement, CPU)


def test_memory_that_cannot_be_pinned_is_used_all_the_same_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = Bus(CPU)
    monkeypatch.setattr(bus, "_cuda", True)
    monkeypatch.setattr("hybrid.head.kv.bus.register", lambda memory: "CUDA error 2")
    cache = open_cache(LAYERS, replace(PLACEMENT, kv="attend", kv_keep_sliding=False), CPU, bus)
    feed(cache, [(0, 0, 5)], np.random.default_rng(0), Everything())
    (note,) = cache.notes
    assert "could not be pinned (CUDA error 2)" in note
    cache.close()


class TestState:
    """Saved states: what fits is taken, anything else is refused."""

    @pytest.fixture
    def state(self) -> bytes:
        cache, rng = open_cache(LAYERS, PLACEMENT, CPU), np.random.default_rng(0)
        for p0 in (0, 6, 12, 18):
            feed(cache, [(1, p0, 6)], rng, None)
        return cache.save(1)

    def test_saving_a_loaded_state_gives_the_same_bytes(self, state: bytes) -> None:
        cache = open_cache(LAYERS, PLACEMENT, CPU)
        assert cache.load(2, state) == 24
        assert cache.save(2) == state

    @pytest.mark.parametrize("dtype", ["f16", "bf16"])
    def test_half_precision_survives(self, dtype: str) -> None:
        cache, rng = open_cache(LAYERS, replace(PLACEMENT, kv_dtype=dtype), CPU), np.random.default_rng(0)
        feed(cache, [(0, 0, 6)], rng, None)
        assert cache.load(1, cache.save(0)) == 6
        assert cache.save(1) == cache.save(0)

    def test_an_empty_sequence_can_be_saved(self) -> None:
        cache = open_cache(LAYERS, PLACEMENT, CPU)
        assert cache.load(1, cache.save(0)) == 0

    def test_a_state_fits_a_cache_of_another_context_and_batch_size(self, state: bytes) -> None:
        cache = open_cache(LAYERS, replace(PLACEMENT, n_ctx=24, n_batch=3), CPU)
        assert cache.load(0, state) == 24
        assert cache.trim(0, 23) == 23

    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    def test_damaged_bytes_are_refused(self, data: st.DataObject) -> None:
        cache = open_cache(LAYERS, PLACEMENT, CPU)
        feed(cache, [(0, 0, 6)], np.random.default_rng(0), None)
        state = cache.save(0)
        at = data.draw(st.integers(0, len(state) - 1))
        damaged = state[:at] + bytes([state[at] ^ data.draw(st.integers(1, 255))]) + state[at + 1 :]
        for bad in (damaged, state[:at], state + b"x"):
            with pytest.raises(BadRequestError):
                cache.load(1, bad)
        assert cache.length(1) == 0

    @pytest.mark.parametrize("header", [b"[" * 20_000, b"\xff", b"[]"])
    def test_a_header_that_was_made_to_be_trusted_is_not(self, header: bytes) -> None:
        forged = PREFIX.pack(MAGIC, len(header), zlib.crc32(header)) + header
        with pytest.raises(BadRequestError, match="its header makes no sense"):
            open_cache(LAYERS, PLACEMENT, CPU).load(0, forged)

    @pytest.mark.parametrize(
        ("placement", "layers", "message"),
        [
            (replace(PLACEMENT, kv_dtype="f16"), LAYERS, "dtype"),
            (PLACEMENT, LAYERS[:-1], "layers"),
            (PLACEMENT, [*LAYERS[:-1], replace(LAYERS[-1], n_kv_heads=4)], "layers"),
            (replace(PLACEMENT, n_ctx=20), LAYERS, "24 tokens"),
        ],
    )
    def test_a_state_of_another_shape_is_refused(
        self, state: bytes, placement: Placement, layers: list[LayerSpec], message: str
    ) -> None:
        with pytest.raises(BadRequestError, match=message):
            open_cache(layers, placement, CPU).load(0, state)
