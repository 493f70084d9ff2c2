"""`scripts/eval_split.py --architectures`: the table covers what can be split, and a wrong split would show in it."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid.head.head import Head
from hybrid.model.known import KNOWN
from scripts.eval_architectures import evaluate_architectures
from tests.architectures.models import MODELS


def test_every_architecture_has_a_model_in_the_table() -> None:
    assert {tiny.architecture for tiny in MODELS.values()} == set(KNOWN)


def test_a_sound_architecture_meets_the_bounds_at_every_k() -> None:
    seen: list[int] = []
    rows = evaluate_architectures(["qwen2-untied-bias"], lambda found: seen.append(len(found)))
    assert seen == [3]
    assert [(row["k"], row["bounds"], row.get("tail")) for row in rows] == [
        (1, "met", 0),
        (2, "met", 0),
        (3, "met", None),
    ]


def test_a_head_that_is_off_misses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Head.forward
    monkeypatch.setattr(Head, "forward", lambda *args: right(*args) * np.float32(1.001))
    rows = evaluate_architectures(["qwen2-untied-bias"], lambda found: None)
    assert {row["bounds"] for row in rows} == {"MISSED"}


def test_an_unknown_name_is_said() -> None:
    with pytest.raises(SystemExit, match="no tiny model x"):
        evaluate_architectures(["x"], lambda found: None)
