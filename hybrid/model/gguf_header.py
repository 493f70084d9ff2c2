"""Parsing a GGUF header: strict about every number in it, lazy about every value.

Format: ggml's `docs/gguf.md`; the checks are those of `ggml/src/gguf.cpp`, so that what passes here also loads there.
Strings of arrays are skipped, not decoded: Gemma's 262,144-token vocabulary costs some hundredths of a second.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NoReturn

from hybrid.errors import BadFileError
from hybrid.model.ggml_types import GGML_TYPES
from hybrid.model.gguf_values import ARRAY, SCALARS, STRING, UINT32
from hybrid.model.not_gguf import piece_hint
from hybrid.model.records import RawField, TensorInfo

MAX_DIMS = 4
MAX_NAME = 63
"""Bytes of a tensor name that ggml can hold (GGML_MAX_NAME with its terminator)."""
MAX_STRINGS = 1 << 25
"""Strings skipped in one header: a hundred times the largest vocabulary, and seconds at worst for a hostile file."""
MIN_FIELD_BYTES = 8 + 1 + 4 + 1
MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
MAX_RECORDS = 1 << 20
"""Metadata records or tensors in one file; real models have some thousands."""


@dataclass(frozen=True)
class Header:
    """Everything before the data section of one file."""

    version: int
    alignment: int
    fields: dict[str, RawField]
    tensors: dict[str, TensorInfo]


def parse_header(view: memoryview, name: str, shard: int = 0) -> Header:
    """Parse the file in `view` (all of it, data included). `name` is how errors call the file.

    Raises BadFileError for anything malformed, inconsistent or truncated. Does not touch the data section.
    """
    return _Parser(view, name, shard).header()


class _Parser:
    """A cursor over the file's bytes."""

    def __init__(self, view: memoryview, name: str, shard: int) -> None:
        self.view = view
        self.size = len(view)
        self.name = name
        self.shard = shard
        self.at = 0
        self.n_strings = 0

    def fail(self, what: str) -> NoReturn:
        raise BadFileError(f"{self.name} is not a sound GGUF: {what}.")

    def need(self, n: int, what: str) -> None:
        """Make sure that n more bytes exist."""
        if n > self.size - self.at:
            raise BadFileError(
                f"{self.name} is truncated or damaged: {what} at byte {self.at} needs {n} bytes, "
                f"but the file ends at byte {self.size}."
            )

    def number(self, code: str, what: str) -> int:
        """A little-endian integer: `I` 32 bits, `Q` 64 bits."""
        size = 4 if code == "I" else 8
        self.need(size, what)
        (value,) = struct.unpack_from("<" + code, self.view, self.at)
        self.at += size
        return int(value)

    def text(self, what: str) -> str:
        """A string that names something; it must be UTF-8 and not empty."""
        n = self.number("Q", f"the length of {what}")
        self.need(n, what)
        if n == 0:
            self.fail(f"{what} is empty")
        if n > 0xFFFF:
            self.fail(f"{what} is {n} bytes long")
        try:
            value = str(self.view[self.at : self.at + n], "utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8")
        self.at += n
        return value

    def header(self) -> Header:
        self.at = 4  # the magic was checked by who opened the file
        version = self.number("I", "the version")
        if version & 0xFFFF == 0:
            raise BadFileError(f"{self.name} is a big-endian GGUF; convert it to little-endian (gguf-convert-endian).")
        if version not in (2, 3):
            raise BadFileError(f"{self.name} is GGUF version {version}; versions 2 and 3 are supported.")
        n_tensors = self.count("tensors", MIN_TENSOR_BYTES)
        n_fields = self.count("metadata records", MIN_FIELD_BYTES)
        fields: dict[str, RawField] = {}
        for i in range(n_fields):
            field = self.field(i)
            if field.key in fields:
                self.fail(f"metadata key {field.key!r} appears twice")
            fields[field.key] = field
        alignment = self.alignment(fields.get("general.alignment"))
        tensors: dict[str, TensorInfo] = {}
        for i in range(n_tensors):
            tensor = self.tensor(i)
            if tensor.name in tensors:
                self.fail(f"tensor {tensor.name!r} appears twice")
            tensors[tensor.name] = tensor
        return Header(version, alignment, fields, self.place(tensors, alignment))

    def count(self, what: str, least_bytes: int) -> int:
        n = self.number("Q", f"the number of {what}")
        if n > MAX_RECORDS or n * least_bytes > self.size:
            self.fail(f"it claims {n} {what}, more than its {self.size} bytes can hold")
        return n

    def field(self, i: int) -> RawField:
        start = self.at
        key = self.text(f"the key of metadata record {i}")
        kind = self.number("I", f"the type of {key!r}")
        self.skip_value(key, kind)
        return RawField(key, kind, self.view[start : self.at])

    def skip_value(self, key: str, kind: int) -> None:
        if kind in SCALARS:
            self.skip(SCALARS[kind].n_bytes, key)
        elif kind == STRING:
            self.skip(self.number("Q", f"the length of {key!r}"), key)
        elif kind == ARRAY:
            item = self.number("I", f"the item type of {key!r}")
            n = self.number("Q", f"the length of {key!r}")
            if item in SCALARS:
                self.skip(n * SCALARS[item].n_bytes, key)
            elif item == STRING:
                self.skip_strings(n, key)
            else:
                self.fail(f"metadata {key!r} is an array of items of type {item}")
        else:
            self.fail(f"metadata {key!r} has unknown type {kind}")

    def skip(self, n: int, key: str) -> None:
        self.need(n, f"the value of {key!r}")
        self.at += n

    def skip_strings(self, n: int, key: str) -> None:
        self.need(n * 8, f"the value of {key!r}")
        self.n_strings += n
        if self.n_strings > MAX_STRINGS:
            self.fail(f"its metadata holds more than {MAX_STRINGS} strings")
        view, at, length_at = self.view, self.at, struct.Struct("<Q").unpack_from
        try:
            for _ in range(n):
                at += 8 + length_at(view, at)[0]
        except (struct.error, OverflowError, IndexError):
            at = self.size + 1  # a length pointed outside the file; the loop itself checks nothing, to be fast
        self.skip(at - self.at, key)

    def alignment(self, field: RawField | None) -> int:
        if field is None:
            return 32
        if field.type != UINT32:
            self.fail("general.alignment is not a uint32")
        (value,) = struct.unpack("<I", field.raw[-4:])
        if value == 0 or value & (value - 1):
            self.fail(f"general.alignment is {value}, not a power of two")
        return int(value)

    def tensor(self, i: int) -> TensorInfo:
        """One row of the table; `offset` is still relative to the data section."""
        name = self.text(f"the name of tensor {i}")
        if len(name.encode()) > MAX_NAME:
            self.fail(f"the name of tensor {i} is longer than {MAX_NAME} bytes")
        n_dims = self.number("I", f"the dimensions of tensor {name!r}")
        if not 1 <= n_dims <= MAX_DIMS:
            self.fail(f"tensor {name!r} has {n_dims} dimensions")
        ne = [self.number("Q", f"the dimensions of tensor {name!r}") for _ in range(n_dims)]
        kind = self.number("I", f"the type of tensor {name!r}")
        offset = self.number("Q", f"the offset of tensor {name!r}")
        if 0 in ne:
            self.fail(f"tensor {name!r} has a dimension of zero")
        if kind not in GGML_TYPES:
            self.fail(f"tensor {name!r} has unknown type {kind}")
        _, block, block_bytes = GGML_TYPES[kind]
        if ne[0] % block:
            self.fail(f"tensor {name!r} has rows of {ne[0]} weights, not a multiple of its type's block of {block}")
        n_values = 1
        for n in ne:
            n_values *= n
        if n_values >= 1 << 63:
            self.fail(f"tensor {name!r} has {n_values} weights")
        return TensorInfo(name, tuple(reversed(ne)), kind, n_values // block * block_bytes, self.shard, offset)

    def place(self, table: dict[str, TensorInfo], alignment: int) -> dict[str, TensorInfo]:
        """Turn offsets into absolute ones. llama.cpp wants the data in table order, aligned, without gaps."""
        start = end = -(-self.at // alignment) * alignment
        placed: dict[str, TensorInfo] = {}
        expected = 0
        cut = ""
        for t in table.values():
            if t.offset != expected:
                how = (
                    "is not aligned" if t.offset % alignment else "overlaps" if t.offset < expected else "leaves a gap"
                )
                self.fail(f"the data of tensor {t.name!r} {how}: it is at offset {t.offset} instead of {expected}")
            at = start + t.offset
            end = at + t.n_bytes
            if end > self.size and not cut:
                cut = t.name
            placed[t.name] = TensorInfo(t.name, t.shape, t.type, t.n_bytes, t.shard, at)
            expected += -(-t.n_bytes // alignment) * alignment
        if cut:
            raise BadFileError(
                f"{self.name} is truncated: tensor {cut!r} and what follows need a file of {end} bytes, "
                f"but it has {self.size}; download it again{piece_hint(self.name)}."
            )
        for behind in (end, start + expected):
            if bytes(self.view[behind : behind + 4]) == b"GGUF":
                self.fail(
                    "another GGUF follows in it, as when shards were joined with cat; keep them apart, or join them "
                    "with `llama-gguf-split --merge`"
                )
        return placed
