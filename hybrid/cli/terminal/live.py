"""The last lines on a terminal, while they may still change."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from rich.cells import cell_len

from hybrid.prefix import common_prefix

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
LAYOUT = re.compile(ESCAPES.pattern + r"|[\s\u2500-\u257f]+")
"""What the length of the lines decides on: spaces, and the lines around the cells of a table."""
BEGIN, END = "\x1b[?2026h", "\x1b[?2026l"
"""Synchronised output: a terminal that knows it shows nothing in between."""

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
SHARE = 0.1
"""Of the time, what drawing may take: the processors are busy with the model."""
LEAST_INTERVAL_S = 1 / 30

Size = Callable[[], tuple[int, int]]
"""(columns, lines) of the terminal now."""


class LiveLines:
    """Lines that were drawn and can be drawn anew, each shorter than the terminal is wide.

    Only what differs is written, in one piece, so that nothing flickers. The cursor stays at the end of the last line.
    Lines that have left the screen at its top can no longer be changed. A terminal that becomes narrower is expected
    to break the lines that are too long for it, as most do.
    """

    def __init__(self, write: Callable[[str], None], size: Size) -> None:
        self._write, self._size = write, size
        self._lines: list[str] = []
        self._columns = 0
        self._gone = 0
        """Lines of these that are not above the others, but have left the screen as they were for another width."""

    def show(self, lines: Sequence[str]) -> None:
        """Make the live lines `lines`."""
        columns, rows = self._size()
        new, old = list(lines) or [""], self._lines
        resized = bool(old) and columns != self._columns
        same = 0 if resized else common_prefix(old, new)
        if not resized and same == len(old) == len(new):
            return
        if same == len(old):
            out = "\n" * bool(old) + "\n".join(new[same:])
        else:
            heights = [_height(line, columns) if resized else 1 for line in old]
            first = min(max(same, self._gone, _reach(heights, rows)), len(old) - 1)
            first = first if resized else min(first, len(new) - 1)
            up = sum(heights[first:]) - 1
            if resized:
                first = self._gone = _where_goes_on(old[:first], new)
            # Each line is erased on its own: tmux takes a screen that is erased as a whole for one to be kept.
            out = (f"\x1b[{up}A" if up else "") + "\r" + "\n".join(f"\x1b[K{line}" for line in new[first:]) + "\x1b[J"
        self._write(BEGIN + out + END)
        self._lines, self._columns = new, columns
        self._gone = min(self._gone, len(new) - 1)

    def keep(self) -> None:
        """Leave the lines as they are and go on below them."""
        if self._lines:
            self._write("\n")
        self._lines, self._gone = [], 0


class Pace:
    """When to draw again: what comes in between waits for the next time."""

    def __init__(self) -> None:
        self.next_at: float = 0

    def due(self) -> bool:
        """Whether it is time."""
        return time.perf_counter() >= self.next_at

    def drawn(self, since: float) -> None:
        """It was drawn, which began at `since`."""
        end = time.perf_counter()
        self.next_at = end + max(LEAST_INTERVAL_S, (end - since) / SHARE)


def _height(line: str, columns: int) -> int:
    """Rows that a line takes once the terminal has become narrower."""
    return max(1, -(-cell_len(ESCAPES.sub("", line)) // max(1, columns)))


def _reach(heights: Sequence[int], rows: int) -> int:
    """The first line that the cursor can go up to from the last one: it does not leave the screen."""
    first, up = len(heights), 0
    while first and up + heights[first - 1] < rows:
        first -= 1
        up += heights[first]
    return first


def _where_goes_on(gone: Sequence[str], lines: Sequence[str]) -> int:
    """The first of `lines` that has more than what is in `gone`, the same text in lines of another length."""
    left = sum(map(_n_letters, gone))
    for i, line in enumerate(lines):
        if left <= 0:
            return i
        left -= _n_letters(line)
        if left < 0:
            return i
    return len(lines) - 1


def _n_letters(line: str) -> int:
    """Characters that do not depend on a line's length."""
    return len(LAYOUT.sub("", line))
