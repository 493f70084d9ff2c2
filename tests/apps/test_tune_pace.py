"""Tuning on a machine that is slow or busy: what is measured in the time there is. The clock is made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid.apps import tune as app
from hybrid.apps.tune import TuneReport, TuneRequest, tune
from hybrid.apps.tune_pace import START_ALONE_S, START_S, Pace
from hybrid.report.trial import Condition, Failure, PeakMemory, Trial
from hybrid.schedule.placement import Placement
from hybrid.schedule.search import Belief
from tests.apps.tuning import small_model

BUDGET_S = 60.0
CALIBRATION_S = 6.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return small_model(tmp_path)


class SlowMachine:
    """Everything takes `factor` times as long as on a quiet machine; it ends what its time limit ends."""

    def __init__(self, factor: float, lasts: Callable[[Placement], float] = lambda p: 1.0) -> None:
        self.factor, self.lasts, self.now = factor, lasts, 0.0
        self.said: list[tuple[str, float, float]] = []

    def run_trial(self, condition: Condition, *, timeout_s: float, **_: Any) -> Trial:
        p = condition.placement
        wall_s = self.factor * self.lasts(p) * (START_S if p.n_gpu_layers else START_ALONE_S)
        if wall_s > timeout_s:
            self.now += timeout_s
            return Trial(condition=condition, failure=Failure(kind="too slow", message="Not done."), wall_s=timeout_s)
        self.now += wall_s
        seconds = self.factor * (0.01 + 0.001 * p.n_gpu_layers)
        memory = PeakMemory(host_bytes=1)
        return Trial(
            condition=condition, ttft_s=(seconds,) * condition.prefills,
            decode_s=(seconds,) * condition.repeats, memory=memory, wall_s=wall_s,
        )  # fmt: skip

    def run_calibration(self, *_: Any, timeout_s: float, **__: Any) -> list[Any]:
        self.now += min(timeout_s, self.factor * CALIBRATION_S)
        return []


@pytest.fixture
def tuned(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., TuneReport]:
    def run(machine: SlowMachine, **request: Any) -> TuneReport:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache{id(machine)}"))
        monkeypatch.setattr(app, "run_trial", machine.run_trial)
        monkeypatch.setattr(app, "run_calibration", machine.run_calibration)
        monkeypatch.setattr(app, "time", SimpleNamespace(perf_counter=lambda: machine.now))
        asked = TuneRequest(**{"n_ctx": 256, "device": "cpu", "budget_s": BUDGET_S, **request})
        return tune(model, asked, on_progress=lambda *facts: machine.said.append(facts))

    return run


def measured(report: TuneReport) -> set[int]:
    return {row.placement.n_gpu_layers for row in report.rows if row.measured is not None}


@pytest.mark.parametrize("objective", ["latency", "ttft"])
@pytest.mark.parametrize("factor", [0.3, 1, 2, 5, 8, 14])
def test_llama_cpp_alone_and_a_split_are_measured_within_the_budget(
    factor: float, objective: str, tuned: Callable[..., TuneReport]
) -> None:
    machine = SlowMachine(factor)
    report = tuned(machine, objective=objective)
    assert 0 in measured(report)
    assert len(measured(report)) > 1
    assert machine.now <= BUDGET_S
    assert report.best is not None


def test_the_likeliest_split_is_the_one_for_which_there_is_time(
    tuned: Callable[..., TuneReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search itself would begin with a spread of splits, here with the sixth."""
    likeliest: list[int] = []

    def sixth(options: Any, belief: Belief, open_options: Any) -> int | None:
        likeliest.append(min((i for i in open_options if options[i].share), key=lambda i: belief.mean[i]))
        return 6 if belief.counts[6] == 0 else None

    monkeypatch.setattr(app, "next_option", sixth)
    short = tuned(SlowMachine(12))
    assert measured(short) == {0, short.rows[likeliest[0]].placement.n_gpu_layers}
    assert likeliest[0] != 6
    assert any("certain which is quickest" in note for note in short.notes)
    assert any("calibrating them would take" in note for note in short.notes)
    assert measured(tuned(SlowMachine(1))) == {0, 6}


def test_without_a_calibration_one_measurement_sets_the_scale(tuned: Callable[..., TuneReport]) -> None:
    report = tuned(SlowMachine(12))
    (alone,) = (row for row in report.rows if row.placement.n_gpu_layers == 0)
    assert alone.measured is not None
    others = [row.predicted_s for row in report.rows if row.placement.n_gpu_layers]
    assert all(predicted and 0.1 < predicted / alone.measured.median < 10 for predicted in others)
    assert alone.predicted_s is not None
    assert alone.predicted_s < 0.1 * alone.measured.median, "what was predicted before is what is shown"


def test_what_there_was_no_time_for_is_said_and_is_no_failure(tuned: Callable[..., TuneReport]) -> None:
    machine = SlowMachine(50)
    report = tuned(machine)
    assert measured(report) == {0}
    assert machine.now <= BUDGET_S
    assert {row.verdict for row in report.rows if row.placement.n_gpu_layers} == {"not measured"}
    (note,) = (note for note in report.notes if "The time is up" in note)
    assert "before anything on the device was measured" in note
    assert "--budget gives more" in note


def test_what_was_under_way_when_the_time_was_up_is_said_and_is_no_failure(tuned: Callable[..., TuneReport]) -> None:
    machine = SlowMachine(10, lasts=lambda p: 3.0 if p.n_gpu_layers else 1.0)
    report = tuned(machine)
    assert machine.now == BUDGET_S
    assert measured(report) == {0}
    assert {row.verdict for row in report.rows if row.placement.n_gpu_layers} == {"not measured"}
    assert any(
        note.startswith("The time was up before -ngl ") and note.endswith("after 50 s of it.") for note in report.notes
    )


def test_a_machine_too_slow_for_the_budget_gives_one_figure_all_the_same(tuned: Callable[..., TuneReport]) -> None:
    machine = SlowMachine(6.0)
    report = tuned(machine, budget_s=0.01)
    assert measured(report) == {0}
    assert any(note.startswith("It took 6 s instead of 0.01 s") for note in report.notes)
    assert not any("instead of" in note for note in tuned(SlowMachine(6.0)).notes)


def test_nothing_runs_over_the_budget_where_something_was_measured_earlier(tuned: Callable[..., TuneReport]) -> None:
    machine = SlowMachine(1.0)
    tuned(machine, budget_s=0.01)
    machine.now = 0.0
    report = tuned(machine, budget_s=0.01)
    assert (len(report.trials), machine.now) == (0, 0.0)
    assert measured(report) == {0}
    assert any("The time is up" in note for note in report.notes)


def test_what_hangs_ends_with_one_sentence_soon_after_the_budget(tuned: Callable[..., TuneReport]) -> None:
    machine = SlowMachine(1.0, lasts=lambda p: 1e6)
    report = tuned(machine, budget_s=1.0)
    assert report.best is None
    assert report.trouble.startswith("Nothing was measured; the first failure: ")
    assert 1.0 < machine.now < 30.0


def test_a_placement_that_hangs_does_not_cost_the_others_their_time(tuned: Callable[..., TuneReport]) -> None:
    """What takes much longer than what was seen lets expect is ended, at a limit that follows from that."""
    for factor in (0.05, 0.2):
        machine = SlowMachine(factor, lasts=lambda p: 1e6 if p.n_gpu_layers == 12 else 1.0)
        report = tuned(machine, exhaustive=False)
        assert {row.placement.n_gpu_layers for row in report.rows if row.verdict == "too slow"} <= {12}
        assert len(measured(report)) > 2
        assert machine.now <= BUDGET_S


def test_a_first_measurement_that_was_given_up_tells_how_slow_the_machine_is(
    tuned: Callable[..., TuneReport],
) -> None:
    machine = SlowMachine(1e6)
    report = tuned(machine, exhaustive=False)
    assert not measured(report)
    (note,) = (note for note in report.notes if "another" in note)
    assert float(note.split("another ")[1].split(" s")[0]) >= BUDGET_S
    assert any("there is no time to calibrate them" in note for note in report.notes)


def test_time_left_is_what_the_budget_leaves_and_of_a_sweep_what_its_runs_take(
    tuned: Callable[..., TuneReport],
) -> None:
    machine = SlowMachine(2)
    tuned(machine)
    assert all(spent + left == pytest.approx(BUDGET_S) for _, spent, left in machine.said)
    sweep = SlowMachine(2)
    tuned(sweep, exhaustive=True, budget_s=5.0)
    assert sweep.now > 100
    for _, spent, left in sweep.said[4:]:
        assert spent + left == pytest.approx(sweep.now, rel=0.25)


def test_expectations_follow_what_was_seen_of_the_same_kind() -> None:
    split, alone = (Placement(device="cpu", n_gpu_layers=k, n_ctx=256) for k in (3, 0))
    pace = Pace(lambda p: 1.0, 60.0)
    assert (pace.cost_s(split), pace.cost_s(alone)) == (START_S + 1, START_ALONE_S + 1)
    pace.see(alone, 5 * (START_ALONE_S + 1))
    assert pace.cost_s(split) == pytest.approx(5 * (START_S + 1))
    pace.see(split, 2 * (START_S + 1))
    assert pace.cost_s(split) == pytest.approx(2 * (START_S + 1))
    assert pace.cost_s(alone) == pytest.approx(5 * (START_ALONE_S + 1))
    assert pace.limit_s(split, 3.0, first=False) == 3.0
    assert pace.limit_s(split, 3.0, first=True) > 3.0
    assert pace.limit_s(split, 1e9, first=False) < 1e4
