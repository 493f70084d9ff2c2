"""What a GGUF's header consists of: metadata records and the tensor table."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the table. `shape` is row-major ([n_out, n_in]): ggml's `ne` reversed."""

    name: str
    shape: tuple[int, ...]
    type: int
    """A `gguf.GGMLQuantizationType` value."""
    n_bytes: int
    shard: int
    """Index into `ModelFile.shards`."""
    offset: int
    """Absolute byte offset of the data in that shard's file."""

    @property
    def n_values(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class RawField:
    """One metadata record as it lies in the file, so a slice can copy it without decoding it."""

    key: str
    type: int
    """`gguf.GGUFValueType` of the value (ARRAY for arrays)."""
    raw: memoryview
    """The whole record: key length, key, value type, value."""
