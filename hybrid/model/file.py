"""ModelFile: an open GGUF (one file or a shard set): metadata, tensor table, mmap'd bytes. No torch."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hybrid.errors import BadFileError
from hybrid.model.gguf_header import Header, parse_header
from hybrid.model.gguf_values import Metadata, array_length
from hybrid.model.opening import Shard, check_shards, first_shard, open_shard, shard_paths
from hybrid.model.records import RawField, TensorInfo

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["ModelFile", "RawField", "Shard", "TensorInfo"]


class ModelFile:
    """An open model. Use as a context manager, or call `close`.

    Raises BadFileError with one clear sentence for anything that is not a sound GGUF v2/v3.
    """

    path: Path
    """The file, or the first of the shards."""
    version: int
    alignment: int
    shards: tuple[Shard, ...]
    tensors: Mapping[str, TensorInfo]
    """In file order, all shards together."""
    fields: Mapping[str, RawField]
    """The first shard's metadata records in file order (undecoded)."""

    def __init__(self, path: str | Path) -> None:
        self.path = first_shard(Path(path))
        self._shards: list[Shard] = []
        self._maps: list[mmap.mmap] = []
        self._views: list[memoryview] = []
        self._headers: list[Header] = []
        try:
            self._open(self.path)
            self.fields = self._headers[0].fields
            self._metadata = Metadata(self.fields)
            for more in shard_paths(self.path, self._metadata)[1:]:
                self._open(more)
            check_shards([shard.path for shard in self._shards], self._headers)
        except BaseException:
            self.close()
            raise
        self.shards = tuple(self._shards)
        self.version = self._headers[0].version
        self.alignment = self._headers[0].alignment
        self.tensors = {name: tensor for header in self._headers for name, tensor in header.tensors.items()}

    def _open(self, path: Path) -> None:
        shard = open_shard(path)
        self._shards.append(shard)
        try:
            mapped = mmap.mmap(shard.fd, shard.size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise BadFileError(f"{path} cannot be mapped into memory: {error.strerror}.") from error
        self._maps.append(mapped)
        self._views.append(memoryview(mapped))
        self._headers.append(parse_header(self._views[-1], str(path), len(self._shards) - 1))

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        value = self._metadata.get("general.architecture")
        if not isinstance(value, str) or not value:
            raise BadFileError(f"{self.path} does not say its architecture (general.architecture).")
        return value

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Decoded on access: str, int, float, bool, or a list of those (numeric arrays too)."""
        return self._metadata

    def array_length(self, key: str) -> int | None:
        """How many items the array `key` has, without decoding it; None where there is no such array."""
        field = self.fields.get(key)
        return None if field is None else array_length(field)

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes as a read-only view of the mmap, shape [n_bytes]. It stays valid after `close`."""
        import numpy as np

        tensor = self.tensors[name]
        if not self._shards:
            raise ValueError(f"{self.path} is closed")
        return np.frombuffer(self._maps[tensor.shard], np.uint8, tensor.n_bytes, tensor.offset)

    def close(self) -> None:
        """Unmap and close every shard. Memory that an array from `data` still shows is unmapped with that array."""
        shards, self._shards = self._shards, []
        raw = [field.raw for header in self._headers for field in header.fields.values()]
        for buffer in [*raw, *self._views]:
            with contextlib.suppress(BufferError):  # somebody still reads from it
                buffer.release()
        for mapped in self._maps:
            with contextlib.suppress(BufferError):
                mapped.close()
        for shard in shards:
            os.close(shard.fd)

    def __enter__(self) -> ModelFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
