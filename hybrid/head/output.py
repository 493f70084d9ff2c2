"""The output head: from the residual stream behind the last layer to logits."""

from __future__ import annotations

from torch import Tensor

from hybrid.head.loading import Loader
from hybrid.head.norm import make_norm
from hybrid.model.spec import ModelSpec

OUTPUT = ("output_norm.weight", "output_norm.bias", "output.bias")
"""What it has besides its matrix."""


class OutputHead:
    """The final norm and the output matrix."""

    def __init__(self, spec: ModelSpec, loader: Loader) -> None:
        norm, bias = (
            loader.vector(spec.weights[name]) if name in spec.weights else None
            for name in ("output_norm.weight", "output_norm.bias")
        )
        self.norm = make_norm(spec.norm, norm, bias, spec.norm_eps, loader.compute.kernels)
        self.matrix = loader.linear(spec.output_tensor, spec.weights.get("output.bias"))
        self.scale, self.softcap = spec.logit_scale, spec.logit_softcap

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [m, n_embd] float32 to [m, n_vocab] float32."""
        out = self.matrix(self.norm(hidden))
        if self.scale != 1.0:
            out.mul_(self.scale)
        if self.softcap:
            out.div_(self.softcap).tanh_().mul_(self.softcap)
        return out
