"""Trial: what a record says, and that JSON keeps all of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hybrid.report.trial import Condition, Failure, PeakMemory, Spread, Trial, first_difference
from hybrid.schedule.placement import Placement

CONDITION = Condition(
    model="m.gguf",
    placement=Placement(device="cpu", n_gpu_layers=2, n_ctx=256, n_sequences=2),
    prompt=(5, 6, 7, 8),
    n_decode=8,
)
TRIAL = Trial(
    condition=CONDITION,
    load_s=1.0,
    ttft_s=(0.5, 0.4),
    decode_s=(0.10, 0.12, 0.11),
    tokens=(1, 2, 3),
    memory=PeakMemory(device_bytes=10, host_bytes=20),
    versions={"hybrid": "0"},
)


def test_a_trial_survives_json() -> None:
    failed = Trial(condition=CONDITION, failure=Failure(kind="killed", message="It was killed.", stage="load"))
    for trial in (TRIAL, failed):
        assert Trial.from_dict(json.loads(json.dumps(trial.to_dict()))) == trial


def test_speeds_count_all_sequences_and_are_medians() -> None:
    assert TRIAL.decode_tok_per_s == pytest.approx(2 / 0.11)
    assert TRIAL.prefill_tok_per_s == pytest.approx(2 * 4 / 0.45)
    assert TRIAL.tpot == Spread(0.11, 0.10, 0.12, 3)
    assert TRIAL.tpot.relative == pytest.approx(0.01 / 0.11)


def test_a_failed_trial_has_no_speed() -> None:
    failed = Trial(condition=CONDITION, failure=Failure(kind="out of memory", message="Too much."))
    assert failed.decode_tok_per_s is None
    assert failed.prefill_tok_per_s is None
    assert failed.to_dict()["decode_tok_per_s"] is None


def test_the_first_difference_from_a_baseline_is_named() -> None:
    assert first_difference((1, 2, 3), (1, 2, 3)) is None
    assert first_difference((1, 2, 3), (1, 9, 3)) == 1
    assert first_difference((1, 2, 3), (1, 2)) is None
    assert TRIAL.difference(replace(TRIAL, tokens=(1, 2, 4))) == 2


def test_a_condition_knows_the_context_it_needs() -> None:
    assert CONDITION.n_needed == 4 + 1 + 4 + 3 * 8
    assert replace(CONDITION, repeats=0).n_needed == 5
