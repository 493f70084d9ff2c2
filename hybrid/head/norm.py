"""Normalisations of the residual stream and of heads, in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from hybrid.head.kernels.choice import Kernels
from hybrid.model.spec import NormKind

Norm = Callable[[Tensor], Tensor]


class RMSNorm:
    """x / rms(x) * w over the last len(w) values: a whole row, or each head of it."""

    def __init__(self, weight: Tensor, eps: float, kernels: Kernels | None = None) -> None:
        self.weight, self.eps, self.kernels = weight, eps, kernels

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., n * len(w)] to the same shape."""
        if self.kernels is not None:
            found = self.kernels.add_and_norm(x.reshape(-1, len(self.weight)), None, None, self.weight, self.eps)
            if found is not None:
                return found[1].view(x.shape)
        if x.shape[-1] == len(self.weight):
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return self(x.reshape(*x.shape[:-1], -1, len(self.weight))).flatten(-2)


class LayerNorm:
    """(x - mean(x)) / std(x) * w + b over whole rows; b may be missing."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., len(w)] to the same shape."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def make_norm(
    kind: NormKind, weight: Tensor | None, bias: Tensor | None, eps: float, kernels: Kernels | None = None
) -> Norm:
    """The norm of this kind with these tensors; without a weight, the one that is not there."""
    if weight is None:
        return same
    return LayerNorm(weight, bias, eps) if kind == "layer" else RMSNorm(weight, eps, kernels)


def same(x: Tensor) -> Tensor:
    """The norm that is not there."""
    return x


def add_and_norm(h: Tensor, more: Tensor, post: Norm, scale: float, norm: Norm) -> tuple[Tensor, Tensor]:
    """h + scale * post(more), all [n_tokens, n_embd], and the norm of it: in one launch where there is a kernel."""
    found = _by_kernel(h, more, post, scale, norm)
    if found is not None:
        return found
    h = h.add(post(more), alpha=scale)
    return h, norm(h)


def _by_kernel(h: Tensor, more: Tensor, post: Norm, scale: float, norm: Norm) -> tuple[Tensor, Tensor] | None:
    norms = [each for each in (post, norm) if each is not same]
    rms = [each for each in norms if isinstance(each, RMSNorm) and len(each.weight) == h.shape[-1]]
    if not rms or len(rms) < len(norms) or rms[0].kernels is None:
        return None
    weights = [each.weight if isinstance(each, RMSNorm) else None for each in (post, norm)]
    return rms[0].kernels.add_and_norm(h, more, weights[0], weights[1], rms[0].eps, scale)
