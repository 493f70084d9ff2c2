"""Chunks of a text: as many of its segments as fit, measured in the model's own tokens, cut where it hurts least."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from hybrid.apps.summarize.segments import Cut, Segment, halves, segments
from hybrid.errors import BadRequestError

EARLIEST = 0.7
"""A good place to cut is looked for from this share of the size aimed at."""
LATEST = 1.15
FINENESS, FINEST = 8, 16
"""Pieces are no larger than an eighth of a chunk, or chunks of two large pieces would waste half of their room."""


class Tokens(Protocol):
    """Tokens of a text that continues another (`hybrid.apps.summarize.tokens.Tokenizer`)."""

    def __call__(self, text: str) -> list[int]:
        """Ids of `text`, control-token text as plain text."""


@dataclass(frozen=True)
class Piece:
    """A segment and its tokens."""

    text: str
    before: Cut
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """Consecutive pieces of a text: the first `n_overlap` of its tokens repeat the end of the chunk before."""

    text: str
    tokens: tuple[int, ...]
    n_overlap: int = 0
    overlap_chars: int = 0

    @property
    def n_new(self) -> int:
        """Tokens that no chunk before has."""
        return len(self.tokens) - self.n_overlap


def tokenized(text: str, tokens: Tokens) -> list[Piece]:
    """The pieces of `text`; every character is tokenized once."""
    return [Piece(s.text, s.before, tuple(tokens(s.text))) for s in segments(text)]


def chunked(pieces: Sequence[Piece], capacity: int, overlap: int, tokens: Tokens) -> list[Chunk]:
    """Pack `pieces` into chunks of at most `capacity` tokens, of which at most `overlap` are repeated ones.

    The chunks are of about one size, no more of them than about that needs, and each begins at the best cut near
    there. Takes linear time. Raises BadRequestError where a single character has more tokens than `capacity`.
    """
    fitting = [
        part
        for piece in pieces
        for part in _fitting(piece, max((capacity - overlap) // FINENESS, min(FINEST, capacity - overlap)), tokens)
    ]
    sums = [0]
    for piece in fitting:
        sums.append(sums[-1] + len(piece.tokens))
    chunks: list[Chunk] = []
    start = 0
    while start < len(fitting):
        first = start  # where the repeated pieces begin
        while chunks and first > 0 and sums[start] - sums[first - 1] <= overlap:
            first -= 1
        repeated = sums[start] - sums[first]
        end = _end(fitting, sums, start, capacity - repeated)
        part = fitting[first:end]
        chars = sum(len(piece.text) for piece in fitting[first:start])
        ids = tuple(token for piece in part for token in piece.tokens)
        chunks.append(Chunk("".join(piece.text for piece in part), ids, repeated, chars))
        start = end
    return chunks


def _end(pieces: Sequence[Piece], sums: Sequence[int], start: int, room: int) -> int:
    """The end of the chunk that begins at `start`: the best cut of those that leave chunks of about one size."""
    rest = sums[-1] - sums[start]
    if rest <= room:
        return len(pieces)
    aim = rest / math.ceil(rest / room)
    best = end = start
    while end < len(pieces) and sums[end + 1] - sums[start] <= room:
        end += 1
        size = sums[end] - sums[start]
        if size > LATEST * aim and best > start:
            break
        if size >= EARLIEST * aim and (best == start or pieces[end].before >= pieces[best].before):
            best = end
    return best if best > start else max(end, start + 1)


def _fitting(piece: Piece, capacity: int, tokens: Tokens) -> Iterator[Piece]:
    if len(piece.tokens) <= capacity:
        yield piece
        return
    parts = halves(Segment(piece.text, piece.before))
    if parts is None:
        raise BadRequestError(
            f"The context leaves room for {capacity} tokens of text at a time, too few for the character "
            f"{piece.text!r}; make it larger with -c."
        )
    for part in parts:
        yield from _fitting(Piece(part.text, part.before, tuple(tokens(part.text))), capacity, tokens)
