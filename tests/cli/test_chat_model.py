"""Claims about `/model` and `/tune`: one model goes, another takes the conversation over."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hybrid.apps.commands import arguments
from hybrid.cli.options import PLACEMENT
from hybrid.cli.terminal.chat import TerminalChat
from hybrid.errors import BadRequestError
from hybrid.report.trial import Spread
from hybrid.report.tuning import Row, TuneReport, TuneRequest
from hybrid.schedule.budget import Budget
from hybrid.schedule.placement import Placement
from tests.cli.fake import FakeModel, chat_with, said

MIB = 1 << 20


def test_another_model_takes_the_conversation_over_and_a_broken_one_does_not(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FakeModel()
    chat = chat_with(model)
    chat.take("hi")
    chat.take("/model /nowhere.gguf")
    assert not model.closed
    chat.take(f"/model {tiny}")
    assert model.closed
    assert chat.talk.conversation.model == str(tiny)
    monkeypatch.setattr("hybrid.model.catalog.resolve_model", lambda name: tiny)
    chat.take("/model broken")
    assert chat.talk.conversation.model == str(tiny)
    assert "It is broken; " in capsys.readouterr().err
    chat.take("ho")
    assert len(said(chat)) == 4


class Loads:
    """What a chat loads: names and changes."""

    def __init__(self, chat: TerminalChat, monkeypatch: pytest.MonkeyPatch, broken: str = "") -> None:
        self.seen: list[tuple[str, Mapping[str, Any]]] = []
        self._old, self._broken = chat.talk.model, broken
        monkeypatch.setattr(chat, "load", self._load)

    def _load(self, name: str, changes: Mapping[str, Any]) -> FakeModel:
        assert self._old.closed  # its memory is free by now
        self.seen.append((name, changes))
        if name == self._broken:
            raise BadRequestError("It is broken.")
        return FakeModel()


def tuned(request: TuneRequest, placements: list[Placement]) -> TuneReport:
    """A report whose last placement is the best."""
    rows = [
        Row(
            placement=p, vram_bytes=MIB, ram_bytes=2 * MIB, predicted_s=0.02, measured=Spread.of([0.01, 0.011, 0.009]),
            n_runs=1, device_bytes=None, host_bytes=None, verdict="best" if p is placements[-1] else "12 % slower",
        )
        for p in placements
    ]  # fmt: skip
    return TuneReport(
        request=request, model="m.gguf", device="cpu", depth=50, budget=Budget(ram_bytes=MIB), rows=tuple(rows),
        best=len(rows) - 1, command="hybrid chat -ngl 3", noise=0.01, reused=0, trials=(), notes=("It is emulated.",),
        interrupted=False, elapsed_s=1.0,
    )  # fmt: skip


def test_tuning_takes_the_command_s_options_and_shows_its_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[TuneRequest] = []

    def tune(path: Path, request: TuneRequest, **how: object) -> TuneReport:
        asked.append(request)
        return tuned(request, [FakeModel().placement])

    monkeypatch.setattr("hybrid.apps.tune.tune", tune)
    chat = chat_with(FakeModel(), tuning={"device": "cpu", "vram_reserve": 5})
    loads = Loads(chat, monkeypatch)
    for line in ("/tune --ctx-size 5", "/tune --budget soon", "/tune fast", '/tune --objective "'):
        chat.take(line)
        assert "/tune has --depth --objective" in capsys.readouterr().err
    assert (asked, loads.seen) == ([], [])  # and the model was not closed for it
    chat.take("/tune --objective ttft --budget 5s --depth 40 -t auto")
    wanted = {"objective": "ttft", "budget_s": 5.0, "depth": 40, "threads": "auto"}
    assert asked == [TuneRequest(n_ctx=100, device="cpu", vram_reserve=5, **wanted)]  # type: ignore[arg-type]
    shown = capsys.readouterr().err
    for text in ("It is emulated.", "measured s", "0.01 ± 0.00", "best", "Use (emulated): hybrid chat -ngl 3"):
        assert text in shown


def test_tuning_reloads_with_exactly_the_winner(monkeypatch: pytest.MonkeyPatch) -> None:
    winner = Placement(
        device="cpu", n_gpu_layers=3, n_ctx=100, n_batch=64, n_ubatch=32, n_threads_tail=7,
        kv="tiered", kv_dtype="q8_0", kv_budget=5, kv_keep_sliding=False,
    )  # fmt: skip
    asked: list[TuneRequest] = []

    def tune(path: Path, request: TuneRequest, **how: object) -> TuneReport:
        asked.append(request)
        return tuned(request, [FakeModel().placement, winner])

    monkeypatch.setattr("hybrid.apps.tune.tune", tune)
    chat = chat_with(FakeModel(), tuning={"device": "cpu", "n_batch": 64, "vram_reserve": 5, "threads": 7})
    loads = Loads(chat, monkeypatch)
    chat.take("hi")
    chat.take("/tune")
    assert asked == [TuneRequest(n_ctx=100, device="cpu", n_batch=64, vram_reserve=5, threads=7)]
    assert loads.seen == [("fake", arguments(winner))]
    assert set(PLACEMENT) - arguments(winner).keys() == {"vram_reserve"}  # whatever the chat was started with
    chat.take("ho")
    assert len(said(chat)) == 4


def test_where_another_model_fails_the_old_one_is_loaded_as_it_was(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = chat_with(FakeModel())
    placement = chat.talk.model.placement
    loads = Loads(chat, monkeypatch, broken=str(tiny))
    chat.take(f"/model {tiny}")
    assert loads.seen == [(str(tiny), {}), ("fake", arguments(placement))]
    assert "It is broken; fake was loaded again." in capsys.readouterr().err
