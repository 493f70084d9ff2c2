"""The last lines on a terminal, while they may still change."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rich.cells import cell_len

from hybrid.prefix import common_prefix

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
BEGIN, END = "\x1b[?2026h", "\x1b[?2026l"
"""Synchronised output: a terminal that knows it shows nothing in between."""

Size = Callable[[], tuple[int, int]]
"""(columns, lines) of the terminal now."""


class LiveLines:
    """Lines that were drawn and can be drawn anew, each shorter than the terminal is wide.

    Only what differs is written, in one piece, so that nothing flickers. The cursor stays at the end of the last line.
    Lines that have left the screen at its top can no longer be changed.
    """

    def __init__(self, write: Callable[[str], None], size: Size) -> None:
        self._write, self._size = write, size
        self._lines: list[str] = []
        self._columns = 0

    def show(self, lines: Sequence[str]) -> None:
        """Make the live lines `lines`."""
        columns, rows = self._size()
        new, old = list(lines) or [""], self._lines
        resized = bool(old) and columns != self._columns
        first = 0 if resized else common_prefix(old, new)
        if not resized and first == len(old) == len(new):
            return
        out = BEGIN
        if first == len(old):
            out += "\n" if old else ""
        else:
            # The cursor reaches the lines on the screen, and no others.
            heights = [self._height(line, columns) if resized else 1 for line in old]
            reach, up = len(old), 0
            while reach > first and up + heights[reach - 1] < rows:
                reach -= 1
                up += heights[reach]
            first = min(max(first, reach), len(old) - 1, len(new) - 1)
            up = sum(heights[first:]) - 1
            out += (f"\x1b[{up}A" if up else "") + "\r\x1b[J"
        out += "\n".join(new[first:])
        self._write(out + END)
        self._lines, self._columns = new, columns

    def keep(self) -> None:
        """Leave the lines as they are and go on below them."""
        if self._lines:
            self._write("\n")
        self._lines = []

    def clear(self) -> None:
        """Take the lines away."""
        if self._lines:
            self.show([""])
            self._write("\r")
        self._lines = []

    def _height(self, line: str, columns: int) -> int:
        """Rows that a line takes once the terminal has become narrower."""
        return max(1, -(-cell_len(ESCAPES.sub("", line)) // max(1, columns)))
