"""Bytes of the KV cache, layer by layer: what the model needs, what the head allocates, what llama.cpp allocates."""

from __future__ import annotations

from hybrid.model.spec import LayerSpec, ModelSpec
from hybrid.schedule.placement import KVDtype, Placement

BLOCK_BYTES: dict[KVDtype, tuple[int, int]] = {"f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "q8_0": (32, 34)}
"""Values per block and bytes per block of each cache type."""
CELLS = 256
"""llama.cpp rounds the cells of a cache up to a multiple of this (`llama-context.cpp`, `llama-kv-cache-iswa.cpp`)."""


def row_bytes(n_values: int, dtype: KVDtype) -> int:
    """Bytes of one cached row of `n_values` (a whole number of blocks)."""
    per_block, size = BLOCK_BYTES[dtype]
    return -(-n_values // per_block) * size


def kv_bytes_per_token(layer: LayerSpec, dtype: KVDtype) -> int:
    """K and V of one token in one layer."""
    return row_bytes(layer.n_embd_k, dtype) + row_bytes(layer.n_embd_v, dtype)


def cached_tokens(layer: LayerSpec, placement: Placement) -> int:
    """Tokens per sequence the layer has room for: the context, or the window plus one chunk where it slides."""
    if layer.window and not placement.swa_full:
        return min(placement.n_ctx, layer.window + placement.n_batch)
    return placement.n_ctx


def visible_tokens(layer: LayerSpec, depth: int) -> int:
    """Cached tokens that one new token at `depth` attends to, itself not counted: all, or the window's."""
    return min(depth, layer.window - 1) if layer.window else depth


def layer_kv_bytes(layer: LayerSpec, placement: Placement) -> int:
    """K and V of all sequences in one layer, as the head allocates them."""
    rows = placement.n_sequences * cached_tokens(layer, placement)
    return rows * kv_bytes_per_token(layer, placement.kv_dtype)


def kv_bytes(spec: ModelSpec, placement: Placement, first: int = 0, last: int | None = None) -> int:
    """KV bytes of layers first..last-1 for all sequences:
    2 (K and V) x layers x sequences x cached tokens x kv heads x head dim x bytes per value, layer by layer."""
    return sum(layer_kv_bytes(layer, placement) for layer in spec.layers[first:last])


def llama_cells(layer: LayerSpec, placement: Placement) -> int:
    """Cells of one sequence's cache in llama.cpp (of all sequences' together where it is unified)."""
    unified = placement.kv_unified
    cells = _padded(placement.n_ctx * (placement.n_sequences if unified else 1))
    if not layer.window or placement.swa_full:
        return cells
    windows = layer.window * (placement.n_sequences if unified else 1)
    return min(cells, _padded(windows + min(placement.n_ubatch, placement.n_batch)))


def llama_layer_kv_bytes(layer: LayerSpec, placement: Placement) -> int:
    """K and V of all sequences in one layer, as llama.cpp allocates them."""
    streams = 1 if placement.kv_unified else placement.n_sequences
    return streams * llama_cells(layer, placement) * kv_bytes_per_token(layer, placement.kv_dtype)


def _padded(cells: int) -> int:
    return -(-cells // CELLS) * CELLS
