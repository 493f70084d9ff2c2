"""Words that a terminal shows and does not obey: names and messages may come out of a downloaded file."""

from __future__ import annotations

import re
from unicodedata import category

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What a terminal would obey, beside line ends and tabs."""

SHOWN = "\u00ad\u200c\u200d"
"""The soft hyphen, and what joins and parts letters in Persian and in emoji: Python does not call them printable, and
terminals show them."""


def printable(text: str) -> str:
    """`text` on one line: a line end is a space, spaces stay as they are, and other control characters (those of
    escape sequences, those that turn the direction of writing) are question marks."""
    return "".join(_shown(c) for c in text)


def harmless(text: str) -> str:
    """`text` of any number of lines, with a replacement character for each that a terminal would obey."""
    return CONTROL.sub("\ufffd", text)


def _shown(c: str) -> str:
    if c.isprintable() or c in SHOWN or category(c) == "Zs":
        return c
    return " " if c.isspace() else "?"
