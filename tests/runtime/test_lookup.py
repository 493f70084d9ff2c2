"""Claims about drafts: what the text repeats is found, and guesses are made where they pay, whatever the clock says."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.runtime.curve import BatchCurve
from hybrid.runtime.lookup import LONGEST, Lookup
from hybrid.runtime.speculation import Speculation

FLAT = BatchCurve((1, 8), (1.0, 1.0))
GENTLE = BatchCurve((1, 2, 4, 8), (1.0, 1.4, 2.5, 3.7))
STEEP = BatchCurve((1, 8), (1.0, 8.0))


def test_a_text_that_repeats_its_prompt_is_predicted_to_the_end() -> None:
    prompt = list(range(100, 140))
    lookup = Lookup([*prompt, 7, *prompt[10:13]])
    assert lookup.matched == 3
    assert lookup.draft(5) == prompt[13:18]
    for token in prompt[13:30]:
        assert lookup.predicted == token
        lookup.push(token)
    assert lookup.matched == LONGEST
    lookup.push(99)
    assert lookup.predicted is None


def test_text_that_goes_in_circles_is_drafted_beyond_its_end() -> None:
    lookup = Lookup([1, 2, 3, 1, 2, 3, 1, 2])
    assert lookup.draft(7) == [3, 1, 2, 3, 1, 2, 3]


@given(st.lists(st.integers(0, 3), max_size=60))
def test_a_prediction_follows_the_same_tokens_elsewhere(tokens: list[int]) -> None:
    lookup = Lookup()
    for i, token in enumerate(tokens):
        n = lookup.matched
        if lookup.predicted is not None:
            end = tokens[i - n : i]
            places = [j for j in range(n, i) if tokens[j - n : j] == end and tokens[j] == lookup.predicted]
            assert places
        else:
            assert tokens[i - 2 : i] not in [tokens[j - 2 : j] for j in range(2, i)] or i < 2
        lookup.push(token)


def test_a_quoted_text_is_drafted_and_a_new_one_is_not() -> None:
    rng = random.Random(0)
    source = [rng.randrange(1000) for _ in range(200)]
    quoting, telling = (Speculation(source, GENTLE, 7) for _ in range(2))
    steps = 0
    i = 0
    while i < 150:  # as a model that quotes would go on
        drafted = quoting.draft(1, 150 - i)
        steps += 1
        for token in source[i : i + len(drafted) + 1]:
            quoting.push(token)
            i += 1
    assert steps < 40
    for _ in range(300):
        assert telling.draft(1, 100) == []
        telling.push(rng.randrange(1000))


@pytest.mark.parametrize("n_live", [1, 4])
def test_drafts_are_made_where_the_curve_lets_them_pay(n_live: int) -> None:
    source = list(range(50))
    for curve, some in ((FLAT, True), (STEEP, False)):
        speculation = Speculation(source, curve, 7)
        for token in source[:20]:
            speculation.push(token)
        assert bool(speculation.draft(n_live, 100)) == some


def test_what_matches_and_then_differs_every_time_stops_being_drafted() -> None:
    """A text that takes six tokens from its source, then leaves it: guesses at that length are wrong every time."""
    rng = random.Random(2)
    source = [rng.randrange(10000) for _ in range(400)]
    speculation = Speculation(source, BatchCurve((1, 2, 8), (1.0, 1.2, 2.0)), 7)
    wasted = []
    for round_ in range(30):
        start = 12 * round_
        part = [*source[start : start + 6], 10000 + round_]
        n_wrong = 0
        i = 0
        while i < len(part):
            drafted = speculation.draft(1, 100)
            right = 0
            while right < len(drafted) and i + right < len(part) and drafted[right] == part[i + right]:
                right += 1
            n_wrong += len(drafted) - right
            for token in part[i : i + right + 1]:
                speculation.push(token)
            i += right + 1
        wasted.append(n_wrong)
    assert sum(wasted[-10:]) < sum(wasted[:10])


def test_no_more_is_drafted_than_there_is_room_for() -> None:
    speculation = Speculation(list(range(50)), FLAT, 7)
    for token in range(20):
        speculation.push(token)
    assert speculation.draft(1, 3) == [20, 21, 22]
    assert speculation.draft(1, 0) == []
    assert len(speculation.draft(1, 100)) == 7


def test_a_curve_is_straight_between_its_points_and_beyond() -> None:
    assert [GENTLE.cost(n) for n in (1, 2, 3, 8)] == pytest.approx([1.0, 1.4, 1.95, 3.7])
    assert GENTLE.cost(12) == pytest.approx(3.7 + 4 * 1.2 / 4)
    assert BatchCurve((1,), (1.0,)).cost(3) == 3.0
    assert BatchCurve.from_dict(GENTLE.to_dict()) == GENTLE


@pytest.mark.parametrize(
    "stored",
    [
        {"sizes": [1], "costs": []},
        {"sizes": [2], "costs": [1.0]},
        {"sizes": [1, 2], "costs": [1, float("nan")]},
        {"sizes": [1, 2], "costs": [1, 2], "heads": [0.5]},
        {"sizes": [1, 2], "costs": [1, 2], "heads": [0.5, 3]},
    ],
)
def test_a_damaged_curve_is_refused(stored: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a batch curve"):
        BatchCurve.from_dict({"heads": [], **stored})
    with pytest.raises((KeyError, TypeError)):
        BatchCurve.from_dict([])


@pytest.mark.parametrize(
    ("head", "tail", "pays"),
    [
        ((0.5, 0.5, 0.5, 0.5), (0.5, 0.55, 0.6, 0.65), False),  # batches cost next to nothing more
        ((0.5, 0.6, 1.0, 2.0), (0.5, 0.6, 1.0, 2.0), True),  # equal halves, every token costs
        ((0.1, 0.1, 0.1, 0.1), (0.9, 0.9, 0.9, 0.9), False),  # a small head, and a tail that only reads weights
        ((0.0, 0.0, 0.0, 0.0), (1.0, 2.0, 4.0, 8.0), False),
    ],
)
def test_two_groups_are_formed_where_the_curve_says_they_pay(
    head: tuple[float, ...], tail: tuple[float, ...], pays: bool
) -> None:
    costs = tuple(a + b for a, b in zip(head, tail, strict=True))
    assert BatchCurve((1, 2, 4, 8), costs, head).pays_in_groups(8) == pays
    assert not BatchCurve((1, 2, 4, 8), costs).pays_in_groups(8)
    assert not BatchCurve((1, 2, 4, 8), costs, head).pays_in_groups(1)
