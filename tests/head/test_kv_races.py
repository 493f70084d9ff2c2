"""No strategy reads or writes too early, however late copies arrive: in a buffer's first turn and in every later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from hybrid.head.kv.base import QKV
from hybrid.head.kv.cache import LayeredKVCache, open_cache
from hybrid.model.spec import LayerSpec
from hybrid.schedule.placement import KVDtype, Placement
from tests.head.lanes import At, LateLane, Witness
from tests.head.test_kv_strategies import CPU, OTHERS, blocks_of, layers, placement

SPECS = layers(2, 2, (7, 0, 0, 7, 0, 0, 0), 0.0)


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    with blocks_of(192):
        yield


def buffers(cache: LayeredKVCache) -> list[torch.Tensor]:
    """Those on the device that rows pass through."""
    stages: list[Any] = [*cache._slots, *(cache._host._stages if cache._host else [])]
    return [stage.buffer for stage in stages]


def late(placed: Placement, feeds: list[list[tuple[int, int]]], specs: list[LayerSpec] = SPECS) -> tuple[Witness, bool]:
    """Decode and prefill with copies that come late; whether every output was what `device` computes."""
    witness, right = Witness(), True
    ours = open_cache(specs, placed, CPU, witness.bus)
    theirs = open_cache(specs, replace(placed, kv="device", kv_budget=None), CPU)
    for buffer in buffers(ours):
        witness.watch(buffer.fill_(0xFF))
    for kv in ours.layers:
        for ring in [getattr(kv, name, None) for name in ("ring", "far", "near")]:
            for tensor in (ring.k, ring.v) if ring else ():
                witness.watch(tensor)
    random = torch.Generator().manual_seed(3)
    for turn, parts in enumerate(feeds):
        starts = [theirs.length(seq) for seq, _ in parts]
        positions = torch.tensor([p0 + i for p0, (_, n) in zip(starts, parts, strict=True) for i in range(n)])
        seqs = torch.tensor([seq for seq, n in parts for _ in range(n)])
        ours.prefetch(0, positions, seqs)
        for i, spec in enumerate(specs):
            if i + 1 < len(specs):
                ours.prefetch(i + 1, positions, seqs)
            q, k, v = (
                torch.randn(len(seqs), heads, dim, generator=random)
                for heads, dim in ((spec.n_heads, 32), (spec.n_kv_heads, 32), (spec.n_kv_heads, 64))
            )
            want = theirs.attend(i, QKV(q, k, v), positions, seqs)
            with witness:
                got = ours.attend(i, QKV(q, k, v), positions, seqs)
            right = right and bool((got - want).abs().max() < 1e-4)  # NaN is not
        if turn % 3 == 2:  # what the host does between: it waits for all that is under way
            for cache in (ours, theirs):
                n = cache.length(0) - 1
                cache.trim(0, n)
                cache.copy(0, 1, n)
            right = right and ours.save(1) == theirs.save(1)
            assert ours.load(0, ours.save(1)) == theirs.load(0, theirs.save(1))
    return witness, right


DECODE = [(0, 1), (1, 1)]
FEEDS = [[(0, 9), (1, 1)], [(0, 12)], DECODE, DECODE, [(0, 3)], [(0, 12)], [(0, 1), (1, 9)], DECODE, DECODE]
"""(sequence, tokens) of each batch."""


@pytest.mark.parametrize("dtype", ["f32", "q8_0"])
@pytest.mark.parametrize("strategy", OTHERS)
def test_nothing_is_read_or_overwritten_too_early(strategy: str, dtype: KVDtype) -> None:
    witness, right = late(placement(SPECS, dtype, *OTHERS[strategy]), FEEDS)
    assert witness.objections == []
    assert witness.checked > 100
    assert right


@pytest.mark.parametrize("strategy", OTHERS)
@pytest.mark.parametrize("who", ["compute", "side", "the host"])
def test_whoever_does_not_wait_is_found_out(strategy: str, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above could fail: without the waits of one lane, or of the host, it does."""
    if who == "the host":
        monkeypatch.setattr(At, "synchronize", lambda self: None)
    else:
        wait = LateLane.wait
        monkeypatch.setattr(LateLane, "wait", lambda self, mark: None if self.name == who else wait(self, mark))
    witness, right = late(placement(SPECS, "f32", *OTHERS[strategy]), [[(0, 12)], [(0, 12)], DECODE, [(0, 12)], DECODE])
    assert not right if who == "the host" else witness.objections
