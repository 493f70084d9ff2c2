"""Metadata values of a GGUF: their types, and decoding one record when somebody asks for it."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hybrid.model.records import RawField


class ScalarType(NamedTuple):
    """A fixed-size value type: its name, its `struct` code (little endian) and its size in bytes."""

    name: str
    code: str
    n_bytes: int


SCALARS: dict[int, ScalarType] = {
    0: ScalarType("uint8", "B", 1),
    1: ScalarType("int8", "b", 1),
    2: ScalarType("uint16", "H", 2),
    3: ScalarType("int16", "h", 2),
    4: ScalarType("uint32", "I", 4),
    5: ScalarType("int32", "i", 4),
    6: ScalarType("float32", "f", 4),
    7: ScalarType("bool", "?", 1),
    10: ScalarType("uint64", "Q", 8),
    11: ScalarType("int64", "q", 8),
    12: ScalarType("float64", "d", 8),
}
UINT32, STRING, ARRAY = 4, 8, 9
"""GGUF value types by number (`gguf_type` in `gguf.h`)."""


def _string(raw: memoryview, at: int) -> tuple[str, int]:
    """The string at `at` and the offset behind it. llama.cpp keeps bytes as they are; a broken one becomes U+FFFD."""
    (n,) = struct.unpack_from("<Q", raw, at)
    end = at + 8 + n
    return str(raw[at + 8 : end], "utf-8", "replace"), end


def decode(field: RawField) -> Any:
    """The value of a metadata record: str, int, float, bool, or a list of those."""
    raw = field.raw
    (key_length,) = struct.unpack_from("<Q", raw, 0)
    at = 8 + key_length + 4
    if field.type == STRING:
        return _string(raw, at)[0]
    if field.type != ARRAY:
        return struct.unpack_from("<" + SCALARS[field.type].code, raw, at)[0]
    item, n = struct.unpack_from("<IQ", raw, at)
    at += 12
    if item != STRING:
        return list(struct.unpack_from(f"<{n}{SCALARS[item].code}", raw, at))
    strings = []
    for _ in range(n):
        text, at = _string(raw, at)
        strings.append(text)
    return strings


def array_length(field: RawField) -> int | None:
    """The number of items of an array record; None for any other record."""
    if field.type != ARRAY:
        return None
    (key_length,) = struct.unpack_from("<Q", field.raw, 0)
    (n,) = struct.unpack_from("<Q", field.raw, 8 + key_length + 8)
    return int(n)


def array_item_type(field: RawField) -> int | None:
    """The GGUF value type of an array record's items; None for any other record."""
    if field.type != ARRAY:
        return None
    (key_length,) = struct.unpack_from("<Q", field.raw, 0)
    return int(struct.unpack_from("<I", field.raw, 8 + key_length + 4)[0])


class Metadata(Mapping[str, Any]):
    """The metadata of a file: a read-only mapping that decodes a value on first access and keeps it."""

    def __init__(self, fields: Mapping[str, RawField]) -> None:
        self._fields = fields
        self._decoded: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._decoded:
            self._decoded[key] = decode(self._fields[key])
        return self._decoded[key]

    def __contains__(self, key: object) -> bool:
        return key in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)
