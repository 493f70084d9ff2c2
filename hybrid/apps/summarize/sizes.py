"""How long answers may be, and what that leaves of the context for the text."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from hybrid.errors import BadRequestError

LENGTHS = {"short": 60, "medium": 150, "long": 400}
"""Words."""
PART_WORDS = (40, 150)
"""A part's summary has as many words as the whole's, but not fewer or more than these."""
TOKENS_PER_WORD = (1.4, 4.0)
"""Limits of what a document's own words and tokens are trusted to say about the summary's."""
SLACK, LAST_SLACK, SPARE = 1.3, 2.0, 24
"""Models count words badly; a part's summary that is cut off does less harm than the last one."""
CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
WORD = re.compile(rf"[{CJK}]|[^\W{CJK}]+")


def words_of(length: str | int) -> int:
    """The words that `length` asks for: short, medium, long, "N words" or N. Raises BadRequestError for others."""
    text = str(length).strip().lower()
    if text in LENGTHS:
        return LENGTHS[text]
    match = re.fullmatch(r"(\d{1,6})(?:\s*words?)?", text)
    if match is None or int(match[1]) == 0:
        raise BadRequestError(
            f"--length is short, medium, long or a number of words such as '80 words', not {length!r}."
        )
    return int(match[1])


def phrase(words: int) -> str:
    """What a prompt says about the length."""
    return f"in about {words} words"


@dataclass(frozen=True)
class Sizes:
    """Words asked for, and the tokens allowed for them, in the whole's summary and in a part's."""

    words: int
    room: int
    part_words: int
    part_room: int


def sizes_of(words: int, text: str, n_tokens: int, free: int) -> Sizes:
    """Sizes for a summary of `words` words of `text`, which has `n_tokens`; `free` is what instructions leave of the
    context. A part's answer takes at most a quarter of that: two of them must fit beside an answer to be merged."""
    sample = text[:100_000]
    n_words = len(WORD.findall(sample)) * len(text) / max(1, len(sample))
    per_word = min(max(n_tokens / max(1.0, n_words), TOKENS_PER_WORD[0]), TOKENS_PER_WORD[1])

    def room(n: int, slack: float = SLACK) -> int:
        return math.ceil(n * per_word * slack) + SPARE

    part_words = min(max(words, PART_WORDS[0]), PART_WORDS[1])
    part_room = min(room(part_words), max(1, free // 4))
    if part_room < room(part_words):
        part_words = max(10, int((part_room - SPARE) / per_word / SLACK))
    return Sizes(words, room(words, LAST_SLACK), part_words, part_room)
