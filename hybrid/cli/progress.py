"""A progress bar on stderr, for loads and long prompts. By hand: importing rich takes longer than a small model."""

from __future__ import annotations

import os
import sys
import threading
import time

WIDTH, LEAST_WIDTH = 24, 4
"""Characters of the bar; where the terminal has room for fewer than the least, there is none."""
PATIENCE_S = 0.5
"""What takes less than this needs no bar."""


class ProgressBar:
    """Callable with (stage, fraction) from any thread, as `Hybrid(progress=…)` wants it.

    Draws only on a terminal that can erase a line. The halves of a model load at the same time and share a bar.
    """

    def __init__(self) -> None:
        self.enabled = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._lock = threading.Lock()
        self._done: dict[str, float] = {}
        self._since: float | None = None
        self._drawn = ""

    def __call__(self, stage: str, fraction: float) -> None:
        """Show that `stage` ("head", "tail", "prompt") is done to `fraction`, 0 to 1."""
        if not self.enabled:
            return
        with self._lock:
            now = time.monotonic()
            self._since = now if self._since is None else self._since
            self._done[stage] = fraction
            share = sum(self._done.values()) / len(self._done)
            if now - self._since >= PATIENCE_S:
                label = "Reading the prompt" if "prompt" in self._done else "Loading"
                self._draw(progress_line(label, share, columns()))

    def clear(self) -> None:
        """Erase the bar; the next call begins another."""
        with self._lock:
            self._draw("")
            self._done, self._since = {}, None

    def _draw(self, line: str) -> None:
        if line != self._drawn:
            sys.stderr.write("\r\x1b[K" + line)
            sys.stderr.flush()
            self._drawn = line


def progress_line(label: str, fraction: float, n_columns: int) -> str:
    """`label`, a bar and a percentage, short enough for a terminal of so many columns not to break the line: what has
    been broken cannot be erased."""
    width = min(WIDTH, n_columns - 1 - len(f"{label}   100%"))
    middle = f" {bar(fraction, width)}" if width >= LEAST_WIDTH else ""
    return f"{label}{middle} {fraction:4.0%}"[: n_columns - 1]


def bar(fraction: float, width: int = WIDTH) -> str:
    """`fraction` as a bar of so many characters."""
    full = round(max(0.0, min(1.0, fraction)) * width)
    return "█" * full + "░" * (width - full)


def columns() -> int:
    """Of the terminal that stderr is; 80 where nobody says."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
