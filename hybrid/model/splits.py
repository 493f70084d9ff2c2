"""Where a model may be split: the values of k (layers on the GPU) at which the tail provably gives llama.cpp's logits.

The evidence is a sweep over every k of tiny models, llama.cpp against itself (`tests/architectures`). What llama.cpp
derives from a layer's index or from the number of layers is rewritten in the tail's virtual file
(`hybrid/tail/slice.py`); what cannot be is refused here.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.model.known import KNOWN
from hybrid.model.spec import ModelSpec
from hybrid.model.traits import Architecture


@dataclass(frozen=True)
class Refusal:
    """The values first..last of `n_gpu_layers` are refused, and why."""

    first: int
    last: int
    reason: str


@dataclass(frozen=True)
class Splits:
    """What `hybrid inspect` prints about the split points of one model."""

    allowed: tuple[int, ...]
    refused: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()
    """Where a split is not exact to the bit, or costs something."""

    def refusal(self, n_gpu_layers: int) -> str | None:
        """Why this k is refused; None where it is allowed."""
        if n_gpu_layers in self.allowed:
            return None
        reasons = [r.reason for r in self.refused if r.first <= n_gpu_layers <= r.last]
        return reasons[0] if reasons else f"the model has layers 0 to {self.allowed[-1]}"


def find_splits(spec: ModelSpec) -> Splits:
    """The split points of a model, from 0 (llama.cpp alone) to L (all layers and the output head on the GPU)."""
    n = spec.n_layers
    if spec.unsupported is not None:
        return Splits((0,), (Refusal(1, n, spec.unsupported),))
    reasons = {k: reason for k in range(1, n) if (reason := _refused(spec, k)) is not None}
    refused: list[Refusal] = []
    for k, reason in reasons.items():
        if refused and refused[-1].last == k - 1 and refused[-1].reason == reason:
            refused[-1] = Refusal(refused[-1].first, k, reason)
        else:
            refused.append(Refusal(k, k, reason))
    allowed = tuple(k for k in range(n + 1) if k not in reasons)
    return Splits(allowed, tuple(refused), tuple(_notes(spec, allowed)))


def allowed_n_gpu_layers(spec: ModelSpec) -> list[int]:
    """Every k that may be asked for."""
    return list(find_splits(spec).allowed)


def padding(spec: ModelSpec, k: int) -> int:
    """How many of the layers before k the tail keeps, emptied so that they change nothing.

    They put layer k where llama.cpp computes it as in the whole model, or spare it a kind of tail it aborts on. Each
    costs the tail its KV cache, and matrices of zeros. May exceed k: then there is no such tail.
    """
    if k in (0, spec.n_layers):
        return 0
    architecture = KNOWN[spec.architecture]
    n = max(0, architecture.least_tail - (spec.n_layers - k))
    if architecture.no_rope_every:
        n = max(n, k % architecture.no_rope_every)
    if _needs_a_window(architecture, spec):
        last = max((i for i, layer in enumerate(spec.layers) if layer.window), default=k)
        n = max(n, k - last)
    return n


def rule(architecture: Architecture) -> str:
    """Which k its models allow, in words."""
    if architecture.no_slice is not None:
        return f"0 and all: {architecture.no_slice}"
    parts = ["every k"]
    if architecture.no_rope_every:
        n = architecture.no_rope_every
        parts.append(f"with up to {n - 1} empty layers in the tail where k is no multiple of {n}")
    if architecture.windows is not None and architecture.windows.without == "pad":
        parts.append("with an empty layer in the tail where no windowed layer is left to it")
    if architecture.scales_given_embeddings:
        parts.append("to one rounding of the hidden state unless sqrt(n_embd) is a power of two")
    depth = architecture.depth
    if depth is not None:
        how = "every k to rounding" if depth.folds else f"0 and all (llama.cpp takes {depth.what} from that number)"
        parts.append(f"with {depth.n_layers} layers {how}")
    return "; ".join(parts)


def _needs_a_window(architecture: Architecture, spec: ModelSpec) -> bool:
    windows = architecture.windows
    return windows is not None and windows.without == "pad" and any(layer.window for layer in spec.layers)


def _refused(spec: ModelSpec, k: int) -> str | None:
    """Why the model cannot be split at this k between 0 and L."""
    architecture = KNOWN[spec.architecture]
    if architecture.no_slice is not None:
        return architecture.no_slice
    depth = architecture.depth
    if depth is not None and not depth.folds and depth.n_layers in (spec.n_layers, spec.n_layers - k):
        return f"llama.cpp takes {depth.what} from the number of layers, which is {depth.n_layers} only on one side"
    if padding(spec, k) > k:
        return "llama.cpp cannot run the layers from there on alone"
    return None


def _notes(spec: ModelSpec, allowed: tuple[int, ...]) -> list[str]:
    architecture, notes = KNOWN[spec.architecture], []
    depth = architecture.depth
    if depth is not None and depth.folds and spec.n_layers >= depth.n_layers:
        which = "every split" if spec.n_layers == depth.n_layers else f"n_gpu_layers = {spec.n_layers - depth.n_layers}"
        notes.append(f"{which}: the attention scale is folded into attn_q_norm, so logits agree to rounding, not bits")
    if architecture.scales_given_embeddings and not _is_power_of_two(spec.embedding_scale) and len(allowed) > 2:
        notes.append("llama.cpp multiplies the hidden state by sqrt(n_embd), so it agrees to rounding, not to the bit")
    padded = [k for k in allowed if padding(spec, k)]
    if padded:
        most = max(padding(spec, k) for k in padded)
        layers = "an empty layer" if most == 1 else f"up to {most} empty layers"
        where = f"n_gpu_layers = {padded[0]}" if len(padded) == 1 else f"{len(padded)} of the splits"
        notes.append(f"{where}: the CPU half keeps {layers}, which costs KV cache and some time")
    return notes


def _is_power_of_two(value: float) -> bool:
    return value.hex().startswith("0x1.0000000000000p")
