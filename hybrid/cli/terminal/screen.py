"""What the chat shows: answers on stdout, its own words on stderr."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable
from typing import IO, Literal, Protocol

from hybrid.apps.chat.reasoning import Piece
from hybrid.apps.chat.talk import Asking
from hybrid.cli.terminal.keyboard import interrupts, silent_keyboard
from hybrid.cli.terminal.live import DIM, PLAIN
from hybrid.printable import harmless

THOUGHT = "Thought for {seconds:.1f} s; /think shows it."

Thinking = Literal["fold", "show"]


class Painter(Protocol):
    """How an answer is drawn."""

    def think(self, text: str) -> None:
        """More of what the model thinks."""

    def thought(self, seconds: float) -> None:
        """It has thought."""

    def text(self, text: str) -> None:
        """More of the answer."""

    def end(self) -> None:
        """No more will come."""


class PlainPainter:
    """Text as it comes, for files, pipes and terminals that do no more."""

    def __init__(self, screen: Screen) -> None:
        self._screen, self._last = screen, ""
        self._thinking = False

    def think(self, text: str) -> None:
        """See `Painter.think`."""
        if self._screen.thinking == "show":
            self._write(text)
        elif not self._thinking:
            self._screen.say("Thinking …")
        self._thinking = True

    def thought(self, seconds: float) -> None:
        """See `Painter.thought`."""
        if self._screen.thinking == "show":
            self._write("\n\n")
        else:
            self._screen.say(THOUGHT.format(seconds=seconds))

    def text(self, text: str) -> None:
        """See `Painter.text`."""
        self._write(text)

    def end(self) -> None:
        """See `Painter.end`."""
        if self._last and not self._last.endswith("\n"):
            self._write("\n")

    def _write(self, text: str) -> None:
        self._last = text
        self._screen.write(harmless(text) if sys.stdout.isatty() else text)


class RichPainter:
    """Markdown as it comes, what the model thinks dimmed and folded away when it has thought."""

    def __init__(self, screen: Screen) -> None:
        from rich.console import Console

        from hybrid.cli.terminal.live import LiveLines
        from hybrid.cli.terminal.markdown import MarkdownStream
        from hybrid.cli.terminal.thoughts import ThoughtStream

        live, width = LiveLines(screen.write, _size), lambda: _size()[0]
        self._thoughts = ThoughtStream(live, width, fold=screen.thinking == "fold")
        self._markdown = MarkdownStream(live, width, Console(file=sys.stdout).color_system)

    def think(self, text: str) -> None:
        """See `Painter.think`."""
        self._thoughts.push(harmless(text))

    def thought(self, seconds: float) -> None:
        """See `Painter.thought`."""
        self._thoughts.finish(THOUGHT.format(seconds=seconds))

    def text(self, text: str) -> None:
        """See `Painter.text`."""
        self._markdown.push(harmless(text))

    def end(self) -> None:
        """See `Painter.end`."""
        self._markdown.finish()


class Screen:
    """The terminal, as far as it is one."""

    def __init__(
        self,
        *,
        plain: bool = False,
        quiet: bool = False,
        thinking: Thinking = "fold",
        before_output: Callable[[], None] = lambda: None,
    ) -> None:
        """`plain`: no colours, nothing drawn twice. `quiet`: no line about each answer. `before_output` is called
        before anything is printed (to clear a bar)."""
        dumb = "NO_COLOR" in os.environ or os.environ.get("TERM", "dumb") == "dumb"
        self.plain = plain or dumb or not sys.stdout.isatty()
        self.quiet, self.thinking = quiet, thinking
        self.reasoning = ""
        """What the model thought before its last answer."""
        self._dim = not (plain or dumb) and sys.stderr.isatty()
        self._before_output = before_output

    @property
    def width(self) -> int | None:
        """Columns for the program's own words; None where no terminal shows them."""
        return _size(sys.stderr)[0] if sys.stderr.isatty() else None

    def answer(self, asking: Asking) -> None:
        """Draw an answer while it is made. Ctrl-C stops it; pressed again it is raised. Raises what iterating does."""
        painter: Painter = PlainPainter(self) if self.plain else RichPainter(self)
        thoughts: list[str] = []
        self.reasoning, began, state = "", time.perf_counter(), ""
        try:
            with silent_keyboard(), interrupts(asking.cancel):
                for piece in asking:
                    if state == "think" != piece.kind:
                        painter.thought(time.perf_counter() - began)
                    state = piece.kind
                    thoughts += [piece.text] * (piece.kind == "think")
                    self._draw(painter, piece)
        finally:
            asking.close()
            self.reasoning = "".join(thoughts)
            if state == "think":
                painter.thought(time.perf_counter() - began)
            painter.end()

    def say(self, text: str) -> None:
        """The program's own words: dim, and on stderr, so that a redirected stdout holds the answers alone."""
        self._before_output()
        if (width := self.width) is not None:
            text = "\n".join(_fitted(line, width) for line in harmless(text).split("\n"))
        sys.stderr.write(f"{DIM}{text}{PLAIN}\n" if self._dim else text + "\n")
        sys.stderr.flush()

    def write(self, text: str) -> None:
        """Something of an answer."""
        self._before_output()
        sys.stdout.write(text)
        sys.stdout.flush()

    def _draw(self, painter: Painter, piece: Piece) -> None:
        if piece.kind == "note":
            self.say(piece.text)
        elif piece.kind == "think":
            painter.think(piece.text)
        else:
            painter.text(piece.text)


def _fitted(line: str, width: int) -> str:
    """A line broken between words where the terminal would break it anywhere."""
    return line if len(line) < width else textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)


def _size(stream: IO[str] | None = None) -> tuple[int, int]:
    """(columns, lines); of the terminal itself, whose size may have changed since COLUMNS was set."""
    try:
        size = os.get_terminal_size((stream or sys.stdout).fileno())
    except (OSError, ValueError):
        size = shutil.get_terminal_size()
    return size.columns or 80, size.lines or 24
