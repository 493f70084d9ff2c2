"""The bar of `hybrid tune` and `hybrid compare`: on stderr, and only where that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Show = Callable[[str, float], None]
"""Called with what is done now, and the share of the whole that is over, 0 to 1."""


@contextmanager
def measuring(left: Callable[[], str]) -> Iterator[Show]:
    """A bar, with what is done now before it and what `left` says behind it, asked again as time passes."""
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
