"""Words that a terminal shows and does not obey: names and messages may come out of a downloaded file."""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` on one line, its control characters (escape sequences among them) replaced by question marks."""
    return "".join(c if c.isprintable() or c in EVERYDAY else "?" for c in " ".join(text.split("\n")))


EVERYDAY = "\u00a0\u00ad\u202f\u3000"
"""Spaces and hyphens that Python does not call printable, and every terminal shows."""
