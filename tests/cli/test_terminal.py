"""What a terminal shows, read off an emulated one; and how lines come in."""

from __future__ import annotations

import os
import pty
import random
import re
import signal
import termios
from pathlib import Path
from typing import Literal

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from hybrid.cli.progress import progress_line
from hybrid.cli.terminal import keyboard
from hybrid.cli.terminal.lines import LineReader, _open_quotes
from hybrid.cli.terminal.live import LiveLines, _where_goes_on
from hybrid.cli.terminal.markdown import MarkdownStream, render
from hybrid.cli.terminal.pastes import Pastes
from hybrid.cli.terminal.screen import RichPainter, Screen
from hybrid.cli.terminal.thoughts import FOLDED_LINES, ThoughtStream, wrapped

TEXT = """\
# A heading

A paragraph with **bold** words, `code`, a [link](https://example.com) and a line
that ends here. List<String> is no HTML, 日本語 is wide, and this sentence goes on until it has to be wrapped somewhere.

- one
- two with more words than would fit into a single line of such a narrow terminal, surely
  - three

| a | b |
|---|---|
| 1 | 2 |

```python
def f(x):
    return x  # no

print(f(1))
```

The end.
"""


class Terminal:
    """An emulated terminal, and how much was written to it."""

    def __init__(self, columns: int = 50, rows: int = 60) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=1000, ratio=0.5)
        self._stream = pyte.Stream(self.screen)
        self.screen.set_mode(pyte.modes.LNM)
        self.written: list[str] = []

    def write(self, text: str) -> None:
        self.written.append(text)
        self._stream.feed(text.replace("\n", "\r\n"))

    def size(self) -> tuple[int, int]:
        return self.screen.columns, self.screen.lines

    @property
    def shown(self) -> list[str]:
        """All lines, those that have left at the top included."""
        past = ["".join(row[i].data for i in range(self.screen.columns)) for row in self.screen.history.top]
        lines = [line.rstrip() for line in [*past, *self.screen.display]]
        while lines and not lines[-1]:
            lines.pop()
        return lines


def stream(terminal: Terminal, pieces: list[str], monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    markdown = MarkdownStream(LiveLines(terminal.write, terminal.size), lambda: terminal.size()[0], None)
    for piece in pieces:
        markdown._pace.next_at = 0  # draw at every piece, however quickly they come
        markdown.push(piece)
    markdown.finish()


def pieces_of(text: str, seed: int) -> list[str]:
    cut = random.Random(seed)
    found = []
    while text:
        n = cut.randint(1, 9)
        found.append(text[:n])
        text = text[n:]
    return found


@pytest.mark.parametrize("seed", range(3))
def test_markdown_looks_the_same_whether_it_came_at_once_or_in_pieces(seed: int) -> None:
    whole, parts = Terminal(), Terminal()
    stream(whole, [TEXT])
    stream(parts, pieces_of(TEXT, seed))
    assert parts.shown == whole.shown
    text = " ".join("\n".join(whole.shown).split())
    for words in (
        "A heading",
        "List<String> is no HTML",
        "link (https://example.com)",
        "日本語",
        "• one",
        "return x",
    ):
        assert words in text
    assert "**" not in text
    assert "```" not in text


@pytest.mark.parametrize("rows", [4, 9])
def test_an_answer_longer_than_the_screen_scrolls_by_without_a_line_lost(rows: int) -> None:
    text = "\n\n".join(f"Paragraph {i} says that it is number {i} of them." for i in range(30))
    terminal = Terminal(40, rows)
    stream(terminal, pieces_of(text, 1))
    assert [line for line in terminal.shown if line] == [line for line in render(text, 40, None) if line]
    code = "```\n" + "\n".join(f"line {i}" for i in range(50)) + "\n```"
    terminal = Terminal(40, rows)
    stream(terminal, pieces_of(code, 2))
    assert [line.strip() for line in terminal.shown if line.strip()] == [f"line {i}" for i in range(50)]


def test_what_has_been_drawn_and_did_not_change_is_not_drawn_again() -> None:
    terminal = Terminal()
    stream(terminal, [word + " " for word in ("word " * 400).split()])
    lines = len([line for line in terminal.shown if line])
    assert sum(map(len, terminal.written)) < 60 * 400 + 100 * lines  # about a line a piece, not the whole paragraph


def test_the_answer_survives_a_terminal_that_is_resized() -> None:
    terminal = Terminal(60, 20)
    live = LiveLines(terminal.write, terminal.size)
    live.show(["first line", "second line", "third line"])
    terminal.screen.resize(20, 30)
    live.show(["first line", "second line", "third line", "fourth"])
    assert terminal.shown == ["first line", "second line", "third line", "fourth"]


@settings(max_examples=60, deadline=None)
@given(st.integers(8, 90), st.integers(8, 90), st.floats(0, 1))
def test_after_a_resize_it_goes_on_where_what_has_left_the_screen_ends(before: int, after: int, share: float) -> None:
    old, new = (render(TEXT, width, None) for width in (before, after))
    gone = old[: round(share * (len(old) - 1))]
    first = _where_goes_on(gone, new)
    words = lambda lines: re.findall(r"\w+", "".join(line.strip(" ─━") + " " * (len(line) < 5) for line in lines))  # noqa: E731
    assert first == 0 or gone
    above = "".join(words(gone))
    assert "".join(words(new)).startswith(above[: len("".join(words(new[:first])))])
    assert len(above) >= len("".join(words(new[:first])))  # nothing is left out
    assert len(above) <= len("".join(words(new[: first + 1]))) or first == len(new) - 1  # at most a line is there twice


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from(["", "a", "bb", "日本", "\x1b[2mdim\x1b[0m"]), min_size=1, max_size=6), max_size=8
    )
)
def test_live_lines_show_what_they_were_last_told(frames: list[list[str]]) -> None:
    terminal = Terminal(10, 8)
    live = LiveLines(terminal.write, terminal.size)
    for frame in frames:
        live.show(frame)
    live.keep()
    terminal.write("after")
    expected = [line.replace("\x1b[2m", "").replace("\x1b[0m", "") for line in frames[-1]] if frames else []
    assert [line.replace(" ", "") for line in terminal.shown] == [*expected, "after"]


@pytest.mark.parametrize("thinking", ["fold", "show"])
def test_thoughts_are_shown_as_they_come_and_then_folded_away_or_kept(
    thinking: Literal["fold", "show"], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, screen = Terminal(40, 30), Screen(thinking=thinking)
    monkeypatch.setattr(screen, "write", terminal.write)
    monkeypatch.setattr("hybrid.cli.terminal.screen._size", terminal.size)
    painter = RichPainter(screen)
    for i in range(30):
        painter._thoughts._pace.next_at = 0
        painter.think(f"thought {i} \x1b[2J")
    assert "thought 29" in terminal.shown[-1]
    assert (len(terminal.shown) < 6) == (thinking == "fold")
    painter.thought(1.5)
    painter.text("**Yes.**")
    painter.end()
    if thinking == "fold":
        assert terminal.shown == ["▸ Thought for 1.5 s; /think shows it.", "", "Yes."]
    else:
        assert "thought 0" in terminal.shown[0]
        assert terminal.shown[-2:] == ["", "Yes."]


def test_thoughts_in_wide_characters_take_their_lines_and_no_others() -> None:
    terminal = Terminal(30, 20)
    thoughts = ThoughtStream(LiveLines(terminal.write, terminal.size), lambda: 30, fold=True)
    for i in range(60):
        thoughts._pace.next_at = 0
        thoughts.push("我们先想一想" + "\n" * (i % 20 == 19))
        assert len(terminal.shown) <= FOLDED_LINES + 1
    assert wrapped("我们先想一想", 7) == ["我们先", "想一想"]
    thoughts.finish("Done.")
    assert terminal.shown == ["▸ Done."]


def test_a_long_paste_is_a_few_words_on_the_line_and_whole_in_the_message() -> None:
    pastes = Pastes()
    assert pastes.shorten("one\r\ntwo\rthree") == "one\ntwo\nthree"
    megabyte = "0123456789abcde\n" * 65536
    words = pastes.shorten(megabyte)
    assert words == "[paste 1: 65,537 lines, 1,048,576 characters]"
    assert pastes.expand(f"Look at {words}!") == f"Look at {megabyte}!"
    assert pastes.expand("Look at [paste 2: nothing]") == "Look at [paste 2: nothing]"
    assert pastes.expand(f"Look at {words[:-1]}") == f"Look at {megabyte}"  # nothing is lost to an edit
    assert pastes.expand(f"{words[:20]}ns]!") == f"{megabyte}ns]!"
    assert pastes.ending(f"Look at {words}") == len(words)
    assert pastes.ending(f"{words}!") == pastes.ending("") == 0


def test_one_backspace_takes_a_long_paste_away(tmp_path: Path) -> None:
    text = "line" * 10 + "\n" * 100
    paste = f"\x1b[200~{text}\x1b[201~"
    with create_pipe_input() as keyboard, create_app_session(input=keyboard, output=DummyOutput()):
        reader = LineReader(history=tmp_path / "history")
        keyboard.send_text(f"So: {paste}\x7fgone\r{paste}!\x7f\r")
        assert reader.read() == "So: gone"
        assert reader.read() == text


@pytest.mark.parametrize(
    ("text", "is_open"),
    [('"""', True), ('"""a\nb', True), ('"""a"""', False), ('""""""', False), ('"""a\n"""\n', False), ('a"""', False)],
)
def test_triple_quotes_hold_a_message_open(text: str, is_open: bool) -> None:
    assert _open_quotes(text) == is_open


def test_history_is_private_and_its_absence_no_obstacle(tmp_path: Path) -> None:
    history = tmp_path / "state" / "history"
    LineReader(history=history)
    assert history.stat().st_mode & 0o777 == 0o600
    LineReader(history=history / "beneath a file")


def test_while_nobody_reads_the_keyboard_is_silent_and_keeps_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    with os.fdopen(theirs, "r") as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        with keyboard.silent_keyboard():
            flags = termios.tcgetattr(theirs)[3]
            assert not flags & (termios.ECHO | termios.ICANON)
            assert flags & termios.ISIG  # Ctrl-C is still Ctrl-C
            monkeypatch.setattr("os.tcgetpgrp", lambda fd: os.getpgrp())
            termios.tcsetattr(theirs, termios.TCSANOW, before)  # as a shell does after Ctrl-Z
            os.kill(os.getpid(), signal.SIGCONT)  # fg
            assert not termios.tcgetattr(theirs)[3] & termios.ECHO
        assert termios.tcgetattr(theirs) == before
    os.close(ours)


@pytest.mark.parametrize("columns", [1, 12, 24, 40, 48, 80, 200])
def test_the_progress_bar_takes_one_line_of_any_terminal(columns: int) -> None:
    for share in (0.0, 0.5, 1.0):
        line = progress_line("Reading the prompt", share, columns)
        assert len(line) < columns
        assert columns < 24 or line.endswith(f"{share:4.0%}")
        assert ("█" in line or "░" in line) == (columns >= 40)
    assert len(progress_line("Loading", 0.5, columns)) <= 40
