"""The decoder: transformer blocks configured by LayerSpec alone. No class an architecture, no names of models.

A part that some models have and others have not (biases, QK norms, post norms, sinks, RoPE) is there exactly if its
tensor or its spec is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from hybrid.errors import Cancelled
from hybrid.head.feed_forward import feed_forward
from hybrid.head.kv.base import QKV, KVCache
from hybrid.head.loading import LayerWeights, Loader
from hybrid.head.norm import Norm, add_and_norm, make_norm, same
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
        self.qkv = weights.joined(names)
        self.split = [spec.n_heads * spec.head_dim_k, spec.n_embd_k, spec.n_embd_v]
        self.q_norm, self.k_norm = norm("attn_q_norm"), norm("attn_k_norm")
        self.sinks = weights.vector("attn_sinks.weight")
        self.output = weights.linear("attn_output")

    def project(self, x: Tensor, rotations: Rotations) -> QKV:
        """x [n_tokens, n_embd], normalised, to queries, keys and values [n_tokens, heads, head_dim], unrotated."""
        spec, n = self.spec, x.shape[0]
        rows = [row for joined in self.qkv for row in joined(x)]
        if len(rows) == 1:
            rows = list(torch.split(rows[0], self.split, dim=-1))
        q, k, v = rows[0], rows[1], rows[-1]
        q = self.q_norm(q).view(n, spec.n_heads, spec.head_dim_k)
        k = self.k_norm(k).view(n, spec.n_kv_heads, spec.head_dim_k)
        v = v.view(n, spec.n_kv_heads, spec.head_dim_v)
        if spec.normalised_values:
            v = F.rms_norm(v, v.shape[-1:], None, self.eps)
        return QKV(q, k, v, self.sinks, None if spec.rope is None else rotations[spec.rope])


@dataclass
class Stream:
    """The residual stream between two parts of a layer."""

    h: Tensor
    """[n_tokens, n_embd] float32."""
    x: Tensor
    """The norm of it, which the next part reads."""


class Block:
    """One layer: h + attention(norm(h)), then the same with the feed-forward part. The residual stream is float32."""

    def __init__(self, layer: int, spec: LayerSpec, loader: Loader, eps: float) -> None:
        weights = LayerWeights(loader, spec.weights, f"Layer {spec.index}")

        def norm(name: str) -> Norm:
            found = weights.vector(name + ".weight"), weights.vector(name + ".bias")
            return make_norm(spec.norm, *found, eps, loader.compute.kernels)

        self.spec = spec
        self.attn_norm, self.ffn_norm = norm("attn_norm"), norm("ffn_norm")
        self.attention = Attention(layer, spec, weights, norm, eps)
        self.post_attention_norm = norm("post_attention_norm")
        self.feed_forward = feed_forward(spec.ffn, weights, norm, eps)
        self.post_ffw_norm = norm("post_ffw_norm")
        self.output_scale = weights.vector("layer_output_scale.weight")
        weights.check_all_used()

    def finish(self, stream: Stream, out: Tensor, following: Norm) -> None:
        """What comes behind attention, whose output is `out` [n_tokens, n_embd]: `stream` becomes that behind the
        layer, normalised by `following`."""
        scale = self.spec.residual_scale
        if self.spec.parallel:
            h = stream.h.add(self.feed_forward(stream.x, stream.h), alpha=scale)
            stream.h, stream.x = add_and_norm(h, out, same, scale, following)
            return
        stream.h, stream.x = add_and_norm(stream.h, out, self.post_attention_norm, scale, self.ffn_norm)
        out = self.feed_forward(stream.x, stream.h)
        if self.output_scale is None:
            stream.h, stream.x = add_and_norm(stream.h, out, self.post_ffw_norm, scale, following)
        else:
            h, _ = add_and_norm(stream.h, out, self.post_ffw_norm, scale, same)
            stream.h, stream.x = h.mul_(self.output_scale), following(h)


def run(
    blocks: list[Block],
    h: Tensor,
    rotations: Rotations,
    cache: KVCache,
    positions: Tensor,
    seqs: Tensor,
    cancelled: Callable[[], bool] | None = None,
) -> Tensor:
    """All blocks in turn; while one attends, the cache may fetch what the next will need. Before each, `cancelled` is
    asked: once it returns True, Cancelled is raised, and some layers have stored the tokens and others have not."""
    cache.prefetch(0, positions, seqs)
    stream = Stream(h, blocks[0].attn_norm(h))
    for layer, block in enumerate(blocks):
        if cancelled is not None and cancelled():
            raise Cancelled("The evaluation was interrupted.")
        last = layer + 1 == len(blocks)
        if not last:
            cache.prefetch(layer + 1, positions, seqs)
        attention = block.attention
        out = cache.attend(layer, attention.project(stream.x, rotations), positions, seqs)
        out = attention.output(out.flatten(1))
        block.finish(stream, out, same if last else blocks[layer + 1].attn_norm)
    return stream.h
