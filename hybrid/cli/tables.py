"""Tables of figures for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

LEAST_WIDTH = 79
"""Of a table, on however narrow a terminal: a line that goes on below can be read, a figure cut off cannot."""


def figures(*names: str) -> Table:
    """A table with these columns, right-aligned, and one without a name for a few words at the end of a row. Nothing in
    it is wrapped, and columns are close together, so that it fits 80 characters."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    return table


def show(console: Console, table: Table) -> None:
    """Print such a table with every figure whole."""
    width = console.width
    console.width = max(width, LEAST_WIDTH)
    console.print(table)
    console.width = width


def say(console: Console, sentence: str) -> None:
    """Print a sentence: one line, which a terminal gets broken between words."""
    console.print(sentence, markup=False, soft_wrap=not console.is_terminal)
