"""Where a KV strategy keeps the rows of each layer, and what a token moves over the bus: arithmetic that the caches of
the head, the Ledger and the cost model share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybrid.model.spec import LayerSpec, ModelSpec
from hybrid.schedule.kv_size import cached_tokens, kv_bytes_per_token, layer_kv_bytes, visible_tokens
from hybrid.schedule.placement import Placement

SPILL_TOKENS = 64
"""Tokens that `tiered` moves from the device to the host at a time: few copies, and little room they leave unused."""

CONVERT_BYTES = 16 << 20
"""Float32 bytes of K and V that are converted, or fetched from host memory, at a time (`hybrid.head.attention`)."""
SHORT_TOKENS = 8
"""Tokens of one sequence up to which the CPU attends to what lies in host memory; of more, each row it would read is
used so often that bringing the rows to the device is right."""

RECORDED_TOKENS = 8
"""Tokens of the largest step of decode that is recorded (`hybrid.head.kernels.formats.FEW_TOKENS`)."""
BUCKET_TOKENS = 256
"""Rows by which the copies of `stream` grow where they are recorded, at least."""
BUCKETS_AN_OCTAVE = 8
"""Numbers of rows that recorded copies come in, of each power of two: at most an eighth is copied for nothing."""


@dataclass(frozen=True)
class Tiers:
    """Rows per sequence that one layer has room for, on the device and in host memory."""

    device: int
    host: int

    def split(self, end: int) -> int:
        """Of a sequence that grew to `end` tokens, the first position that lies on the device."""
        if not self.host:
            return 0
        return -(-max(0, end - self.device) // SPILL_TOKENS) * SPILL_TOKENS if self.device else end


def tiers(layers: Sequence[LayerSpec], placement: Placement) -> list[Tiers]:
    """Each layer's tiers.

    `tiered` keeps the same number of recent tokens of every sequence in every layer: a whole number of blocks, as many
    as its budget allows. Windowed layers that stay on the device (`kv_keep_sliding`) do not count against the budget.
    """
    caps = [cached_tokens(layer, placement) for layer in layers]
    stay = [placement.kv == "device" or bool(layer.window and placement.kv_keep_sliding) for layer in layers]
    recent = recent_tokens(layers, placement) if placement.kv == "tiered" else 0
    found = []
    for cap, stays in zip(caps, stay, strict=True):
        device = cap if stays else min(cap, recent)
        slack = SPILL_TOKENS if device else 0  # a block is moved whole, before there is need for all of it
        found.append(Tiers(device, 0 if device == cap else min(cap, cap - device + slack)))
    return found


def recent_tokens(layers: Sequence[LayerSpec], placement: Placement) -> int:
    """Most recent tokens of each sequence that the budget of `tiered` holds on the device: n_ctx where it holds all."""
    moving = [
        (cached_tokens(layer, placement), placement.n_sequences * kv_bytes_per_token(layer, placement.kv_dtype))
        for layer in layers
        if not (layer.window and placement.kv_keep_sliding)
    ]
    return _recent(moving, placement.kv_budget, placement.n_ctx)


def by_what_it_holds(spec: ModelSpec, placement: Placement) -> Placement:
    """The placement with the tokens that the budget of `tiered` holds in the budget's place (None: all of them): two
    that keep the same rows where they are do the same, whatever each might have kept."""
    if placement.kv != "tiered":
        return replace(placement, kv_budget=None)
    held = recent_tokens(spec.layers[: placement.n_gpu_layers], placement)
    return replace(placement, kv_budget=None if held >= placement.n_ctx else held)


def _recent(moving: Sequence[tuple[int, int]], budget: int | None, n_ctx: int) -> int:
    """Most tokens that layers of (room, bytes a token) may keep: all, or a number of blocks that fits the budget."""

    def fits(tokens: int) -> bool:
        return budget is None or sum(min(cap, tokens) * size for cap, size in moving) <= budget

    if fits(n_ctx):
        return n_ctx
    low, high = 0, n_ctx // SPILL_TOKENS + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * SPILL_TOKENS) else (low, middle)
    return low * SPILL_TOKENS


def kv_staging(layers: Sequence[LayerSpec], placement: Placement) -> tuple[int, int]:
    """Bytes of the buffers that K and V of the head's layers pass through, on the device and in host memory.

    stream: two buffers that take turns, each as large as its largest user, and on CUDA, where decode is recorded, the
    new rows of a step on either side. attend, tiered: two blocks of rows on the
    device; in host memory the queries and rows of a short batch, and what the CPU makes of them.
    """
    far = [(layer, tier.host) for layer, tier in zip(layers, tiers(layers, placement), strict=True) if tier.host]
    if not far:
        return 0, 0
    if placement.kv == "stream":
        sizes = [layer_kv_bytes(layer, placement) for layer, _ in far]
        rows = sum(kv_bytes_per_token(layer, placement.kv_dtype) for layer, _ in far)
        mail = RECORDED_TOKENS * rows if placement.device.split(":")[0] == "cuda" else 0
        return sum(max(turn, default=0) for turn in (sizes[0::2], sizes[1::2])) + mail, mail
    blocks = [min(room, block_tokens(layer)) * kv_bytes_per_token(layer, placement.kv_dtype) for layer, room in far]
    queries = max(layer.n_heads * layer.head_dim_k for layer, _ in far)
    results = max(layer.n_heads * (layer.head_dim_v + 1) for layer, _ in far)
    rows = max(kv_bytes_per_token(layer, placement.kv_dtype) for layer, _ in far)
    return 2 * max(blocks), SHORT_TOKENS * placement.n_sequences * (4 * (queries + results) + rows)


def block_tokens(layer: LayerSpec) -> int:
    """Keys that are converted, or fetched from host memory, at a time."""
    return max(1, CONVERT_BYTES // (4 * (layer.n_embd_k + layer.n_embd_v)))


def bucket_tokens(n: int) -> int:
    """Rows of a sequence that a recorded step of `stream` brings to the device where its tokens see n."""
    step = max(BUCKET_TOKENS, (1 << n.bit_length() >> 1) // BUCKETS_AN_OCTAVE)
    return -(-max(1, n) // step) * step


@dataclass(frozen=True)
class Traffic:
    """Bytes over the bus, each way."""

    to_device: int = 0
    to_host: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.to_device + other.to_device, self.to_host + other.to_host)


def step_traffic(spec: ModelSpec, placement: Placement, depth: int, recorded: bool = False) -> Traffic:
    """What one step of decode moves for the head's KV cache: every sequence gets a token after `depth` of them.
    `recorded`: whether the step is, as it is on CUDA."""
    head = spec.layers[: placement.n_gpu_layers]
    found = zip(head, tiers(head, placement), strict=True)
    return sum((layer_traffic(layer, tier, placement, depth, recorded) for layer, tier in found), Traffic())


def layer_traffic(layer: LayerSpec, tier: Tiers, placement: Placement, depth: int, recorded: bool = False) -> Traffic:
    """One layer's share of `step_traffic`.

    stream: what the token sees comes, its own row goes; `recorded`, a whole bucket of the layer's room comes, from the
    start of the context or of the ring on. Otherwise, where it sees rows on the host: its query goes and
    attention's output comes, in float32, with a log-sum-exp a head where the device attends too; and rows that have
    no room on the device (any more) go.
    """
    if not tier.host:
        return Traffic()
    row, sequences = kv_bytes_per_token(layer, placement.kv_dtype), placement.n_sequences
    if placement.kv == "stream":
        seen = visible_tokens(layer, depth)
        if recorded:
            seen = min(bucket_tokens(depth), placement.n_ctx - 1, cached_tokens(layer, placement))
        return Traffic(sequences * seen * row, sequences * row)
    before, after = tier.split(depth), tier.split(depth + 1)
    to_host = (after - before) * row
    to_device = 0
    if after > depth - visible_tokens(layer, depth):
        to_host += 4 * layer.n_heads * layer.head_dim_k
        to_device = 4 * layer.n_heads * (layer.head_dim_v + (1 if tier.device else 0))
    return Traffic(sequences * to_device, sequences * to_host)
