"""ModelFile: an open GGUF (one file or a shard set): metadata, tensor table, mmap'd bytes. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt


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
        n = 1
        for d in self.shape:
            n *= d
        return n


@dataclass(frozen=True)
class RawField:
    """One metadata record as it lies in the file, so a slice can copy it without decoding it."""

    key: str
    type: int
    """`gguf.GGUFValueType` of the value (ARRAY for arrays)."""
    raw: memoryview
    """The whole record: key length, key, value type, value."""


@dataclass(frozen=True)
class Shard:
    """One file of the set. `fd` stays open as long as the ModelFile."""

    path: Path
    fd: int
    size: int


class ModelFile:
    """An open model. Use as a context manager, or call `close`.

    Raises BadFileError with one clear sentence for anything that is not a sound GGUF v2/v3.
    """

    path: Path
    version: int
    alignment: int
    shards: tuple[Shard, ...]
    tensors: Mapping[str, TensorInfo]
    """In file order, all shards together."""
    fields: Mapping[str, RawField]
    """The first shard's metadata records in file order (undecoded)."""

    def __init__(self, path: str | Path) -> None:
        raise NotImplementedError

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        raise NotImplementedError

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Decoded on access: str, int, float, bool, or a list of those (numeric arrays too)."""
        raise NotImplementedError

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes as a read-only view of the mmap, shape [n_bytes]."""
        raise NotImplementedError

    def close(self) -> None:
        """Unmap and close every shard."""
        raise NotImplementedError

    def __enter__(self) -> ModelFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
