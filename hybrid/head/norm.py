"""Normalisations of the residual stream and of heads, in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from hybrid.model.spec import NormKind

Norm = Callable[[Tensor], Tensor]


class RMSNorm:
    """x / rms(x) * w over the last len(w) values: a whole row, or each head of it."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., n * len(w)] to the same shape."""
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


def make_norm(kind: NormKind, weight: Tensor | None, bias: Tensor | None, eps: float) -> Norm:
    """The norm of this kind with these tensors; without a weight, the one that is not there."""
    if weight is None:
        return _same
    return LayerNorm(weight, bias, eps) if kind == "layer" else RMSNorm(weight, eps)


def _same(x: Tensor) -> Tensor:
    return x
