"""A GGUF that exists only as a list of pieces: a fresh header, and tensors that lie in other files or in memory.

llama.cpp loads it through `hybrid._native.VirtualFile`; `write` puts the same bytes on a disk.
Format: ggml's `docs/gguf.md`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybrid.errors import BadFileError
from hybrid.files import replacing
from hybrid.model.ggml_types import GGML_TYPES

UINT32, FLOAT32, BOOL, ARRAY = 4, 6, 7, 9
"""`gguf_type` numbers."""

FileRange = tuple[int, int, int]
"""(fd, offset, length)."""
Segment = bytes | int | FileRange
"""What `VirtualFile` takes; an int is a run of zeros."""

COPY_BYTES = 4 << 20


@dataclass(frozen=True)
class VirtualTensor:
    """One tensor. `shape` is row-major, like `TensorInfo.shape`; `data` is its bytes, where they lie, or their number
    where they are all zero."""

    name: str
    shape: tuple[int, ...]
    type: int
    data: Segment | Callable[[], Iterator[bytes]]
    """A function yields the bytes piece by piece: only for `write`."""

    @property
    def n_bytes(self) -> int:
        """Bytes of the data."""
        return tensor_bytes(self.shape, self.type)


@dataclass(frozen=True)
class VirtualGGUF:
    """`records` are whole metadata records as they lie in a GGUF."""

    version: int
    alignment: int
    records: Sequence[bytes | memoryview]
    tensors: Sequence[VirtualTensor]

    def header(self) -> bytes:
        """Everything before the tensors' data, padded to the alignment."""
        parts = [b"GGUF", struct.pack("<IQQ", self.version, len(self.tensors), len(self.records)), *self.records]
        offset = 0
        for t in self.tensors:
            ne = tuple(reversed(t.shape))
            parts.append(string(t.name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, t.type, offset))
            offset += self._padded(t.n_bytes)
        out = b"".join(parts)
        return out.ljust(self._padded(len(out)), b"\0")

    def segments(self) -> list[Segment]:
        """The whole file, piece by piece. Raises TypeError for a tensor whose data is only generated."""
        pieces: list[Segment] = [self.header()]
        for t in self.tensors:
            if callable(t.data):
                raise TypeError(f"the data of {t.name} can only be written, not mapped")
            pieces.append(t.data)
            pieces.append(self._padded(t.n_bytes) - t.n_bytes)
        return [piece for piece in pieces if piece != 0]

    @property
    def stored_bytes(self) -> int:
        """Bytes of the tensors that are not all zero: what llama.cpp keeps in RAM once it has loaded this."""
        return sum(t.n_bytes for t in self.tensors if not isinstance(t.data, int))

    def write(self, path: str | Path, progress: Callable[[float], None] | None = None) -> Path:
        """Write the file. It appears under its name only when it is whole. Raises OSError, BadFileError."""
        path = Path(path)
        total = sum(t.n_bytes for t in self.tensors) or 1
        done = 0
        with replacing(path, "wb") as out:
            out.write(self.header())
            for t in self.tensors:
                start = out.tell()
                for piece in _pieces(t.data):
                    out.write(piece)
                    if progress is not None:
                        progress((done + out.tell() - start) / total)
                if out.tell() - start != t.n_bytes:
                    raise BadFileError(f"The data of tensor {t.name} is not {t.n_bytes} bytes long.")
                done += t.n_bytes
                out.write(bytes(self._padded(t.n_bytes) - t.n_bytes))
        return path

    def _padded(self, n: int) -> int:
        return -(-n // self.alignment) * self.alignment


def tensor_bytes(shape: tuple[int, ...], kind: int) -> int:
    """Bytes of a tensor of ggml type `kind`."""
    _, block, block_bytes = GGML_TYPES[kind]
    n = 1
    for dim in shape:
        n *= dim
    return n // block * block_bytes


def string(text: str) -> bytes:
    """A GGUF string."""
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def scalar_record(key: str, kind: int, code: str, value: float) -> bytes:
    """A metadata record with one number; `code` is its `struct` code."""
    return string(key) + struct.pack("<I" + code, kind, value)


def bool_array_record(key: str, values: Sequence[bool]) -> bytes:
    """A metadata record with an array of booleans."""
    return string(key) + struct.pack(f"<IIQ{len(values)}?", ARRAY, BOOL, len(values), *values)


def _pieces(data: Segment | Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
    if callable(data):
        yield from data()
    elif isinstance(data, bytes):
        yield data
    elif isinstance(data, int):
        for start in range(0, data, COPY_BYTES):
            yield bytes(min(COPY_BYTES, data - start))
    else:
        fd, offset, left = data
        while left:
            piece = os.pread(fd, min(COPY_BYTES, left), offset)
            if not piece:
                raise BadFileError("The model file ended early: it was truncated while it was being read.")
            yield piece
            offset, left = offset + len(piece), left - len(piece)
