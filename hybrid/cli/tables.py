"""Tables of figures for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def figures(*names: str) -> Table:
    """A table with these columns, right-aligned, and one without a name for a few words at the end of a row. Nothing in
    it is wrapped, and columns are close together, so that it fits 80 characters."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    return table
