"""Where a text may be cut: headings, paragraphs, lines, sentences, words, and at last characters."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

MAX_CHARS = 400
"""A longer sentence is cut at words, a longer word at characters: tokenizers are at their best, and some at their
safest, with short pieces."""
SHORT = 160

LINE = re.compile(r"[^\n]*\n+|[^\n]+")
SENTENCE_END = re.compile(
    r"""(?<![.!?…])[.!?…]++["'”’»)\]]*+(?=\s)"""  # 'He left. She stayed.'
    r"""|[。！？｡।۔؟]++["'”’」』）】》]*+"""  # CJK, Devanagari, Urdu, Arabic: no space follows
)
CLAUSE_END = re.compile(r"(?<=[，、；：])|(?=\s)")
HEADING = re.compile(
    r"\s{0,3}(?:#{1,6}\s|(?:chapter|part|section|appendix|book|act|scene)\s+(?:\d+|[ivxlcdm]+|[a-z])\b.{0,80}$"
    r"|第[\d一二三四五六七八九十百千零〇两]+[章节節回部卷篇]|\d+(?:\.\d+)*\.?\s+[A-Z][^.!?]{0,80}$)",
    re.IGNORECASE,
)
JOINERS = frozenset("\u200d\ufe0e\ufe0f") | frozenset(map(chr, range(0x1F3FB, 0x1F400)))
"""They belong to the emoji before them."""


class Cut(IntEnum):
    """What lies at the place before a segment; the higher, the better to cut there."""

    CHARACTER = 0
    WORD = 1
    SENTENCE = 2
    LINE = 3
    PARAGRAPH = 4
    HEADING = 5


class Segment(NamedTuple):
    """A piece of text of at most MAX_CHARS characters, and what lies before it."""

    text: str
    before: Cut


def segments(text: str) -> Iterator[Segment]:
    """Cut `text` into segments, in linear time; joined they are the text again. Short ones are joined with the next:
    a call of the tokenizer costs as much as some hundred characters."""
    held: Segment | None = None
    for segment in _all(text):
        if held is not None and len(held.text) + len(segment.text) <= SHORT and _joins(held, segment):
            held = Segment(held.text + segment.text, held.before)
            continue
        if held is not None:
            yield held
        held = segment
    if held is not None:
        yield held


def _joins(held: Segment, segment: Segment) -> bool:
    return segment.before < (Cut.PARAGRAPH if len(held.text) > SHORT // 4 else Cut.HEADING)


def _all(text: str) -> Iterator[Segment]:
    """Every segment there is.

    Newlines end the segment they follow; a space begins the segment it precedes, as most tokenizers' words do.
    """
    before = Cut.HEADING
    for match in LINE.finditer(text):
        line = match[0]
        heading = HEADING.match(line[:200].rstrip("\n")) is not None
        if heading and before >= Cut.LINE:
            before = Cut.HEADING
        body = line.rstrip("\n")
        start = 0
        for end in (*(m.end() for m in SENTENCE_END.finditer(body)), len(line)):
            if not line[start:end].strip("\n") and start:
                continue
            stop = len(line) if not line[end:].strip("\n") else end
            yield from _short(line[start:stop], before)
            before, start = Cut.SENTENCE, stop
            if stop == len(line):
                break
        before = Cut.PARAGRAPH if line.endswith("\n\n") else Cut.LINE
        if heading:
            before = Cut.CHARACTER  # a heading stays with what it heads


def _short(text: str, before: Cut) -> Iterator[Segment]:
    """`text` in pieces of at most MAX_CHARS, cut before spaces and after commas where there are any."""
    start = 0
    while len(text) - start > MAX_CHARS:
        window = text[start : start + MAX_CHARS]
        cut, after = 0, Cut.WORD
        for match in CLAUSE_END.finditer(window, 1):
            cut = match.end()
        if cut < MAX_CHARS // 4:
            cut, after = _character(text, start + MAX_CHARS) - start, Cut.CHARACTER
        yield Segment(text[start : start + cut], before)
        start, before = start + cut, after
    if start < len(text):
        yield Segment(text[start:], before)


def halves(segment: Segment) -> tuple[Segment, Segment] | None:
    """A segment in two, between words where that is possible; None for a single character."""
    text = segment.text
    middle = len(text) // 2
    space = text.find(" ", middle)
    if 0 < space < len(text) - 1:
        return Segment(text[:space], segment.before), Segment(text[space:], Cut.WORD)
    middle = _character(text, middle)
    if not 0 < middle < len(text):
        return None
    return Segment(text[:middle], segment.before), Segment(text[middle:], Cut.CHARACTER)


def _character(text: str, at: int) -> int:
    """The nearest place before `at` that is not inside an emoji or before an accent; `at` if there is none near."""
    for i in range(at, max(at - 32, 0), -1):
        if text[i] not in JOINERS and text[i - 1] != "\u200d" and not unicodedata.combining(text[i]):
            return i
    return at
