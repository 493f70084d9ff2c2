"""Where a model may be split: the values of k (layers on the GPU) at which the tail provably gives llama.cpp's logits.

The evidence is a sweep over every k of tiny models of some hundred architectures, llama.cpp against itself. What an
architecture derives from a layer's index or from the number of layers is rewritten in the tail's virtual file
(`hybrid/tail/slice.py`); what cannot be is refused here.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.model.known import KNOWN
from hybrid.model.spec import ModelSpec

PROVEN = {"llama", "gemma3"}
"""Architectures whose tail equals llama.cpp bit for bit at every k, given the rewriting of `slice.py`."""


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
    reason = spec.unsupported
    if reason is None and spec.architecture not in PROVEN:
        reason = f"splitting architecture {spec.architecture!r} has not been proven to leave the result unchanged"
    if reason is not None:
        return Splits((0,), (Refusal(1, n, reason),))
    return Splits(tuple(range(n + 1)), notes=tuple(_notes(spec)))


def allowed_n_gpu_layers(spec: ModelSpec) -> list[int]:
    """Every k that may be asked for."""
    return list(find_splits(spec).allowed)


def _notes(spec: ModelSpec) -> list[str]:
    special = KNOWN[spec.architecture].n_layers_scaled_by_width
    if special is None or spec.n_layers < special:
        return []
    which = "every split" if spec.n_layers == special else f"n_gpu_layers = {spec.n_layers - special}"
    return [f"{which}: the attention scale is folded into attn_q_norm, so logits agree to rounding, not to the bit"]
