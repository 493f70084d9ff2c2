"""Is an answer worth keeping? Empty ones and ones that go round in circles are not."""

from __future__ import annotations

import re
from typing import Literal

Problem = Literal["empty", "looping"]

MIN_LOOP_CHARS = 120
"""Shorter repetitions are rulers, refrains and tables."""
MIN_ROUNDS = 3
CLOSERS = ".!?…。！？\"'”’)"
NGRAM, MIN_UNITS, MIN_DISTINCT = 6, 60, 0.5
ENDS = re.compile(r"(?<!\s\d)(?<!\s\d\d)[.!?…][\"'”’)\]*_]*(?=\s|\Z)|[。！？][”’」』）]*|\n")
"""Where a sentence or a line ends; not after the number of a list's item."""
CUT_OFF = " […]"
"""At the end of a text that its token limit cut off."""
THINKING = re.compile(r"\A\s*<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.S)


def cleaned(text: str) -> str:
    """An answer without the white space around it, a reasoning model's thoughts before it, and what is no text in it.

    U+FFFD stands for bytes that are no character: nobody can read it, and it takes three tokens to hand on one byte.
    """
    return THINKING.sub("", text).replace("\N{REPLACEMENT CHARACTER}", "").strip()


def problem(text: str) -> Problem | None:
    """What is wrong with an answer, or None."""
    if not re.search(r"\w", text):
        return "empty"
    return "looping" if loop_of(text) or _repetitive(text) else None


def loop_of(text: str) -> int:
    """The period, in characters, with which the end of `text` repeats itself; 0 if it does not.

    It has to go round at least MIN_ROUNDS times, over at least MIN_LOOP_CHARS.
    """
    n = len(text)
    for period in range(1, n // MIN_ROUNDS + 1):
        span = max(MIN_LOOP_CHARS, MIN_ROUNDS * period)
        if span <= n and text[n - period :] == text[n - 2 * period : n - period]:
            tail = text[n - span :]
            if tail[period:] == tail[:-period]:
                return period
    return 0


def without_loop(text: str) -> str:
    """`text` with a loop at its end gone round once only."""
    period = loop_of(text)
    if not period:
        return text
    start = len(text) - period
    while start > 0 and text[start - 1] == text[start - 1 + period]:
        start -= 1
    end = start + period
    while end < len(text) and text[end] in CLOSERS:
        end += 1
    return text[:end].rstrip()


def whole_part(text: str) -> str:
    """`text`, which was cut off anywhere, up to its last whole sentence; where that would cost more than half of it, up
    to its last whole word."""
    end = max((match.end() for match in ENDS.finditer(text)), default=0)
    if end < len(text) / 2:
        end = max((match.start() for match in re.finditer(r"\s", text)), default=len(text))
    return text[:end].rstrip()


def _repetitive(text: str) -> bool:
    """Most runs of six words (or twelve characters, without spaces between words) occur more than once."""
    units: list[str] = text.split()
    size = NGRAM
    if len(units) * 20 < len(text):
        units, size = list(text), 2 * NGRAM
    n = len(units) - size + 1
    if n < MIN_UNITS:
        return False
    return len({tuple(units[i : i + size]) for i in range(n)}) < MIN_DISTINCT * n
