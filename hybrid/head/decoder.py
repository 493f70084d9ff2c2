"""The decoder: transformer blocks configured by LayerSpec alone. No class an architecture, no names of models.

A part that some models have and others have not (biases, QK norms, post norms, RoPE) is there exactly if its tensor
or its spec is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from hybrid.errors import UnsupportedError
from hybrid.head.activation import ACTIVATIONS
from hybrid.head.kv.base import KVCache
from hybrid.head.loading import LayerWeights, Loader
from hybrid.head.rope import rotate
from hybrid.model.spec import LayerSpec, RopeSpec

Angles = Mapping[RopeSpec, tuple[Tensor, Tensor]]
"""Cosines and sines [n_tokens, 1, n_dims / 2] of a batch, for every kind of RoPE among the layers."""
Norm = Callable[[Tensor], Tensor]


class RMSNorm:
    """x / rms(x) * w over the last len(w) values, in float32: a whole row, or each head of it."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., n * len(w)] to the same shape."""
        if x.shape[-1] == len(self.weight):
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return self(x.reshape(*x.shape[:-1], -1, len(self.weight))).flatten(-2)


def same(x: Tensor) -> Tensor:
    """The norm that is not there."""
    return x


class Attention:
    """Self-attention of one layer; the cache attends, wherever it keeps its keys."""

    def __init__(self, layer: int, spec: LayerSpec, weights: LayerWeights, norm: Callable[[str], Norm]) -> None:
        self.layer, self.spec = layer, spec
        names = ["attn_qkv"] if "attn_qkv.weight" in weights else ["attn_q", "attn_k", "attn_v"]
        self.qkv = [weights.linear(name) for name in names]
        self.split = [spec.n_heads * spec.head_dim_k, spec.n_embd_k, spec.n_embd_v]
        self.q_norm, self.k_norm = norm("attn_q_norm.weight"), norm("attn_k_norm.weight")
        self.output = weights.linear("attn_output")

    def __call__(self, x: Tensor, angles: Angles, cache: KVCache, positions: Tensor, seqs: Tensor) -> Tensor:
        spec, n = self.spec, x.shape[0]
        rows = [linear(x) for linear in self.qkv]
        q, k, v = rows if len(rows) == 3 else torch.split(rows[0], self.split, dim=-1)
        q = self.q_norm(q).view(n, spec.n_heads, spec.head_dim_k)
        k = self.k_norm(k).view(n, spec.n_kv_heads, spec.head_dim_k)
        v = v.view(n, spec.n_kv_heads, spec.head_dim_v)
        if spec.rope is not None:
            cos, sin = angles[spec.rope]
            q, k = rotate(q, cos, sin, spec.rope), rotate(k, cos, sin, spec.rope)
        out = cache.attend(self.layer, q, k, v, positions, seqs)  # [n, n_heads, head_dim_v]
        return self.output(out.reshape(n, -1))


class FeedForward:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) where the layer has no gate."""

    def __init__(self, spec: LayerSpec, weights: LayerWeights) -> None:
        if spec.ffn.n_experts:
            raise UnsupportedError("Layers with experts cannot run on the GPU half yet; use -ngl 0.")
        self.act = ACTIVATIONS[spec.ffn.activation]
        self.gate = weights.linear("ffn_gate") if spec.ffn.gated else None
        self.up = weights.linear("ffn_up")
        self.down = weights.linear("ffn_down")

    def __call__(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.act(self.up(x)))
        return self.down(self.act(self.gate(x)).mul_(self.up(x)))


class Block:
    """One layer: h + attention(norm(h)), then the same with the feed-forward part. The residual stream is float32."""

    def __init__(self, layer: int, spec: LayerSpec, loader: Loader, eps: float) -> None:
        weights = LayerWeights(loader, spec.weights, f"Layer {spec.index}")

        def norm(name: str) -> Norm:
            weight = weights.vector(name)
            return same if weight is None else RMSNorm(weight, eps)

        self.spec = spec
        self.attn_norm, self.ffn_norm = norm("attn_norm.weight"), norm("ffn_norm.weight")
        self.attention = Attention(layer, spec, weights, norm)
        self.post_attention_norm = norm("post_attention_norm.weight")
        self.feed_forward = FeedForward(spec, weights)
        self.post_ffw_norm = norm("post_ffw_norm.weight")
        weights.check_all_used()

    def __call__(self, h: Tensor, angles: Angles, cache: KVCache, positions: Tensor, seqs: Tensor) -> Tensor:
        """h [n_tokens, n_embd] to the same shape."""
        out = self.post_attention_norm(self.attention(self.attn_norm(h), angles, cache, positions, seqs))
        h = h.add(out, alpha=self.spec.residual_scale)
        out = self.post_ffw_norm(self.feed_forward(self.ffn_norm(h)))
        return h.add(out, alpha=self.spec.residual_scale)


def run(blocks: list[Block], h: Tensor, angles: Angles, cache: KVCache, positions: Tensor, seqs: Tensor) -> Tensor:
    """All blocks in turn; while one attends, the cache may fetch what the next will need."""
    cache.prefetch(0)
    for layer, block in enumerate(blocks):
        if layer + 1 < len(blocks):
            cache.prefetch(layer + 1)
        h = block(h, angles, cache, positions, seqs)
    return h
