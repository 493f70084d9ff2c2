"""Predictions corrected by what runs of the model took: a true machine that the assumed one does not know."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid.apps.plan import PlanRequest, make_plan
from hybrid.model.spec import ModelSpec
from hybrid.schedule.cost import CostModel
from hybrid.schedule.cost_prior import assumed_rates
from hybrid.schedule.cost_runs import MOST_RUNS, corrected
from hybrid.schedule.placement import Placement
from hybrid.schedule.presets import assumed_machine
from hybrid.schedule.profile import Profile, Record
from hybrid.schedule.rates import HalfRates
from hybrid.schedule.shape import parse_shape, shape_spec

SPEC: ModelSpec = shape_spec(parse_shape("layers=32,kv_heads=8,head_dim=128"))
MACHINE = assumed_machine("rtx3060")


def assumed(device: str) -> CostModel:
    return CostModel(SPEC, MACHINE, assumed_rates(MACHINE, device))


def half(rates: HalfRates, tokens: float, prompts: float) -> HalfRates:
    """A half that is so many times slower at tokens, and at prompts."""
    return replace(
        rates.slower(tokens), flop_per_s=rates.flop_per_s / prompts,
        attention_flop_per_s=rates.attention_flop_per_s / prompts,
    )  # fmt: skip


def true(device: str, head: tuple[float, float], tail: tuple[float, float]) -> CostModel:
    model = assumed(device)
    rates = replace(model.rates, head=half(model.rates.head, *head), tail=half(model.rates.tail, *tail))
    return replace(model, rates=rates)


def run(truth: CostModel, p: Placement, n_prompt: int = 512, depth: int = 600, **changes: object) -> Record:
    """What a generation with `p` would add to the profile."""
    record = Record(
        placement=p, source="run", at="2026-01-01T00:00:00", depth=depth, decode_s=(truth.tpot_s(p, depth),),
        n_prompt=n_prompt, prefill_s=(truth.prefill_s(p, n_prompt),),
    )  # fmt: skip
    return replace(record, **changes)  # type: ignore[arg-type]


def at(k: int, device: str) -> Placement:
    return Placement(device=device, n_gpu_layers=k, n_ctx=4096)


def test_one_run_of_llama_cpp_alone_corrects_the_tail_in_tokens_and_prompts_apart() -> None:
    truth = true("cuda", (1, 1), (1.5, 3.5))
    model, n = corrected(assumed("cuda"), "cuda:0", [run(truth, at(0, "cpu"))])
    assert n == 1
    for k in (0, 10, 20):
        p = at(k, "cuda")
        assert model.tpot_s(p, 2000) == pytest.approx(truth.tpot_s(p, 2000), rel=0.05)
        assert model.prefill_s(p, 2000) == pytest.approx(truth.prefill_s(p, 2000), rel=0.05)
    whole = at(32, "cuda")
    assert model.tpot_s(whole, 2000) == pytest.approx(assumed("cuda").tpot_s(whole, 2000), rel=0.01)
    assert model.prefill_s(whole, 2000) == pytest.approx(assumed("cuda").prefill_s(whole, 2000), rel=0.01)


def test_runs_on_the_device_and_splits_tell_of_their_halves() -> None:
    truth = true("cuda", (2.0, 0.5), (0.7, 1))
    records = [run(truth, at(32, "cuda")), run(truth, at(16, "cuda"), prefill_s=(99.0,))]
    model, n = corrected(assumed("cuda"), "cuda", records)
    assert n == 2
    for k in (0, 16, 32):
        assert model.tpot_s(at(k, "cuda"), 2000) == pytest.approx(truth.tpot_s(at(k, "cuda"), 2000), rel=0.05)
    for k in (0, 32):
        assert model.prefill_s(at(k, "cuda"), 900) == pytest.approx(truth.prefill_s(at(k, "cuda"), 900), rel=0.05)


def test_an_emulated_device_is_as_slow_as_its_host() -> None:
    truth = true("cpu", (2.5, 4), (2.5, 4))
    model, _ = corrected(assumed("cpu"), "cpu", [run(truth, at(0, "cpu"))])
    for k in (0, 16, 32):
        assert model.tpot_s(at(k, "cpu"), 900) == pytest.approx(truth.tpot_s(at(k, "cpu"), 900), rel=0.05)
        assert model.prefill_s(at(k, "cpu"), 900) == pytest.approx(truth.prefill_s(at(k, "cpu"), 900), rel=0.05)


def test_the_youngest_runs_count_and_what_is_of_something_else_does_not() -> None:
    slow, quick = true("cuda", (1, 1), (5, 5)), assumed("cuda")
    records = [run(slow, at(0, "cpu"))] * 20 + [run(quick, at(0, "cpu"))] * MOST_RUNS
    model, n = corrected(assumed("cuda"), "cuda", records)
    assert n == MOST_RUNS
    assert model.tpot_s(at(0, "cpu"), 0) == pytest.approx(quick.tpot_s(at(0, "cpu"), 0))
    other = [
        run(slow, at(0, "cpu"), failure="crashed"),
        run(slow, replace(at(0, "cpu"), llama_gpu_layers=5)),
        run(slow, at(8, "cpu")),
    ]
    model, n = corrected(assumed("cuda"), "cuda", other)
    assert (n, model.rates) == (0, assumed("cuda").rates)


def test_a_plan_says_that_its_speeds_are_corrected() -> None:
    truth = true("cuda", (1, 1), (1.5, 3.5))
    plain, told = (
        make_plan(SPEC, MACHINE, PlanRequest(n_ctx=4096), Profile(records=records))
        for records in ((), (run(truth, at(0, "cpu")),))
    )
    assert "Speeds are corrected by 1 run of this model here." in told.notes
    assert not any("corrected" in note for note in plain.notes)
    ratio = told.candidates[0].ttft_s[2048] / plain.candidates[0].ttft_s[2048]
    assert ratio == pytest.approx(3.5, rel=0.05)
