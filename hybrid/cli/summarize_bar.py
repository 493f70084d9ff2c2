"""The progress bar of `hybrid summarize`: tokens read, and the time left."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from hybrid.cli.progress import ProgressBar, bar, columns

if TYPE_CHECKING:
    from hybrid.apps.summarize.progress import Progress

WORDS = {"map": "Reading", "single": "Reading", "refine": "Reading", "reduce": "Merging"}
EVERY_S = 0.2


class SummaryBar:
    """Shows a model's load, then a summary's progress, in one line on stderr; nothing where that is no terminal."""

    def __init__(self) -> None:
        self._loading = ProgressBar()
        self._loaded = False
        self._drawn = False
        self._at = 0.0
        self._last: Progress | None = None

    def load(self, stage: str, fraction: float) -> None:
        """For `Hybrid(progress=…)`: the bar of the load, and later how far the prompt of the moment is read."""
        if stage != "prompt" and not self._loaded:
            self._loading(stage, fraction)
        elif stage == "prompt" and self._last is not None:
            self._draw(f"{line_of(self._last)}, prompt {fraction:.0%}")

    def show(self, progress: Progress) -> None:
        """For `summarize(progress=…)`."""
        self._loaded, self._last = True, progress
        self._draw(line_of(progress))

    def _draw(self, line: str) -> None:
        now = time.monotonic()
        if not self._loading.enabled or now - self._at < EVERY_S:
            return
        self._loading.clear()
        self._at = now
        sys.stderr.write("\r\x1b[K" + line[: columns() - 1])
        sys.stderr.flush()
        self._drawn = True

    def clear(self) -> None:
        """Erase the line; the next call of `show` draws it again."""
        self._last = None
        self._loading.clear()
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._drawn, self._at = False, 0.0


def line_of(p: Progress) -> str:
    """`Reading ███░ 12,000 of 60,000 tokens, 7 of 34, 3:05 left`."""
    share = p.done_tokens / p.total_tokens if p.total_tokens else 1.0
    left = "" if p.left_s is None else f", {clock(p.left_s)} left"
    count = f", {p.jobs_done} of {p.jobs}" if p.jobs > 1 else ""
    return f"{WORDS.get(p.phase, p.phase)} {bar(share)} {p.done_tokens} of {p.total_tokens} tokens{count}{left}"


def clock(seconds: float) -> str:
    """`3:05`, `1:02:03`."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
