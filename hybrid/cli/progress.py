"""A progress bar on stderr, for loads and long prompts. By hand: importing rich takes longer than a small model."""

from __future__ import annotations

import os
import sys
import threading
import time

WIDTH = 24
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
                self._draw(f"{label} {bar(share)} {share:4.0%}")

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


def bar(fraction: float) -> str:
    """`fraction` as a bar of WIDTH characters."""
    full = round(max(0.0, min(1.0, fraction)) * WIDTH)
    return "█" * full + "░" * (WIDTH - full)
