"""The search of `hybrid tune` on simulated machines, and what is believed between measurements."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from hybrid.schedule.search import NOISE, Observation, Option, believe, chance, next_option
from scripts.simulated import machine, measuring_s, quantile, search

LINE = [Option("device", k / 8, 0.5 * k / 8, 0.1 + 0.01 * k) for k in range(9)]


def test_on_simulated_machines_the_choice_is_near_the_best_for_a_part_of_the_time() -> None:
    machines = [machine(seed) for seed in range(24)]
    outcomes = [search(simulated, seed) for seed, simulated in enumerate(machines)]
    assert quantile([o.regret for o in outcomes], 0.9) <= 0.03
    assert sum(o.cost for o in outcomes) / len(outcomes) <= 0.4


def test_the_simulated_machines_differ_in_what_is_best() -> None:
    machines = [machine(seed) for seed in range(200)]
    best = [m.options[m.best] for m in machines]
    wins = Counter(option.strategy for option in best)
    assert min(wins[kv] for kv in ("device", "stream", "attend", "tiered")) >= 10
    inner = [o.share for m, o in zip(machines, best, strict=True) if m.kind in ("interior", "cliff")]
    assert sum(0.1 < share < 0.9 for share in inner) > len(inner) / 3
    for m in machines:  # predictions are not the truth
        errors = [abs(math.log(true / o.predicted_s)) for o, true in zip(m.options, m.truth, strict=True)]
        assert max(errors) > 0.01


def test_the_search_is_a_function_of_the_measurements() -> None:
    simulated = machine(5)
    assert search(simulated, 1) == search(simulated, 1)


def test_without_measurements_the_predictions_are_believed() -> None:
    belief = believe(LINE, [], 0.3)
    assert np.allclose(np.exp(belief.mean), [option.predicted_s for option in LINE])
    assert belief.leader() is None
    assert next_option(LINE, belief, range(9)) == 0


def test_a_measurement_is_believed_and_tells_of_its_neighbours() -> None:
    belief = believe(LINE, [Observation(4, 2 * LINE[4].predicted_s)] * 4, 0.3)
    assert math.exp(belief.mean[4]) == pytest.approx(2 * LINE[4].predicted_s, rel=0.05)
    assert math.exp(belief.mean[5]) > 1.5 * LINE[5].predicted_s
    assert belief.sd[4] < belief.sd[5] < belief.sd[8]


def test_a_measurement_at_another_depth_counts_relative_to_its_own_prediction() -> None:
    here = believe(LINE, [Observation(4, 0.28)], 0.3)
    deeper = believe(LINE, [Observation(4, 0.56, predicted_s=2 * LINE[4].predicted_s)], 0.3)
    assert np.allclose(here.mean, deeper.mean)


def test_repeats_tell_the_noise() -> None:
    quiet = [Observation(i, LINE[i].predicted_s) for i in (0, 4, 8) for _ in range(10)]
    loud = [replace(seen, seconds=seen.seconds * (1.3 if n % 2 else 0.7)) for n, seen in enumerate(quiet)]
    assert believe(LINE, quiet, 0.3).noise < NOISE < believe(LINE, loud, 0.3).noise


def test_a_measurement_whose_own_stretches_differ_tells_nobody_apart() -> None:
    quiet = [Observation(0, 0.1), Observation(8, 0.15)]
    loud = [Observation(0, 0.1, spread=0.6), Observation(8, 0.15, spread=0.01)]
    mean, sd = believe(LINE, quiet, 0.3).apart(8, 0)
    assert mean > 2 * sd
    mean, sd = believe(LINE, loud, 0.3).apart(8, 0)
    assert mean < 2 * sd
    assert believe(LINE, quiet, 0.3).noise < 0.06 < 0.4 < believe(LINE, loud, 0.3).noise


def test_it_ends_when_nothing_is_likely_to_matter() -> None:
    seen = [Observation(i, LINE[i].predicted_s) for i in range(9) for _ in range(12)]
    belief = believe(LINE, seen, 0.3)
    assert belief.leader() == 0
    assert next_option(LINE, belief, range(9)) is None
    assert all(chance(belief, i, 0) < 0.05 for i in range(1, 9))


def test_what_cannot_run_is_never_chosen() -> None:
    belief = believe(LINE, [], 0.3)
    assert next_option(LINE, belief, [7]) == 7
    assert next_option(LINE, believe(LINE, [Observation(7, 1.0)] * 3, 0.3), [7]) is None
    assert next_option(LINE, belief, []) is None


def test_measuring_everything_costs_what_it_is_compared_with() -> None:
    simulated = machine(0)
    once = sum(measuring_s(seconds) for seconds in simulated.truth)
    outcome = search(simulated, 0, most=1)
    assert outcome.n_measured == 1
    assert outcome.cost == pytest.approx(measuring_s(simulated.truth[outcome.chosen]) / once, rel=0.3)
