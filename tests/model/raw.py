"""Building GGUF files byte by byte, so that each of their numbers can be wrong."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

UINT32, FLOAT32, STRING, ARRAY = 4, 6, 8, 9


def text(value: str | bytes) -> bytes:
    """A GGUF string."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def record(key: str | bytes, kind: int, value: bytes) -> bytes:
    """A metadata record whose value is given as bytes."""
    return text(key) + struct.pack("<I", kind) + value


@dataclass(frozen=True)
class Row:
    """A row of the tensor table."""

    name: str | bytes = "t"
    ne: Sequence[int] = (32,)
    kind: int = 0
    offset: int = 0
    n_dims: int | None = None

    def encode(self) -> bytes:
        """Its bytes."""
        n_dims = len(self.ne) if self.n_dims is None else self.n_dims
        return (
            text(self.name)
            + struct.pack(f"<I{len(self.ne)}Q", n_dims, *self.ne)
            + struct.pack("<IQ", self.kind, self.offset)
        )


ARCHITECTURE = record("general.architecture", STRING, text("llama"))


def gguf_bytes(
    records: Sequence[bytes] = (ARCHITECTURE,),
    rows: Sequence[Row] = (Row(),),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_records: int | None = None,
    alignment: int = 32,
    data: int = 128,
) -> bytes:
    """A whole file; by default a sound one with one tensor of 32 float32."""
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(rows) if n_tensors is None else n_tensors,
        len(records) if n_records is None else n_records,
    )
    head += b"".join(records) + b"".join(row.encode() for row in rows)
    return head + b"\0" * (-len(head) % alignment) + b"\1" * data
