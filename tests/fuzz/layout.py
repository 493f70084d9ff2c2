"""A GGUF taken apart, so that any part of it can be changed and the whole put together again."""

from __future__ import annotations

import copy
import struct
from dataclasses import dataclass, field
from pathlib import Path

from hybrid.model.file import ModelFile
from hybrid.model.ggml_types import GGML_TYPES
from hybrid.model.gguf_values import SCALARS, STRING

ARRAY = 9


def text(value: bytes) -> bytes:
    """A GGUF string."""
    return struct.pack("<Q", len(value)) + value


@dataclass
class Record:
    """A metadata record; `value` is what follows its type."""

    key: bytes
    kind: int
    value: bytes

    @property
    def array(self) -> tuple[int, int] | None:
        """(item type, count) of an array."""
        return struct.unpack_from("<IQ", self.value) if self.kind == ARRAY and len(self.value) >= 12 else None

    def items(self) -> list[bytes]:
        """The items of an array, each as it lies in the file; as many as there are, whatever it claims."""
        if self.array is None:
            return []
        (kind, n), at, found = self.array, 12, list[bytes]()
        while len(found) < n and at < len(self.value):
            size = SCALARS[kind].n_bytes if kind in SCALARS else 8 + struct.unpack_from("<Q", self.value, at)[0]
            found.append(self.value[at : at + size])
            at += size
        return found


@dataclass
class Tensor:
    """A row of the tensor table and its data; `ne` is ggml's order."""

    name: bytes
    ne: list[int]
    kind: int
    data: bytes
    offset: int | None = None
    """In place of where the data lies."""
    n_dims: int | None = None


@dataclass
class Layout:
    """The parts of a file."""

    records: list[Record]
    tensors: list[Tensor]
    version: int = 3
    n_records: int | None = None
    n_tensors: int | None = None
    damage: list[tuple[int, bytes]] = field(default_factory=list)
    """Bytes that replace others in the whole file; a position counts modulo its size."""
    size: int | None = None
    """Where the file is cut off."""
    behind: bytes = b""

    def copy(self) -> Layout:
        """One that may be changed."""
        return copy.deepcopy(self)

    def find(self, key: str) -> Record | None:
        """The record of that key."""
        return next((record for record in self.records if record.key == key.encode()), None)

    @property
    def n_data(self) -> int:
        """Bytes of the tensors' data in the file."""
        return sum(len(t.data) + -len(t.data) % 32 for t in self.tensors)

    def build(self) -> bytes:
        """The file."""
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_records = len(self.records) if self.n_records is None else self.n_records
        head = bytearray(b"GGUF" + struct.pack("<IQQ", self.version, *(n % 2**64 for n in (n_tensors, n_records))))
        for record in self.records:
            head += text(record.key) + struct.pack("<I", record.kind) + record.value
        data = bytearray()
        for t in self.tensors:
            offset = len(data) if t.offset is None else t.offset
            head += text(t.name) + struct.pack("<I", (len(t.ne) if t.n_dims is None else t.n_dims) % 2**32)
            head += struct.pack(f"<{len(t.ne)}QIQ", *(n % 2**64 for n in t.ne), t.kind, offset % 2**64)
            data += t.data + bytes(-len(t.data) % 32)
        out = head + bytes(-len(head) % 32) + data
        for at, replacement in self.damage:
            at %= len(out)
            out[at : at + len(replacement)] = replacement
        return bytes(out[: self.size]) + self.behind


def n_bytes(ne: list[int], kind: int) -> int | None:
    """Bytes of a tensor's data; None where that type cannot have such rows, or nobody would write so much."""
    if kind not in GGML_TYPES or not ne or min(ne) < 1:
        return None
    _, block, size = GGML_TYPES[kind]
    n = 1
    for dim in ne:
        n *= dim
    return n // block * size if ne[0] % block == 0 and n < 1 << 20 else None


def take_apart(path: Path) -> Layout:
    """The layout of a sound file."""
    with ModelFile(path) as file:
        records = []
        for one in file.fields.values():
            at = 8 + len(one.key.encode())
            records.append(Record(one.key.encode(), struct.unpack_from("<I", one.raw, at)[0], bytes(one.raw[at + 4 :])))
        tensors = [
            Tensor(t.name.encode(), list(reversed(t.shape)), t.type, file.data(t.name).tobytes())
            for t in file.tensors.values()
        ]
    return Layout(records, tensors)


def scalar(kind: int, value: float) -> bytes:
    """A number as a value of that type, cut to its size."""
    _, code, size = SCALARS[kind]
    if code in "fd":
        return struct.pack("<" + code, value)
    return (int(value) % 2 ** (8 * size)).to_bytes(size, "little")


__all__ = ["ARRAY", "STRING", "Layout", "Record", "Tensor", "n_bytes", "scalar", "take_apart", "text"]
