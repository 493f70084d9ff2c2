"""The decoder: transformer blocks configured by LayerSpec alone. No class an architecture, no names of models.

A part that some models have and others have not (biases, QK norms, post norms, sinks, RoPE) is there exactly if its
tensor or its spec is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from hybrid.head.feed_forward import feed_forward
from hybrid.head.kv.base import KVCache
from hybrid.head.loading import LayerWeights, Loader
from hybrid.head.norm import Norm, make_norm
from hybrid.head.rope import Rotation
from hybrid.model.spec import LayerSpec, RopeSpec

Rotations = Mapping[RopeSpec, Rotation]
"""For every kind of RoPE among the layers, that of the batch."""


class Attention:
    """Self-attention of one layer; the cache attends, wherever it keeps its keys."""

    def __init__(self, layer: int, spec: LayerSpec, weights: LayerWeights, norm: Callable[[str], Norm], eps: float):
        self.layer, self.spec, self.eps = layer, spec, eps
        fused = "attn_qkv.weight" in weights
        names = ["attn_qkv"] if fused else ["attn_q", "attn_k", "attn_v"]
        if not fused and "attn_v.weight" not in weights:
            names.pop()  # values are the keys, before norm and rotation
        self.qkv = [weights.linear(name) for name in names]
        self.split = [spec.n_heads * spec.head_dim_k, spec.n_embd_k, spec.n_embd_v]
        self.q_norm, self.k_norm = norm("attn_q_norm"), norm("attn_k_norm")
        self.sinks = weights.vector("attn_sinks.weight")
        self.output = weights.linear("attn_output")

    def __call__(self, x: Tensor, rotations: Rotations, cache: KVCache, positions: Tensor, seqs: Tensor) -> Tensor:
        spec, n = self.spec, x.shape[0]
        rows = [linear(x) for linear in self.qkv]
        if len(rows) == 1:
            rows = list(torch.split(rows[0], self.split, dim=-1))
        q, k, v = rows[0], rows[1], rows[-1]
        q = self.q_norm(q).view(n, spec.n_heads, spec.head_dim_k)
        k = self.k_norm(k).view(n, spec.n_kv_heads, spec.head_dim_k)
        v = v.view(n, spec.n_kv_heads, spec.head_dim_v)
        if spec.normalised_values:
            v = F.rms_norm(v, v.shape[-1:], None, self.eps)
        rotation = None if spec.rope is None else rotations[spec.rope]
        out = cache.attend(self.layer, q, k, v, positions, seqs, self.sinks, rotation)  # [n, n_heads, head_dim_v]
        return self.output(out.reshape(n, -1))


class Block:
    """One layer: h + attention(norm(h)), then the same with the feed-forward part. The residual stream is float32."""

    def __init__(self, layer: int, spec: LayerSpec, loader: Loader, eps: float) -> None:
        weights = LayerWeights(loader, spec.weights, f"Layer {spec.index}")

        def norm(name: str) -> Norm:
            return make_norm(spec.norm, weights.vector(name + ".weight"), weights.vector(name + ".bias"), eps)

        self.spec = spec
        self.attn_norm, self.ffn_norm = norm("attn_norm"), norm("ffn_norm")
        self.attention = Attention(layer, spec, weights, norm, eps)
        self.post_attention_norm = norm("post_attention_norm")
        self.feed_forward = feed_forward(spec.ffn, weights, norm, eps)
        self.post_ffw_norm = norm("post_ffw_norm")
        self.output_scale = weights.vector("layer_output_scale.weight")
        weights.check_all_used()

    def __call__(self, h: Tensor, rotations: Rotations, cache: KVCache, positions: Tensor, seqs: Tensor) -> Tensor:
        """h [n_tokens, n_embd] to the same shape."""
        scale = self.spec.residual_scale
        if self.spec.parallel:
            x = self.attn_norm(h)
            h = h.add(self.feed_forward(x, h), alpha=scale)
            return h.add_(self.attention(x, rotations, cache, positions, seqs), alpha=scale)
        out = self.post_attention_norm(self.attention(self.attn_norm(h), rotations, cache, positions, seqs))
        h = h.add(out, alpha=scale)
        out = self.post_ffw_norm(self.feed_forward(self.ffn_norm(h), h))
        h = h.add(out, alpha=scale)
        return h if self.output_scale is None else h.mul_(self.output_scale)


def run(
    blocks: list[Block], h: Tensor, rotations: Rotations, cache: KVCache, positions: Tensor, seqs: Tensor
) -> Tensor:
    """All blocks in turn; while one attends, the cache may fetch what the next will need."""
    cache.prefetch(0, positions, seqs)
    for layer, block in enumerate(blocks):
        if layer + 1 < len(blocks):
            cache.prefetch(layer + 1, positions, seqs)
        h = block(h, rotations, cache, positions, seqs)
    return h
