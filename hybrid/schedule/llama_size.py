"""What llama.cpp allocates for the tail, on the host. Checked against what it reports for a load with `no_alloc`.

The graph allocator packs a layer's tensors greedily; the closed forms below are its extent, in float32 values of one
token: E the residual stream, Q the queries, K the keys (or values), F the feed-forward part.
"""

from __future__ import annotations

import platform

from hybrid.model.known import KNOWN
from hybrid.model.records import TensorInfo
from hybrid.model.spec import LayerSpec, ModelSpec
from hybrid.schedule.kv_size import kv_bytes_per_token, llama_cells
from hybrid.schedule.placement import Placement

REPACKED = {2, 12, 20, 39}
"""Q4_0, Q4_K, IQ4_NL, MXFP4: types ggml keeps rearranged in memory of its own on x86 with AVX2
(`ggml-cpu/repack.cpp`), instead of using the mapped file."""
REPACKED_ARM = REPACKED | {8, 13, 14}
"""And Q8_0, Q5_K, Q6_K on ARM with its dot product instructions."""
REPACKED_ROWS = 8
Q1_0_BITS = 9 / 8
"""Bits a weight of the cheapest type, which stands for matrices of zeros (`hybrid/tail/slice.py`)."""
BPE_TOKEN_BYTES, SPM_TOKEN_BYTES = 361, 168
"""Resident bytes of llama.cpp's vocabulary per token, what reading it leaves in the heap included: measured on SmolLM2
(byte-pair merges) and Gemma 3 (SentencePiece)."""
INPUT_BYTES = 24
"""Of one token: id, position, two cache indices."""
GRAPHS, GRAPH_NODE_BYTES, LEAST_NODES, NODES_PER_TENSOR = 3, 423, 1024, 8
"""Graphs it keeps objects for, bytes for each node one may have (a tensor, pointers, a hash table), and how many those
are."""
FLASH_TILE = 64
"""GGML_FA_TILE_Q and GGML_FA_TILE_KV."""


def layer_weight_bytes(layer: LayerSpec) -> int:
    """One layer in the tail: as in the file."""
    return layer.weight_bytes


def empty_layer_bytes(layer: LayerSpec) -> int:
    """A layer the tail keeps only to count right: matrices of zeros, and its vectors."""
    matrices = [t for t in layer.weights.values() if len(t.shape) > 1]
    vectors = sum(t.n_bytes for t in layer.weights.values() if len(t.shape) < 2)
    return vectors + int(sum(t.n_values for t in matrices) * Q1_0_BITS / 8)


def output_head_bytes(spec: ModelSpec, k: int) -> int:
    """Output matrix, final norm and whatever else lies outside the layers, but not an untied token embedding."""
    outside = sum(t.n_bytes for name, t in spec.weights.items() if name != "token_embd.weight")
    if spec.tied_output:
        embedding = spec.weights["token_embd.weight"]
        # ggml keeps two copies of a tied embedding whose type it rearranges for products: rows are read from the other.
        known = KNOWN.get(spec.architecture)
        twice = is_repacked(embedding) or (known is not None and known.loads_tied_embedding_twice)
        outside += embedding.n_bytes * (2 if k > 0 and twice else 1)
    return outside


def embedding_bytes(spec: ModelSpec, k: int) -> int:
    """An untied token embedding: as in the file at k = 0, a stand-in of zeros beyond."""
    if spec.tied_output:
        return 0
    embedding = spec.weights["token_embd.weight"]
    return embedding.n_bytes if k == 0 else int(embedding.n_values * Q1_0_BITS / 8)


def is_repacked(tensor: TensorInfo) -> bool:
    """Whether ggml holds this matrix rearranged, in anonymous memory, on this kind of CPU."""
    arm = platform.machine().lower() in ("arm64", "aarch64")
    kinds = REPACKED_ARM if arm else REPACKED
    return tensor.type in kinds and len(tensor.shape) == 2 and tensor.shape[0] % REPACKED_ROWS == 0


def repacked_bytes(spec: ModelSpec) -> int:
    """Bytes that are copied out of the mapped file at k = 0."""
    inside = [t for layer in spec.layers for t in layer.weights.values()]
    return sum(t.n_bytes for t in [*inside, spec.output_tensor] if is_repacked(t))


def compute_bytes(spec: ModelSpec, placement: Placement) -> int:
    """llama.cpp's compute buffer: the graph of one micro-batch."""
    layers = spec.layers[placement.n_gpu_layers :]
    if not layers:
        return 0
    n = _micro_batch(placement)
    cells = {bool(layer.window): llama_cells(layer, placement) for layer in layers}
    masks = 2 * n * sum(cells.values())  # float16, one for each kind of cache
    logits = 4 * placement.n_outputs * spec.n_vocab
    if len(layers) == 1:  # the last layer's feed-forward part sees only the tokens whose logits are wanted
        graph = 4 * n * (spec.n_embd + _attention(spec, layers[0])) + _cast(layers[0], placement) + logits
    else:
        graph = max(_layer(spec, layer, placement, n) for layer in layers)
    return masks + max(graph + INPUT_BYTES * n, logits)


def output_bytes(spec: ModelSpec, placement: Placement) -> int:
    """The buffer logits are left in: a row for each output."""
    if placement.n_gpu_layers == spec.n_layers:
        return 0
    return 4 * spec.n_vocab * placement.n_outputs


def work_bytes(spec: ModelSpec, placement: Placement) -> int:
    """ggml's scratch memory, which it does not report: activations rounded for quantised products, and the tiles of
    flash attention (`ggml_graph_plan`)."""
    layers = spec.layers[placement.n_gpu_layers :]
    if not layers:
        return 0
    widest = max(max(layer.ffn.n_ff, spec.n_embd, layer.n_heads * layer.head_dim_v) for layer in layers)
    rounded = _micro_batch(placement) * widest * 292 // 256  # Q8_K, the widest of the types it rounds to
    dims = max(layer.head_dim_k + layer.head_dim_v for layer in layers)
    tiles = 4 * (2 * FLASH_TILE * dims + 2 * FLASH_TILE * FLASH_TILE)
    threads = max(placement.n_threads_tail, placement.n_threads_tail_batch)
    return max(rounded, threads * tiles)


def bookkeeping_bytes(spec: ModelSpec, placement: Placement) -> int:
    """What it allocates beside its buffers and does not report: the objects of three graphs (two reserved, one in use;
    `llm_graph_result`, `graph_max_nodes`), the number of every token (`token_ids_full_vocab`), and two copies of a
    batch of hidden states (`llama_batch_allocr::init`, `ubatch_add`)."""
    k = placement.n_gpu_layers
    if k == spec.n_layers:
        return 0
    n_tensors = sum(len(layer.weights) for layer in spec.layers[k:]) + len(spec.weights)
    graphs = GRAPHS * GRAPH_NODE_BYTES * max(LEAST_NODES, NODES_PER_TENSOR * n_tensors)
    batches = 2 * 4 * placement.n_batch * spec.n_embd if k > 0 else 0
    return graphs + 4 * spec.n_vocab + batches


def vocabulary_bytes(spec: ModelSpec) -> int:
    """llama.cpp's vocabulary, resident wherever the layers are. A spec does not know its tokenizer; the family does."""
    return (SPM_TOKEN_BYTES if spec.architecture.startswith("gemma") else BPE_TOKEN_BYTES) * spec.n_vocab


def _micro_batch(placement: Placement) -> int:
    return min(placement.n_ubatch, placement.n_batch, placement.n_ctx * placement.n_sequences)


def _attention(spec: ModelSpec, layer: LayerSpec) -> int:
    """E + 2Q + 2K."""
    return spec.n_embd + 2 * layer.n_heads * layer.head_dim_k + layer.n_embd_k + layer.n_embd_v


def _layer(spec: ModelSpec, layer: LayerSpec, placement: Placement, n: int) -> int:
    """Where F is wide it finds no hole among attention's freed tensors and lies behind them; a narrow one does."""
    e, q, f = spec.n_embd, layer.n_heads * layer.head_dim_k, _ffn_width(layer)
    attention = _attention(spec, layer)
    values = 3 * f + max(4 * e, attention) if f > q else max(3 * f + 4 * e, attention + f)
    return max(4 * n * values, 4 * n * attention + _cast(layer, placement))


def _ffn_width(layer: LayerSpec) -> int:
    ffn = layer.ffn
    return ffn.n_ff * max(1, ffn.n_experts_used) if ffn.n_experts else ffn.n_ff


def _cast(layer: LayerSpec, placement: Placement) -> int:
    """Flash attention wants float16: a float32 cache is converted whole."""
    if placement.kv_dtype != "f32":
        return 0
    streams = 1 if placement.kv_unified else placement.n_sequences
    return streams * llama_cells(layer, placement) * kv_bytes_per_token(layer, "f16")
