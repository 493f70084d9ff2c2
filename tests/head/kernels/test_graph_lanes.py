"""What a recorded step queues waits as it must: the parts of a step, run with copies that come as late as they may."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybrid.head.kernels.choice import Kernels
from hybrid.head.kernels.variant import Variant
from hybrid.head.kv.base import QKV
from hybrid.head.kv.cache import LayeredKVCache, open_cache
from hybrid.head.kv.device import OnDevice
from hybrid.head.kv.stream import Mail
from hybrid.head.segments import Inputs
from hybrid.schedule import kv_tiers
from hybrid.schedule.placement import Placement
from tests.head.lanes import LateLane, Witness
from tests.head.test_kv_strategies import CPU, layers, placement

SPECS = layers(1, 2, (0, 7, 0), 0.0)


@pytest.fixture(autouse=True)
def on_the_cpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type != "cpu":
        pytest.skip("a GPU keeps the order of its lanes by itself")
    monkeypatch.setattr(kv_tiers, "BUCKET_TOKENS", 4)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Witness:
    """It sees kernels too: they read all they are given, and that which stores writes its rings. What the host puts
    into its own rings is no lane's work."""
    witness, launch, deliver = Witness(), Variant.launch, Mail.deliver

    def delivered(mail: Mail) -> None:
        with witness.aside():
            deliver(mail)

    def launched(variant: Variant, grid: tuple[int, ...], *args: Any) -> None:
        witness.compute.time += 1
        for i, arg in enumerate(args):
            if isinstance(arg, torch.Tensor):
                witness.touches(witness.compute, arg, write=variant.name.startswith("rope") and i in (7, 8))
        with witness.aside():
            launch(variant, grid, *args)

    monkeypatch.setattr(Variant, "launch", launched)
    monkeypatch.setattr(Mail, "deliver", delivered)
    return witness


def recorded_step(cache: LayeredKVCache, positions: torch.Tensor, seqs: torch.Tensor, given: list[QKV]) -> list[Any]:
    """As `hybrid.head.segments.cut` puts it together, without a model around it."""
    stretches = cache.stretches(positions, seqs)
    inputs, out = Inputs(cache.recorded_for(stretches), 1, CPU), []
    located = inputs.write(torch.zeros(len(seqs), 1), {}, stretches)
    cache.enter(located)
    cache.begin()
    cache.fetch(0, inputs.stretches)
    for i, (kv, qkv) in enumerate(zip(cache.layers, given, strict=True)):
        if i + 1 < len(given):
            cache.fetch(i + 1, inputs.stretches)
        if isinstance(kv, OnDevice):
            out.append(kv.attend(inputs.stretches, qkv))
        else:
            kv.ask(kv.prepare(qkv))
            kv.answer(located, qkv.sinks)
            out.append(kv.receive(len(seqs)))
    cache.end(len(seqs))
    cache.leave(located)
    return out


def late(placed: Placement, witness: Witness) -> bool:
    """A prompt launched, steps recorded, again: whether every output was what `device` computes."""
    ours = open_cache(SPECS, placed, CPU, witness.bus, Kernels(2))
    theirs = open_cache(SPECS, replace(placed, kv="device"), CPU)
    for slot in ours._slots:
        witness.watch(slot.buffer.fill_(0xFF))
    for kv in ours.layers:
        ring = getattr(kv, "ring", None) or kv.far
        witness.watch(ring.k)
        witness.watch(ring.v)
    random, right = torch.Generator().manual_seed(3), True
    for parts in ([(0, 9)], [(0, 1)], [(0, 1), (1, 1)], [(0, 1), (1, 1)], [(0, 9)], [(1, 2)]):
        starts = [theirs.length(seq) for seq, _ in parts]
        positions = torch.tensor([p0 + i for p0, (_, n) in zip(starts, parts, strict=True) for i in range(n)])
        seqs = torch.tensor([seq for seq, n in parts for _ in range(n)])
        given = [
            QKV(*(torch.randn(len(seqs), *shape, generator=random) for shape in ((2, 32), (1, 32), (1, 64))))
            for _ in SPECS
        ]
        want = [theirs.attend(i, qkv, positions, seqs) for i, qkv in enumerate(given)]
        with witness:
            if parts[0][1] < 9:
                got = recorded_step(ours, positions, seqs, given)
            else:
                got = [ours.attend(i, qkv, positions, seqs) for i, qkv in enumerate(given)]
        right = right and all(bool((a - b).abs().max() < 1e-4) for a, b in zip(got, want, strict=True))
    with witness.aside():
        return right and all(ours.save(seq) == theirs.save(seq) for seq in (0, 1))


@pytest.mark.parametrize("kv", ["stream", "attend"])
def test_recorded_copies_are_waited_for(kv: str, watched: Witness) -> None:
    assert late(placement(SPECS, "f32", {"kv": kv, "kv_keep_sliding": False}, None), watched)
    assert watched.objections == []
    assert watched.checked > 10


@pytest.mark.parametrize("who", [pytest.param("compute", marks=pytest.mark.slow), "side"])
def test_a_lane_that_does_not_wait_is_found_out(who: str, watched: Witness, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = LateLane.wait
    monkeypatch.setattr(LateLane, "wait", lambda self, mark: None if self.name == who else wait(self, mark))
    late(placement(SPECS, "f32", {"kv": "stream", "kv_keep_sliding": False}, None), watched)
    assert watched.objections
