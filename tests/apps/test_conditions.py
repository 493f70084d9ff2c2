"""What is said of a machine on which other programs run, and the tokens that are measured with."""

from __future__ import annotations

import os
from collections import namedtuple
from types import SimpleNamespace

import pytest

from hybrid.apps import conditions
from hybrid.apps.conditions import Others, prompt_tokens

Times = namedtuple("Times", "user nice system idle iowait steal guest")


@pytest.mark.parametrize(
    ("system", "own", "said"),
    [(10.0, 10.0, None), (11.0, 10.0, None), (30.0, 10.0, "took 2.0 of the 4 processors"), (10.0, 0.0, "took 1.0 of")],
)
def test_what_others_took_is_all_that_was_used_less_our_own(
    system: float, own: float, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In ten seconds on four processors; waiting and guests, which are in `user` already, do not count."""
    now = {"elapsed": 0.0, "system": 0.0, "own": 0.0}
    monkeypatch.setattr(conditions.time, "perf_counter", lambda: now["elapsed"])
    monkeypatch.setattr(
        conditions.psutil, "cpu_times",
        lambda: Times(100 + now["system"] / 2, 0.0, now["system"] / 2, 7 * now["elapsed"], 3.0, 0.0, now["system"]),
    )  # fmt: skip
    mine = lambda: SimpleNamespace(user=1.0, system=0.0, children_user=now["own"], children_system=0.0)  # noqa: E731
    monkeypatch.setattr(os, "times", mine)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    others = Others()
    now.update(elapsed=10.0, system=system, own=own)
    notes = others.note()
    assert len(notes) == (said is not None)
    assert said is None or said in notes[0]


def test_this_machine_has_such_times() -> None:
    others = Others()
    assert len(others.note()) <= 1
    assert conditions._all_s() >= conditions._own_s() > 0


def test_prompts_are_ordinary_tokens() -> None:
    for n_vocab in (50, 371, 49152, 262144):
        tokens = prompt_tokens(300, n_vocab)
        assert len(tokens) == 300
        assert all(0 <= token < n_vocab for token in tokens)
        assert len(set(tokens)) > 20
    assert prompt_tokens(300, 371) == prompt_tokens(400, 371)[:300]
