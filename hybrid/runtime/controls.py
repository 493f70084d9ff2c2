"""Control tokens written as text: keep those of a user apart from those of a template.

A template writes control tokens as text (`<|im_end|>`), and so may a user. Before rendering, `guard` breaks every
control-token text inside a message with a marker; after rendering, `split` cuts the prompt at those that are whole.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

# Unicode sets these code points aside for a program's private use: no text should hold one.
NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
LSTRIP, RSTRIP = 1 << 7, 1 << 8
"""Bits of `llama_token_attr`."""
C_SPACE = " \t\n\v\f\r"
"""What C's isspace accepts, by which llama.cpp strips around tokens marked so."""


def occurrences(text: str, controls: Collection[str]) -> Iterator[tuple[int, str]]:
    """(index, control text) wherever one begins in `text`, overlapping ones too; at each index the longest."""
    lengths = sorted({len(c) for c in controls}, reverse=True)
    for i in _positions(text, {c[0] for c in controls}):
        found = next((text[i : i + n] for n in lengths if text[i : i + n] in controls), None)
        if found is not None:
            yield i, found


def guard(text: str, controls: Collection[str], marker: str) -> str:
    """`text` with `marker` inside every control-token text, and where it ends or begins amid one, so that what the
    template writes around it (white space stripped or not) cannot complete it. Control texts of one character are
    left alone: there is no inside."""
    at = {i + 1 for i, _ in occurrences(text, controls)}
    longest = max(map(len, controls), default=0)
    head, tail = text.lstrip()[:longest], text.rstrip()[-longest:]
    for i in _positions(tail, {c[0] for c in controls}):
        if any(c.startswith(tail[i:]) for c in controls):
            at.add(len(text.rstrip()))
    for i in _positions(head, {c[-1] for c in controls}):
        if any(c.endswith(head[: i + 1]) for c in controls):
            at.add(len(text) - len(text.lstrip()))
    return marker.join(text[a:b] for a, b in itertools.pairwise([0, *sorted(at), len(text)]))


def guard_all(value: Any, controls: Collection[str], marker: str) -> Any:
    """`guard` for every string in `value`, however deep in mappings and lists; also for keys that are no plain words
    (those are what a template looks things up by)."""
    if isinstance(value, str):
        return guard(value, controls, marker)
    if isinstance(value, Mapping):
        return {_guarded_key(k, controls, marker): guard_all(v, controls, marker) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [guard_all(v, controls, marker) for v in value]
    return value


def unused_marker(value: Any, controls: Collection[str]) -> str | None:
    """A noncharacter found neither in the strings of `value` nor in a control token; None if all are taken."""
    used = set().union(*_strings(value), *controls)
    return next((c for c in NONCHARACTERS if c not in used), None)


def split(text: str, controls: Mapping[str, int], attributes: Callable[[int], int] = lambda _: 0) -> list[str | int]:
    """Cut `text` at control-token texts: ids in their place, no empty pieces.

    A token whose `attributes` have LSTRIP or RSTRIP swallows the white space before or after it
    (`llama_vocab::impl::tokenizer_st_partition` in llama.cpp).
    """
    pieces: list[str | int] = []
    begin = 0
    for start, found in occurrences(text, controls):
        if start < begin:
            continue  # inside the token before
        token = controls[found]
        plain = text[begin:start].rstrip(C_SPACE) if attributes(token) & LSTRIP else text[begin:start]
        pieces += [plain, token] if plain else [token]
        begin = start + len(found)
        if attributes(token) & RSTRIP:
            begin = len(text) - len(text[begin:].lstrip(C_SPACE))
    return pieces + [text[begin:]] * (begin < len(text))


def _guarded_key(key: Any, controls: Collection[str], marker: str) -> Any:
    return guard(key, controls, marker) if isinstance(key, str) and not key.isidentifier() else key


def _positions(text: str, characters: set[str]) -> list[int]:
    """Where any of `characters` stands in `text`: a vocabulary has thousands of control tokens, few first letters."""
    if not characters:
        return []
    return [m.start() for m in re.finditer("[" + re.escape("".join(characters)) + "]", text)]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _strings(pair)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _strings(v)
