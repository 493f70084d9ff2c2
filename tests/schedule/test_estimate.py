"""Which earlier measurements are of a placement, and which are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid.schedule.cost import CostModel
from hybrid.schedule.cost_prior import assumed_rates
from hybrid.schedule.estimate import Estimate, same_speed
from hybrid.schedule.kv_size import kv_bytes_per_token
from hybrid.schedule.kv_tiers import SPILL_TOKENS, by_what_it_holds, tiers
from hybrid.schedule.own_offload import stand_in
from hybrid.schedule.placement import Placement
from hybrid.schedule.presets import assumed_machine
from hybrid.schedule.profile import Record
from hybrid.schedule.shape import parse_shape, shape_spec

SPEC = shape_spec(parse_shape("layers=32,kv_heads=8,head_dim=128"))
WINDOWED = shape_spec(parse_shape("layers=12,kv_heads=1,heads=4,head_dim=256,window=512,pattern=6"))
TIERED = Placement(device="cuda", n_gpu_layers=20, n_ctx=8192, kv="tiered", kv_budget=601 << 20)
A_BLOCK = 20 * SPILL_TOKENS * kv_bytes_per_token(SPEC.layers[0], "f16")


def of(placement: Placement, seconds: float) -> Record:
    return Record(placement=placement, source="tune", at="2026-01-01T00:00:00+00:00", depth=4096, decode_s=(seconds,))


def estimate(placement: Placement, *records: Record) -> Estimate:
    machine = assumed_machine("rtx3070ti")
    return Estimate(CostModel(SPEC, machine, assumed_rates(machine, "cuda")), [placement], records, 4096)


def test_tiered_is_known_by_what_its_budget_holds_and_not_by_the_byte() -> None:
    a_few_bytes_less = replace(TIERED, kv_budget=TIERED.kv_budget - 12345)  # type: ignore[operator]
    assert tiers(SPEC.layers[:20], a_few_bytes_less) == tiers(SPEC.layers[:20], TIERED)
    a_block_less = replace(TIERED, kv_budget=TIERED.kv_budget - A_BLOCK)  # type: ignore[operator]
    found = estimate(TIERED, of(a_few_bytes_less, 0.1), of(a_block_less, 0.2))
    assert [seen.seconds for seen in found.observations] == [0.1]
    assert [record.decode_s for record in found.records_of(0)] == [(0.1,)]


def test_a_budget_that_holds_everything_is_one_that_has_no_limit() -> None:
    whole = replace(TIERED, kv_budget=None)
    assert same_speed(replace(TIERED, kv_budget=1 << 40), "latency", SPEC) == same_speed(whole, "latency", SPEC)
    assert same_speed(replace(TIERED, kv_budget=0), "latency", SPEC) != same_speed(whole, "latency", SPEC)


@pytest.mark.parametrize("spec", [SPEC, WINDOWED])
@pytest.mark.parametrize("keep", [True, False])
def test_two_that_hold_the_same_have_the_same_tiers(spec: object, keep: bool) -> None:
    layers = spec.layers[:10]  # type: ignore[attr-defined]
    base = replace(TIERED, n_gpu_layers=10, kv_keep_sliding=keep)
    by_tiers: dict[object, set[Placement]] = {}
    for budget in (None, *range(0, 300 << 20, 7 << 20)):
        p = replace(base, kv_budget=budget)
        by_tiers.setdefault(tuple(tiers(layers, p)), set()).add(by_what_it_holds(spec, p))  # type: ignore[arg-type]
    assert all(len(alike) == 1 for alike in by_tiers.values())
    assert len(set.union(*by_tiers.values())) == len(by_tiers)


def test_a_budget_means_nothing_to_other_strategies() -> None:
    attend = replace(TIERED, kv="attend")
    assert by_what_it_holds(SPEC, attend) == replace(attend, kv_budget=None)


def test_llama_cpps_own_layers_are_predicted_as_a_split_of_as_many() -> None:
    own = Placement(device="cuda", n_gpu_layers=0, n_ctx=8192, llama_gpu_layers=33, offload_kqv=True)
    ours = replace(own, n_gpu_layers=32, llama_gpu_layers=0, offload_kqv=False)
    assert stand_in(SPEC, own) == ours
    assert stand_in(SPEC, replace(own, offload_kqv=False)).kv == "attend"
    assert stand_in(SPEC, TIERED) is TIERED
    (option,) = estimate(own).options
    assert option.predicted_s == pytest.approx(estimate(ours).options[0].predicted_s)
    assert (option.share, option.strategy) == (1.0, ("llama.cpp", 1))


def test_how_far_a_measurement_may_be_off_is_told_by_its_own_stretches() -> None:
    loud = replace(of(TIERED, 0.1), decode_s=(0.25, 0.16, 0.75))
    single, quiet, spread = (seen.spread for seen in estimate(TIERED, of(TIERED, 0.1), alike(3), loud).observations)
    assert single == quiet == 0
    assert 0.4 < spread < 0.5
    assert estimate(TIERED, loud).belief.noise == pytest.approx(spread)


def alike(n: int) -> Record:
    return replace(of(TIERED, 0.1), decode_s=(0.1,) * n)
