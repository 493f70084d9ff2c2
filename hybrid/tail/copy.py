"""The F32 copy of a model: every weight dequantised, run by llama.cpp itself. It is the accuracy oracle, because
llama.cpp's CPU matmuls round activations to 8 bits only where weights are quantised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from hybrid.errors import UnsupportedError
from hybrid.model.file import ModelFile, TensorInfo
from hybrid.model.ggml_types import GGML_TYPES
from hybrid.tail.slice import F32, SPLIT_KEYS
from hybrid.tail.virtual_gguf import UINT32, VirtualGGUF, VirtualTensor, scalar_record

INTEGERS = {24, 25, 26, 27}
"""I8 to I64: not weights."""
ROWS_BYTES = 16 << 20
"""Float32 bytes that are dequantised at a time."""


def write_f32_copy(file: ModelFile, path: str | Path, progress: Callable[[float], None] | None = None) -> Path:
    """Write `file` with all weights as F32 to `path` and return it.

    Metadata is copied undecoded, so that a 262,144-token vocabulary costs nothing. The result is one file, whatever the
    original was. Raises OSError, and UnsupportedError for a tensor type `gguf` cannot dequantise.
    """
    records: list[bytes | memoryview] = []
    for key, field in file.fields.items():
        if key == "general.file_type":
            records.append(scalar_record(key, UINT32, "I", 0))  # LLAMA_FTYPE_ALL_F32
        elif not key.startswith(SPLIT_KEYS):
            records.append(field.raw)
    tensors = [_as_f32(file, tensor) for tensor in file.tensors.values()]
    return VirtualGGUF(file.version, file.alignment, records, tensors).write(path, progress)


def _as_f32(file: ModelFile, tensor: TensorInfo) -> VirtualTensor:
    if tensor.type == F32 or tensor.type in INTEGERS:
        where = (file.shards[tensor.shard].fd, tensor.offset, tensor.n_bytes)
        return VirtualTensor(tensor.name, tensor.shape, tensor.type, where)
    return VirtualTensor(tensor.name, tensor.shape, F32, lambda: _dequantised(file, tensor))


def _dequantised(file: ModelFile, tensor: TensorInfo) -> Iterator[bytes]:
    from gguf import GGMLQuantizationType, dequantize

    n_in = tensor.shape[-1]
    rows = file.data(tensor.name).reshape(tensor.n_values // n_in, -1)
    step = max(1, ROWS_BYTES // (4 * n_in))
    for start in range(0, len(rows), step):
        try:
            values = dequantize(rows[start : start + step], GGMLQuantizationType(tensor.type))
        except NotImplementedError:
            name = GGML_TYPES[tensor.type].name
            raise UnsupportedError(f"Tensor {tensor.name} is {name}, which cannot be dequantised to F32.") from None
        yield values.astype("<f4").tobytes()
