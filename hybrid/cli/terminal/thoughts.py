"""What a model thinks, on a terminal while it does: dim, and folded away afterwards or left standing."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from hybrid.cli.terminal.live import DIM, PLAIN, LiveLines, Pace

FOLDED_LINES = 4
"""The latest, those shown of thoughts that will be folded away."""


class ThoughtStream:
    """Draws thoughts as they come."""

    def __init__(self, live: LiveLines, width: Callable[[], int], *, fold: bool) -> None:
        """`fold`: show the latest lines, and a word in their place in the end."""
        self._live, self._width, self._fold = live, width, fold
        self._text = ""
        self._pace = Pace()

    def push(self, text: str) -> None:
        """More of them."""
        self._text += text
        if self._pace.due():
            self._draw()

    def finish(self, word: str) -> None:
        """Those were all; `word` stands for them where they are folded away."""
        if self._fold:
            self._live.show([f"{DIM}▸ {word}{PLAIN}"])
        else:
            self._draw()
        self._live.keep()
        self._live.show([""])
        self._live.keep()

    def _draw(self) -> None:
        start, width = time.perf_counter(), self._width()
        if self._fold:
            self._text = "\n".join(self._text.split("\n")[-FOLDED_LINES - 1 :])  # one more, to tell whether there are
            lines = wrapped(self._text, width)
            self._show(lines if len(lines) <= FOLDED_LINES else ["…", *lines[-FOLDED_LINES:]])
        else:
            done, end, self._text = self._text.rpartition("\n")
            if end:
                self._show(wrapped(done, width))
                self._live.keep()
            if self._text:
                self._show(wrapped(self._text, width))
        self._pace.drawn(start)

    def _show(self, lines: list[str]) -> None:
        self._live.show([f"{DIM}{line}{PLAIN}" for line in lines])


def wrapped(text: str, width: int) -> list[str]:
    """Lines of text, broken between words such that none is `width` cells wide (wide characters have two)."""
    console, width = Console(width=width), max(2, width - 1)
    return [line.plain.rstrip() for line in Text(text).wrap(console, width)]
