"""The feed-forward part of a layer: dense, or a few experts for each token."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from hybrid.head.activation import Nonlinearity, gated
from hybrid.head.kernels.formats import FEW_TOKENS
from hybrid.head.loading import LayerWeights
from hybrid.head.norm import Norm
from hybrid.model.spec import FfnSpec

LEAST_WEIGHT_SUM = 6.103515625e-5
"""Smallest sum the weights of chosen experts are divided by: float16's smallest normal number (`build_moe_ffn`)."""


class Dense:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) where the layer has no gate. `suffix` is of tensor names."""

    def __init__(self, spec: FfnSpec, weights: LayerWeights, suffix: str = "") -> None:
        self.spec = spec
        self.then = Nonlinearity(spec.activation, spec.gated)
        names = ["ffn_gate" + suffix, "ffn_up" + suffix] if spec.gated and not spec.fused else ["ffn_up" + suffix]
        joined = weights.joined(names)
        self.parts = [part for each in joined for part in each.parts]
        self.whole = joined[0].whole if len(joined) == 1 else None
        self.down = weights.linear("ffn_down" + suffix)

    def __call__(self, x: Tensor, h: Tensor) -> Tensor:
        """x [n_tokens, n_embd], normalised, to the same shape; the residual stream `h` is not read."""
        inner = None if self.whole is None else self.whole.of_few(x, self.then)
        if inner is not None:
            return self.down(inner)
        if len(self.parts) == 1:
            return self.down(self.then(self.parts[0](x)))
        gate, up = self.parts
        return self.down(gated(self.spec.activation, gate(x), lambda: up(x)))


class Experts:
    """A router sends each token to a few experts, and their outputs are added up, weighted.

    Parts that some models have exist exactly if their tensor does: experts and a shared part with norms of their own,
    a router that reads the residual stream.
    """

    def __init__(self, spec: FfnSpec, weights: LayerWeights, norm: Callable[[str], Norm], eps: float) -> None:
        self.spec, self.eps = spec, eps
        router = weights.vector("ffn_gate_inp.weight")  # float32 everywhere: its roundings would choose other experts
        assert router is not None  # the spec has checked it
        self.router, self.router_bias = router, weights.vector("ffn_gate_inp.bias")
        self.router_scale = weights.vector("ffn_gate_inp.scale")
        merged = "ffn_gate_up_exps.weight" in weights
        names = ["ffn_gate_up_exps"] if merged else ["ffn_gate_exps", "ffn_up_exps"]
        self.then = Nonlinearity(spec.activation, gated=True)
        self.gate_up, self.both = weights.joined_experts(names)
        self.down = weights.experts("ffn_down_exps")
        self.own_norm = "pre_ffw_norm_2.weight" in weights
        self.norm, self.post_norm = norm("pre_ffw_norm_2"), norm("post_ffw_norm_2")
        self.shared = Dense(spec, weights, "_shexp") if spec.n_ff_shared else None
        self.shared_post_norm = norm("post_ffw_norm_1")

    def __call__(self, x: Tensor, h: Tensor) -> Tensor:
        """x [n_tokens, n_embd], normalised, and the residual stream `h` it comes from, to the same shape."""
        shares, chosen = self._route(x, h)
        n, n_used = chosen.shape
        rows = self.norm(h) if self.own_norm else x
        if n <= FEW_TOKENS:
            out = self._row_by_row(rows, chosen.flatten())
            if out is not None:
                return self._sum(out, shares, x, h)
        order = chosen.flatten().argsort(stable=True)  # (token, choice) pairs, sorted by expert
        counts = torch.bincount(chosen.flatten(), minlength=self.spec.n_experts).tolist()
        out = self.down(self._inner(rows[order // n_used], counts), counts)
        back = torch.empty_like(out)
        back[order] = out
        return self._sum(back, shares, x, h)

    def _sum(self, out: Tensor, shares: Tensor, x: Tensor, h: Tensor) -> Tensor:
        """Outputs of all (token, choice) pairs [n * n_used, n_embd] added up, and the shared part's."""
        total = self.post_norm((out.view(*shares.shape, -1) * shares.unsqueeze(-1)).sum(1))
        return total if self.shared is None else total + self.shared_post_norm(self.shared(x, h))

    def _row_by_row(self, rows: Tensor, chosen: Tensor) -> Tensor | None:
        """Outputs of the (token, choice) pairs of `rows` [n_tokens, n_embd] through kernels, for which the host does
        not wait for the router's choice; None where there are none."""
        if self.both is not None:
            inner = self.both.row_by_row(rows, chosen, self.then)
            return None if inner is None else self.down.row_by_row(inner, chosen)
        found = [linear.row_by_row(rows, chosen) for linear in self.gate_up]
        parts = [part for part in found if part is not None]
        return None if len(parts) < len(found) else self.down.row_by_row(self.then(torch.cat(parts, dim=-1)), chosen)

    def _inner(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Rows sorted by expert, [n_rows, n_embd], to act(gate) * up, [n_rows, n_ff]."""
        first = self.gate_up[0](rows, counts)
        if len(self.gate_up) == 2:
            return gated(self.spec.activation, first, lambda: self.gate_up[1](rows, counts))
        gate, up = first.chunk(2, dim=-1)
        return gated(self.spec.activation, gate, lambda: up)

    def _route(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts each token is sent to, both [n_tokens, n_experts_used]."""
        spec = self.spec
        if self.router_scale is not None:
            x = F.rms_norm(h, h.shape[-1:], None, self.eps) * h.shape[-1] ** -0.5 * self.router_scale
        scores = F.linear(x, self.router, self.router_bias)
        if spec.routing == "softmax_of_chosen":
            top, chosen = scores.topk(spec.n_experts_used, dim=-1)
            return top.softmax(-1) * spec.expert_scale, chosen
        shares, chosen = scores.softmax(-1).topk(spec.n_experts_used, dim=-1)
        return shares / shares.sum(-1, keepdim=True).clamp_min(LEAST_WEIGHT_SUM) * spec.expert_scale, chosen


def feed_forward(spec: FfnSpec, weights: LayerWeights, norm: Callable[[str], Norm], eps: float) -> Dense | Experts:
    """The feed-forward part `spec` describes."""
    return Experts(spec, weights, norm, eps) if spec.n_experts else Dense(spec, weights)
