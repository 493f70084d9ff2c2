"""The nonlinearities of the feed-forward part, as llama.cpp computes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from hybrid.model.spec import Activation


def gelu(x: Tensor) -> Tensor:
    """GELU by its tanh formula.

    On the CPU llama.cpp reads it from a table of float16 values indexed by float16 arguments where |x| < 10
    (`ggml_vec_geglu_f32`), which moves each value by up to 5e-4 of itself. So do we, from the same table: without it
    the hidden state of a gemma3 is 3e-4 away from llama.cpp's after a few layers, and the look-up is faster.
    """
    if x.device.type != "cpu":
        return F.gelu(x, approximate="tanh")
    index = x.half().view(torch.int16).int().bitwise_and_(0xFFFF).flatten()
    return torch.where(x >= 10, x, _gelu_table().index_select(0, index).view(x.shape))


@cache
def _gelu_table() -> Tensor:
    """GELU of every float16, rounded to float16, as float32 [65536]; 0 from -10 down."""
    x = torch.arange(1 << 16).to(torch.int16).view(torch.float16).float()
    y = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x)))
    return torch.where(x <= -10, 0.0, y).half().float()


def swiglu_oai(gate: Tensor) -> Tensor:
    """gpt-oss's gate: x * sigmoid(1.702 x) of min(x, 7) (`ggml_swiglu_oai`)."""
    gate = gate.clamp(max=7.0)
    return torch.sigmoid(gate * 1.702).mul_(gate)


ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": gelu,
    "swiglu_oai": swiglu_oai,
}
"""Of the gate, or of the only input where there is no gate."""
UP: Mapping[Activation, Callable[[Tensor], Tensor]] = {"swiglu_oai": lambda up: up.clamp(-7.0, 7.0).add_(1.0)}
"""What becomes of the other factor, where it is not taken as it is."""


def gated(activation: Activation, gate: Tensor, up: Callable[[], Tensor]) -> Tensor:
    """act(gate) * up; `up` is asked for only when the gate has been dealt with, so that two such tensors are alive at
    most."""
    gate = ACTIVATIONS[activation](gate)
    change = UP.get(activation)
    return gate.mul_(up() if change is None else change(up()))


@dataclass(frozen=True)
class Nonlinearity:
    """What a feed-forward part makes of its first product: act(product), or, `gated`, act(first half) * second half."""

    activation: Activation
    gated: bool

    def __call__(self, product: Tensor) -> Tensor:
        """product [n, n_ff], or [n, 2 n_ff] where it is gated, to [n, n_ff]."""
        if not self.gated:
            return ACTIVATIONS[self.activation](product)
        gate, up = product.chunk(2, dim=-1)
        return gated(self.activation, gate, lambda: up)
