"""What `hybrid tune` and `hybrid compare` share while they measure: the bar, and how they end early."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from hybrid.cli import ENDING

Show = Callable[[str, float], None]
"""Called with what is done now, and the share of the whole that is over, 0 to 1."""


@contextmanager
def measuring(left: Callable[[], str]) -> Iterator[Show]:
    """A bar, with what is done now before it and what `left` says behind it, asked again as time passes: on stderr, and
    only where that is a terminal. What tells the program to end is like Ctrl-C: what was measured is shown."""
    for number in ENDING:
        handler = signal.getsignal(number)
        if callable(handler):  # ours, which remembers the exit code
            signal.signal(number, partial(_interrupt, handler))
    with _bar(left) as show:
        yield show


def _interrupt(handler: Callable[[int, FrameType | None], Any], number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, handler)  # the second time it ends at once
    with suppress(SystemExit):
        handler(number, frame)
    raise KeyboardInterrupt


@contextmanager
def _bar(left: Callable[[], str]) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda what, share: None
        return

    class Left(ProgressColumn):
        """What `left` says."""

        max_refresh = 0.5

        def render(self, task: Task) -> Text:
            return Text(left())

    with Progress(TextColumn("{task.description}"), BarColumn(), Left(), console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)
