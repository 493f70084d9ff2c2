"""Ledger: bytes a Placement needs, by pure arithmetic over a ModelSpec. No torch, no model load."""

from __future__ import annotations

from hybrid.model.spec import LayerSpec, ModelSpec
from hybrid.schedule.placement import KVDtype, Placement

BLOCK_BYTES: dict[KVDtype, tuple[int, int]] = {"f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "q8_0": (32, 34)}
"""Values per block and bytes per block of each cache type."""


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


def kv_bytes(spec: ModelSpec, placement: Placement, first: int = 0, last: int | None = None) -> int:
    """KV bytes of layers first..last-1 for all sequences:
    2 (K and V) x layers x sequences x cached tokens x kv heads x head dim x bytes per value, layer by layer."""
    return sum(
        placement.n_sequences * cached_tokens(layer, placement) * kv_bytes_per_token(layer, placement.kv_dtype)
        for layer in spec.layers[first:last]
    )


def head_weight_bytes(spec: ModelSpec, placement: Placement) -> int:
    """Device bytes of the head's weights: as stored in the file on a GPU, 4 a value on `cpu`, which expands them.

    At k = L the output head is there too. Token embeddings stay on the host unless they are the output head.
    """
    k = placement.n_gpu_layers
    tensors = [t for layer in spec.layers[:k] for t in layer.weights.values()]
    if k == spec.n_layers:
        tensors += [spec.output_tensor, spec.weights["output_norm.weight"]]
    expanded = placement.device == "cpu"
    return sum(4 * t.n_values if expanded else t.n_bytes for t in tensors)


def tail_weight_bytes(spec: ModelSpec, placement: Placement) -> int:
    """Host bytes of the tail's weights. For k > 0 they are anonymous memory; at k = 0 llama.cpp maps the file,
    which is page cache the kernel may reclaim."""
    k = placement.n_gpu_layers
    if k == spec.n_layers:
        return 0
    layers = sum(layer.weight_bytes for layer in spec.layers[k:])
    outside = sum(t.n_bytes for name, t in spec.weights.items() if k == 0 or name != "token_embd.weight")
    if k > 0 and spec.tied_output:
        outside += spec.weights["token_embd.weight"].n_bytes
    return layers + outside
