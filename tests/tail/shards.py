"""Splits a GGUF into shards the way llama.cpp's gguf-split does, metadata in the first one."""

from __future__ import annotations

from pathlib import Path

from hybrid.model.file import ModelFile
from hybrid.tail.virtual_gguf import VirtualGGUF, VirtualTensor, scalar_record

UINT16, INT32 = 2, 5


def write_shards(path: Path, n_shards: int) -> Path:
    """Write `n_shards` files beside `path` and return the first."""
    with ModelFile(path) as file:
        tensors = [
            VirtualTensor(t.name, t.shape, t.type, (file.shards[t.shard].fd, t.offset, t.n_bytes))
            for t in file.tensors.values()
        ]
        step = -(-len(tensors) // n_shards)
        paths = [path.with_name(f"{path.stem}-{i + 1:05d}-of-{n_shards:05d}.gguf") for i in range(n_shards)]
        for i, name in enumerate(paths):
            records: list[bytes | memoryview] = [field.raw for field in file.fields.values()] if i == 0 else []
            records.append(scalar_record("split.no", UINT16, "H", i))
            records.append(scalar_record("split.count", UINT16, "H", n_shards))
            records.append(scalar_record("split.tensors.count", INT32, "i", len(tensors)))
            VirtualGGUF(file.version, file.alignment, records, tensors[i * step : (i + 1) * step]).write(name)
    return paths[0]
