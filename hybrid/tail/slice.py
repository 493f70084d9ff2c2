"""The tail's slice of a model: layers k..L-1 of the original file, renumbered from 0, as a virtual GGUF.

Whatever llama.cpp derives from a layer's index, from the number of layers or from the mix of layer kinds is written out
here, so that the slice computes what those layers compute in the whole model, bit for bit (Gemma 3 with 62 layers: to
rounding). Which k are sound is `hybrid/model/splits.py`'s business.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from hybrid.errors import UnsupportedError
from hybrid.model.file import ModelFile, RawField, TensorInfo
from hybrid.model.ggml_types import GGML_TYPES
from hybrid.model.gguf_values import SCALARS
from hybrid.model.known import KNOWN
from hybrid.model.spec import ModelSpec
from hybrid.model.splits import find_splits
from hybrid.tail.virtual_gguf import (
    ARRAY,
    UINT32,
    VirtualGGUF,
    VirtualTensor,
    bool_array_record,
    scalar_record,
    tensor_bytes,
)

NOT_PER_LAYER = {"rope.dimension_sections"}
"""Arrays of an architecture that may have as many items as there are layers, but do not belong to layers."""
SPLIT_KEYS = "split."
"""What describes a set of shards; the slice is one file."""
WINDOW = "attention.sliding_window"
CHEAPEST_ZEROS = (41, 2, 1)
"""Q1_0, Q4_0, F16: types llama.cpp accepts for an embedding nobody reads, fewest bits first."""
F32 = 0


def tail_slice(file: ModelFile, spec: ModelSpec, k: int) -> VirtualGGUF:
    """The virtual file with layers k.. of `file`.

    Nothing is copied but the header: tensors are ranges of the open file, which must stay open until it is loaded.
    Raises UnsupportedError where that k is not allowed, or leaves no layer.
    """
    refusal = find_splits(spec).refusal(k)
    if refusal is None and k == spec.n_layers:
        refusal = "it leaves no layer for llama.cpp"
    if refusal is not None:
        raise UnsupportedError(f"{file.path.name} cannot be split at n_gpu_layers = {k}: {refusal}.")
    return VirtualGGUF(
        version=file.version,
        alignment=file.alignment,
        records=list(_records(file, spec, k)),
        tensors=list(_tensors(file, spec, k)),
    )


def _records(file: ModelFile, spec: ModelSpec, k: int) -> Iterator[bytes | memoryview]:
    prefix = f"{file.architecture}."
    rewritten = {"block_count": spec.n_layers - k, **_window_rules(file, spec, k)}
    for key, field in file.fields.items():
        name = key.removeprefix(prefix) if key.startswith(prefix) else None
        if key.startswith(SPLIT_KEYS) or name in rewritten:
            continue
        per_layer = name is not None and field.type == ARRAY and name not in NOT_PER_LAYER
        yield _cut(field, spec.n_layers, k) if per_layer else field.raw
    for name, value in rewritten.items():
        is_list = isinstance(value, list)
        yield bool_array_record(prefix + name, value) if is_list else scalar_record(prefix + name, UINT32, "I", value)


def _window_rules(file: ModelFile, spec: ModelSpec, k: int) -> dict[str, Any]:
    """llama.cpp counts a pattern of windowed layers from its own layer 0, and aborts on a window that no layer has."""
    architecture = KNOWN.get(spec.architecture)
    if architecture is None or architecture.window_pattern is None:
        return {}
    windowed = [layer.window > 0 for layer in spec.layers[k:]]
    if any(windowed):
        return {WINDOW + "_pattern": windowed}
    return {WINDOW: 0} if f"{file.architecture}.{WINDOW}" in file.fields else {}


def _cut(field: RawField, n_layers: int, k: int) -> bytes | memoryview:
    """An array of one number a layer without its first k items; any other array as it is."""
    at = 8 + len(field.key.encode()) + 4
    item, n = struct.unpack_from("<IQ", field.raw, at)
    if n != n_layers or item not in SCALARS:
        return field.raw
    start = at + 12
    head = bytes(field.raw[:at]) + struct.pack("<IQ", item, n - k)
    return head + bytes(field.raw[start + k * SCALARS[item].n_bytes :])


def _tensors(file: ModelFile, spec: ModelSpec, k: int) -> Iterator[VirtualTensor]:
    ratio = _scale_ratio(spec, k)
    for tensor in file.tensors.values():
        block = re.fullmatch(r"blk\.(\d+)\.(.+)", tensor.name)
        if block and int(block[1]) < k:
            continue
        if tensor.name == "token_embd.weight" and not spec.tied_output and k > 0:
            yield _zeros(tensor)
            continue
        name = f"blk.{int(block[1]) - k}.{block[2]}" if block else tensor.name
        if block and block[2] == "attn_q_norm.weight" and ratio != 1.0:
            yield _scaled(file, tensor, name, ratio)
            continue
        where = (file.shards[tensor.shard].fd, tensor.offset, tensor.n_bytes)
        yield VirtualTensor(name, tensor.shape, tensor.type, where)


def _zeros(tensor: TensorInfo) -> VirtualTensor:
    """The same tensor, all zero, in the smallest type its rows allow."""
    kind = next(kind for kind in CHEAPEST_ZEROS if tensor.shape[-1] % GGML_TYPES[kind].block == 0)
    return VirtualTensor(tensor.name, tensor.shape, kind, tensor_bytes(tensor.shape, kind))


def _scale_ratio(spec: ModelSpec, k: int) -> float:
    """What attn_q_norm must be multiplied by because llama.cpp takes the attention scale from the number of layers."""
    special = KNOWN[spec.architecture].n_layers_scaled_by_width
    by_width, slice_by_width = spec.n_layers == special, spec.n_layers - k == special
    if by_width == slice_by_width:
        return 1.0
    layer = spec.layers[k]
    ratio = math.sqrt(layer.head_dim_k / (spec.n_embd // layer.n_heads))
    return ratio if by_width else 1.0 / ratio


def _scaled(file: ModelFile, tensor: TensorInfo, name: str, ratio: float) -> VirtualTensor:
    from gguf import GGMLQuantizationType, dequantize

    values = dequantize(file.data(tensor.name), GGMLQuantizationType(tensor.type)).astype(np.float64) * ratio
    return VirtualTensor(name, tensor.shape, F32, values.astype("<f4").tobytes())
