"""What the head allocates in torch, by the arithmetic of `hybrid/head`: weights as held, a batch's temporaries, and
the workspace of dequantised tiles. Without torch, so the constants below repeat the head's; a test compares them.

Sizes are in values of one token: E the residual stream, Q the queries, K and V the keys and values, F the
feed-forward part.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.model.records import TensorInfo
from hybrid.model.spec import LayerSpec, ModelSpec
from hybrid.schedule.kv_size import cached_tokens, kv_bytes_per_token
from hybrid.schedule.kv_tiers import CONVERT_BYTES, RECORDED_TOKENS, SHORT_TOKENS, Tiers, tiers
from hybrid.schedule.placement import Placement

QUANTISED = frozenset({0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23, 30, 39})
"""GGUF types the head can hold as they are (`hybrid.head.dequant.SUPPORTED`); others are expanded at load."""
TILE_TEMPORARY_BYTES = 10.6
"""Of one weight on its way from blocks to numbers: the most of all types (`hybrid.head.dequant`)."""


@dataclass(frozen=True)
class HeadPolicy:
    """How the head computes on a kind of device (`hybrid.head.device.Compute`)."""

    expand: bool
    value_bytes: int
    """Of a weight that is expanded, and of a matmul's inputs."""
    tile_values: int
    rows: int
    """Query tokens that attend at a time."""
    temporaries: bool = True
    """Whether making a tile takes memory beside it."""


CPU = HeadPolicy(expand=True, value_bytes=4, tile_values=1 << 18, rows=128)
ACCELERATOR = HeadPolicy(expand=False, value_bytes=2, tile_values=1 << 23, rows=256)
CUDA = HeadPolicy(expand=False, value_bytes=2, tile_values=1 << 25, rows=256, temporaries=False)


def policy(device: str) -> HeadPolicy:
    """The policy for a torch device string."""
    return {"cpu": CPU, "cuda": CUDA}.get(device.split(":")[0], ACCELERATOR)


def tensor_bytes(tensor: TensorInfo, device: str) -> int:
    """One tensor as the device holds it: vectors in float32, matrices quantised or expanded."""
    how = policy(device)
    if len(tensor.shape) < 2:
        return 4 * tensor.n_values
    quantised = not how.expand and tensor.type in QUANTISED
    return tensor.n_bytes if quantised else how.value_bytes * tensor.n_values


def layer_weight_bytes(layer: LayerSpec, device: str) -> int:
    """Device bytes of one layer's weights."""
    return sum(tensor_bytes(t, device) for t in layer.weights.values())


def output_head_bytes(spec: ModelSpec, device: str) -> int:
    """Device bytes of the output matrix and the final norm, which are there at k = L only."""
    outside = [spec.output_tensor, *(t for name, t in spec.weights.items() if name in OUTPUT)]
    return sum(tensor_bytes(t, device) for t in outside)


OUTPUT = ("output_norm.weight", "output.bias")


def activation_bytes(spec: ModelSpec, placement: Placement) -> int:
    """The most bytes a batch's tensors take at once: n_batch tokens through the layer that needs most, or the logits
    of as many as are wanted at k = L."""
    k = placement.n_gpu_layers
    if k == 0:
        return 0
    n = min(placement.n_batch, placement.n_ctx)
    head = spec.layers[:k]
    most = max(
        max(_feed_forward(spec, layer, n, placement), _attention(spec, layer, tier, n, placement))
        for layer, tier in zip(head, tiers(head, placement), strict=True)
    )
    logits = 4 * placement.n_outputs * (spec.n_vocab + spec.n_embd) if k == spec.n_layers else 0
    return max(most, logits)


KEPT_CHUNKS, MOST_KEPT = 2, 2
"""Chunks of a context up to which malloc keeps no more than the temporaries themselves, and how many times as much it
keeps of more: 1.0 measured of two chunks, 1.1 to 3.2 of four, by runs of one placement whose threads met otherwise."""


def kept_bytes(spec: ModelSpec, placement: Placement) -> int:
    """What stays resident of an emulated device beyond the temporaries alive at once. A chunk further on attends to
    more keys, so its temporaries do not fit the holes that those of the chunk before left, and malloc takes new memory
    for them; freed, both stay in the heap of the head's thread. So do two hidden states that wait for the tail."""
    chunks = -(-placement.n_ctx // placement.n_batch)
    times = min(MOST_KEPT, max(1.0, chunks / KEPT_CHUNKS))
    waiting = 8 * placement.n_batch * spec.n_embd if 0 < placement.n_gpu_layers < spec.n_layers else 0
    return int((times - 1) * activation_bytes(spec, placement)) + waiting


def workspace_bytes(spec: ModelSpec, placement: Placement) -> int:
    """One tile of dequantised weights and what making it takes; nothing where weights are held expanded."""
    how, k = policy(placement.device), placement.n_gpu_layers
    if how.expand or k == 0:
        return 0
    matrices = [t for layer in spec.layers[:k] for t in layer.weights.values()]
    if k == spec.n_layers:
        matrices.append(spec.output_tensor)
    tiled = [t.n_values for t in matrices if len(t.shape) > 1 and t.type in QUANTISED and t.type != BF16]
    values = min(how.tile_values, max(tiled, default=0))
    return int(values * (how.value_bytes + (TILE_TEMPORARY_BYTES if how.temporaries else 0)))


GRAPH_BYTES = 256 << 10
"""VRAM of a layer's recorded graph, its temporaries included: assumed, no GPU has been asked. A layer is some twenty
kernels, and what CUDA keeps for each is not documented."""
GRAPH_SHAPES = 4
"""Shapes of steps that are recorded, at most (`hybrid.head.graphs`)."""


def graph_bytes(spec: ModelSpec, placement: Placement) -> int:
    """Graphs of decode, which only CUDA devices have, and of the output head, which keep what goes in and comes out."""
    if placement.device.split(":")[0] != "cuda":
        return 0
    layers = GRAPH_SHAPES * GRAPH_BYTES * placement.n_gpu_layers
    if placement.n_gpu_layers < spec.n_layers:
        return layers
    n = min(placement.n_outputs, RECORDED_TOKENS)
    shapes = range(n, max(0, n - GRAPH_SHAPES), -1)
    return layers + sum(GRAPH_BYTES + 4 * m * (spec.n_vocab + 2 * spec.n_embd) for m in shapes)


BF16 = 30
"""Already what an accelerator multiplies."""


def _feed_forward(spec: ModelSpec, layer: LayerSpec, n: int, placement: Placement) -> int:
    """Embedding, residual before and after attention, attention's output and the norm's (5 E) beside two F.

    On the CPU gelu is looked up in a table: an index, the value, and a mask beside its argument.
    """
    on_cpu = policy(placement.device).expand
    widths = 4.25 if on_cpu and layer.ffn.activation == "gelu" else 2.0
    n_ff = layer.ffn.n_ff * max(1, layer.ffn.n_experts_used)
    return int(4 * n * (5 * spec.n_embd + widths * n_ff))


def _attention(spec: ModelSpec, layer: LayerSpec, tier: Tiers, n: int, placement: Placement) -> int:
    """Embedding, residual and norm (3 E), q, k and v before and q and k after rotation, and attention itself."""
    far = tier.host > 0 and placement.kv != "stream"  # some keys lie in host memory, for the CPU or to come in blocks
    q, kv = layer.n_heads * layer.head_dim_k, layer.n_embd_k + layer.n_embd_v
    out = layer.n_heads * layer.head_dim_v
    before = 4 * n * (3 * spec.n_embd + 2 * q + kv + layer.n_embd_k)
    keys = min(cached_tokens(layer, placement), layer.window + n if layer.window else placement.n_ctx)
    rows = min(policy(placement.device).rows, n)
    # Query heads that share a KV head are rows of one: the mask has as many; a boolean and one in the products' type.
    masked = layer.n_heads // layer.n_kv_heads * rows if n > 1 else 0
    on_cpu, packed = policy(placement.device).expand, placement.kv_dtype == "q8_0"
    if not on_cpu and not far and not packed:
        return before + n * (2 * q + 8 * out) + 4 * masked * keys
    stored = 0 if placement.kv_dtype == "f32" else kv_bytes_per_token(layer, placement.kv_dtype)
    attended = before + 8 * n * out + (n * stored if far else 0)
    if placement.kv_dtype == "f32" and not layer.attn_softcap and not far:
        return attended + (5 * masked + rows) * keys
    # On the way to a full context both ways are taken: keys converted whole, then a running softmax over blocks.
    block = min(keys, CONVERT_BYTES // (4 * kv))
    # In float32 on the CPU; an accelerator multiplies what is stored, or float16 instead of packed numbers.
    converted = (4 if on_cpu else 2) * kv if packed or (on_cpu and stored) else 0
    unpacking = 5 * layer.n_embd_v if packed else 0  # V's bytes and numbers without their scale
    whole = 0
    if not far:
        whole = attended + converted * block + max((5 * masked + rows) * block, unpacking * block)
        if block == keys and not layer.attn_softcap:
            return whole
    elif n <= SHORT_TOKENS:
        keys = min(keys, tier.device)
        block = min(block, keys)
    following = (converted + unpacking) * min(block, keys - block)  # the next is read before the last is dropped
    if far and n > SHORT_TOKENS:  # blocks of the host's rows, then of the device's, whose ring may be joined to be read
        whole_block, near = block, min(block, tier.device)
        block = max(near, min(block, tier.host))
        following = (converted + unpacking) * max(min(block, tier.host - block), min(whole_block, n))
        following = max(following, (2 * converted + unpacking if converted else stored) * near)
    scores = rows * block * (4 * layer.n_heads + 2) + 4 * rows * (q + out)
    beside = max(scores, following, unpacking * block)
    return max(whole, attended + 16 * n * layer.n_heads + converted * block + beside)
