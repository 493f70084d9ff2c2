"""The nonlinearities of the feed-forward part, as llama.cpp computes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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


ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": gelu}
