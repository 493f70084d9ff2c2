"""Claims about the chat's own logic, on a stand-in model."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hybrid.apps.chat import Chat
from hybrid.apps.lines import LineReader
from tests.cli.fake import FakeModel, FakeStream


class Lines:
    """A person who types these lines and then Ctrl-D; an exception among them is raised."""

    def __init__(self, *lines: str | BaseException) -> None:
        self._lines = list(lines)

    def read(self) -> str:
        if not self._lines:
            raise EOFError
        line = self._lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line


def talk(model: FakeModel, *lines: str | BaseException, system: str | None = None) -> Chat:
    chat = Chat(model, {}, system=system)  # type: ignore[arg-type]
    chat.run(Lines(*lines))
    return chat


def roles(chat: Chat) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in chat.messages]


def test_every_turn_sends_the_whole_conversation_and_stdout_holds_the_answers_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = FakeModel()
    talk(model, "hi", " /not a command", system="Be kind.")
    assert [m["content"] for m in model.seen[1]] == ["Be kind.", "hi", " You said hi", "/not a command"]
    assert capsys.readouterr().out == "You said hi\nYou said /not a command\n"


def test_commands_are_obeyed_and_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    model = FakeModel()
    chat = talk(
        model, "hi", "/system Talk like a fox.", "/system", "/stats", "/help", "/nonsense", "/clear", "", "/exit", "x"
    )
    assert len(model.seen) == 1
    assert chat.messages == []
    assert chat.system == "Talk like a fox."
    said = capsys.readouterr().err
    for words in (
        "Talk like a fox.",
        "3 tokens, 1 of them reused",
        "/clear",
        "no command /nonsense",
        "2 layers on cpu",
    ):
        assert words in said


def test_ctrl_c_stops_the_answer_and_the_conversation_keeps_what_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    def press(stream: FakeStream) -> None:
        presses.append(1)
        if len(presses) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    presses: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    chat = talk(FakeModel(between=press), "one two three", "again")
    assert roles(chat)[:2] == [("user", "one two three"), ("assistant", " You said")]
    assert roles(chat)[2:] == [("user", "again"), ("assistant", " You said again")]
    assert "(stopped, 2 tokens" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


def test_an_answer_stopped_before_its_first_word_leaves_the_conversation_as_it_was() -> None:
    def press(stream: FakeStream) -> None:
        if not presses:
            presses.append(1)
            os.kill(os.getpid(), signal.SIGINT)

    presses: list[int] = []
    chat = talk(FakeModel(between=press), "hi", "ho")
    assert roles(chat) == [("user", "ho"), ("assistant", " You said ho")]


def test_ctrl_c_at_the_prompt_does_not_leave() -> None:
    model = FakeModel()
    talk(model, KeyboardInterrupt(), "hi")
    assert len(model.seen) == 1


def test_a_message_that_does_not_fit_is_said_and_the_conversation_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    chat = talk(FakeModel(n_ctx=20), "hi", "x" * 21, "ho")
    assert [content for _, content in roles(chat)] == ["hi", " You said hi", "ho", " You said ho"]
    assert "21 tokens, but the context holds 20" in capsys.readouterr().err


def test_a_full_context_is_said_and_the_conversation_kept(capsys: pytest.CaptureFixture[str]) -> None:
    chat = talk(FakeModel(n_ctx=3), "hi")
    assert len(chat.messages) == 2
    assert "context is full" in capsys.readouterr().err


def test_a_model_cannot_move_the_cursor_of_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    talk(FakeModel(), "a\x1b[2Jb")
    assert capsys.readouterr().out == "You said a\ufffd[2Jb\n"


def test_history_is_private_and_its_absence_no_obstacle(tmp_path: Path) -> None:
    history = tmp_path / "state" / "history"
    LineReader([], history)
    assert history.stat().st_mode & 0o777 == 0o600
    LineReader([], history / "beneath a file")
