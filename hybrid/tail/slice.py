"""The tail's slice of a model: layers k..L-1 of the original file, renumbered from 0, as a virtual GGUF.

Where `hybrid/model/splits.py` asks for padding, a few layers before k stay as empty ones: every matrix, norm and bias
is zero, so that they add nothing to the hidden state, and layer k has the number and the company it needs.

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
from hybrid.model.splits import find_splits, padding
from hybrid.tail.virtual_gguf import (
    ARRAY,
    FLOAT32,
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
WIDEST = 1 << 24
"""A window wider than any context."""
OUTPUT_SCALE = "layer_output_scale.weight"
"""The one tensor of an empty layer that is not zero: it multiplies the hidden state itself."""
ROPE_FACTORS = "rope_freqs.weight"
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


def input_scale(spec: ModelSpec) -> float:
    """What llama.cpp multiplies hidden states by that the tail is given; they must be divided by it first."""
    architecture = KNOWN.get(spec.architecture)
    return spec.embedding_scale if architecture is not None and architecture.scales_given_embeddings else 1.0


def _records(file: ModelFile, spec: ModelSpec, k: int) -> Iterator[bytes | memoryview]:
    prefix = f"{file.architecture}."
    first = k - padding(spec, k)
    rewritten = {"block_count": spec.n_layers - first, **_window_rules(file, spec, first), **_scale_rules(file, spec)}
    for key, field in file.fields.items():
        name = key.removeprefix(prefix) if key.startswith(prefix) else None
        if key.startswith(SPLIT_KEYS) or name in rewritten:
            continue
        per_layer = name is not None and field.type == ARRAY and name not in NOT_PER_LAYER
        yield _cut(field, spec.n_layers, first) if per_layer else field.raw
    for name, value in rewritten.items():
        if isinstance(value, list):
            yield bool_array_record(prefix + name, value)
        elif isinstance(value, float):
            yield scalar_record(prefix + name, FLOAT32, "f", value)
        else:
            yield scalar_record(prefix + name, UINT32, "I", value)


def _window_rules(file: ModelFile, spec: ModelSpec, first: int) -> dict[str, Any]:
    """llama.cpp counts a pattern of windowed layers from its own layer 0, and aborts on a window that no layer has."""
    windows = KNOWN[spec.architecture].windows
    if windows is None:
        return {}
    windowed = [layer.window > 0 for layer in spec.layers[first:]]
    if any(windowed):
        return {WINDOW + "_pattern": windowed}
    if windows.without == "widen" and any(layer.window for layer in spec.layers):
        rope = spec.layers[first].rope
        base = {"rope.freq_base_swa": rope.freq_base} if rope is not None else {}
        return {WINDOW + "_pattern": [True] * len(windowed), WINDOW: WIDEST, **base}
    return {WINDOW: 0} if f"{file.architecture}.{WINDOW}" in file.fields else {}


def _scale_rules(file: ModelFile, spec: ModelSpec) -> dict[str, float]:
    """llama.cpp would scale hidden states as it does token embeddings."""
    key = "embedding_scale"
    scales = KNOWN[spec.architecture].scales and f"{file.architecture}.{key}" in file.fields
    return {key: 1.0} if scales else {}


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
    first = k - padding(spec, k)
    factors_used = any(layer.rope is not None and layer.rope.factors == ROPE_FACTORS for layer in spec.layers[first:])
    for tensor in file.tensors.values():
        block = re.fullmatch(r"blk\.(\d+)\.(.+)", tensor.name)
        if block and int(block[1]) < first:
            continue
        if tensor.name == ROPE_FACTORS and not factors_used and _windows_drop_factors(spec):
            continue
        if tensor.name == "token_embd.weight" and not spec.tied_output and k > 0:
            yield _zeros(tensor, tensor.name)
            continue
        name = f"blk.{int(block[1]) - first}.{block[2]}" if block else tensor.name
        if block and int(block[1]) < k:
            is_scale = block[2] == OUTPUT_SCALE
            yield VirtualTensor(name, tensor.shape, F32, struct.pack("<f", 1.0)) if is_scale else _zeros(tensor, name)
            continue
        if block and block[2] == "attn_q_norm.weight" and ratio != 1.0:
            yield _scaled(file, tensor, name, ratio)
            continue
        where = (file.shards[tensor.shard].fd, tensor.offset, tensor.n_bytes)
        yield VirtualTensor(name, tensor.shape, tensor.type, where)


def _windows_drop_factors(spec: ModelSpec) -> bool:
    """Whether llama.cpp refuses rotary factors where every layer is windowed, because none would read them."""
    windows = KNOWN[spec.architecture].windows
    return windows is not None and windows.own_heads


def _zeros(tensor: TensorInfo, name: str) -> VirtualTensor:
    """The same tensor, all zero; a matrix in the smallest type its rows allow."""
    kind = tensor.type
    if len(tensor.shape) > 1 and name.endswith(".weight"):
        kind = next(kind for kind in CHEAPEST_ZEROS if tensor.shape[-1] % GGML_TYPES[kind].block == 0)
    return VirtualTensor(name, tensor.shape, kind, tensor_bytes(tensor.shape, kind))


def _scale_ratio(spec: ModelSpec, k: int) -> float:
    """What attn_q_norm must be multiplied by because llama.cpp takes the attention scale from the number of layers."""
    depth = KNOWN[spec.architecture].depth
    if depth is None or not depth.folds:
        return 1.0
    by_width, slice_by_width = spec.n_layers == depth.n_layers, spec.n_layers - k == depth.n_layers
    if by_width == slice_by_width:
        return 1.0
    layer = spec.layers[k]
    ratio = math.sqrt(layer.head_dim_k / (spec.n_embd // layer.n_heads))
    return ratio if by_width else 1.0 / ratio


def _scaled(file: ModelFile, tensor: TensorInfo, name: str, ratio: float) -> VirtualTensor:
    from gguf import GGMLQuantizationType, dequantize

    values = dequantize(file.data(tensor.name), GGMLQuantizationType(tensor.type)).astype(np.float64) * ratio
    return VirtualTensor(name, tensor.shape, F32, values.astype("<f4").tobytes())
