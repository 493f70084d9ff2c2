"""What one layer asks of a machine: operations and bytes, for a token and for a chunk of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybrid.model.records import TensorInfo
from hybrid.model.spec import LayerSpec
from hybrid.schedule import head_size


@dataclass(frozen=True, eq=False)
class LayerWork:
    """One kind of layer. Operations are floating-point ones, two a weight that is used."""

    layer: LayerSpec
    """One of the kind."""
    flop: float
    """Of a token's matrix products (f_i)."""
    flop_without_ffn: float
    """Of llama.cpp's last layer, whose feed-forward part sees only the tokens whose logits are wanted."""
    attention_flop: float
    """Of a token's attention, for each token it sees (a_i)."""
    held_bytes: int
    """Weights as the head's device holds them."""
    file_bytes: int
    """Weights as llama.cpp holds them."""
    active_share: float
    """The share of the weights that one token reads: less than 1 where it picks experts."""

    def chunk(self, n: int, depth: int, ffn: bool = True) -> tuple[float, float]:
        """Operations of n tokens at `depth`: matrix products, and attention (which a window bounds)."""
        seen = depth + (n + 1) / 2
        if self.layer.window:
            seen = min(seen, self.layer.window)
        return n * (self.flop if ffn else self.flop_without_ffn), n * self.attention_flop * seen


def works(layers: Sequence[LayerSpec], device: str) -> tuple[LayerWork, ...]:
    """Each layer's work; layers that are alike share an object."""
    kinds: dict[tuple[object, ...], LayerWork] = {}
    found = []
    for layer in layers:
        shapes = tuple((name, t.shape, t.type) for name, t in layer.weights.items())
        key = (layer.window, layer.n_heads, layer.n_kv_heads, layer.head_dim_k, layer.head_dim_v, shapes)
        if key not in kinds:
            kinds[key] = _work(layer, device)
        found.append(kinds[key])
    return tuple(found)


def _work(layer: LayerSpec, device: str) -> LayerWork:
    share = layer.ffn.n_experts_used / layer.ffn.n_experts if layer.ffn.n_experts else 1.0
    attention = {name: t for name, t in layer.weights.items() if not name.startswith("ffn_")}
    flop = 2 * _used(layer.weights, share, values=True)
    return LayerWork(
        layer=layer,
        flop=flop,
        flop_without_ffn=2 * _used(attention, share, values=True),
        attention_flop=2 * layer.n_heads * (layer.head_dim_k + layer.head_dim_v),
        held_bytes=head_size.layer_weight_bytes(layer, device),
        file_bytes=layer.weight_bytes,
        active_share=_used(layer.weights, share, values=False) / max(1, layer.weight_bytes),
    )


def _used(weights: Mapping[str, TensorInfo], share: float, *, values: bool) -> float:
    """Values (of matrices) or bytes that one token uses; of stacked experts only its share."""
    total = 0.0
    for tensor in weights.values():
        size = tensor.n_values if values else tensor.n_bytes
        if values and len(tensor.shape) < 2:
            continue
        total += size * (share if len(tensor.shape) == 3 else 1.0)
    return total
