"""Taking packed blocks apart: half-precision fields and small unsigned integers."""

from __future__ import annotations

import torch
from torch import Tensor


def half(blocks: Tensor, at: int) -> Tensor:
    """The float16 that starts at byte `at` of every block, as float32 [n_blocks, 1]."""
    return blocks[:, at : at + 2].view(torch.float16).float()


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Split bytes [..., w] into their 8 / bits fields, lowest first, on a new axis before the last: [..., 8 / bits, w].

    Shifts by Python numbers: a tensor of shifts would have to be copied to the device at every call.
    """
    mask = (1 << bits) - 1
    return torch.stack([(packed >> shift) & mask for shift in range(0, 8, bits)], dim=-2)


def interleaved(packed: Tensor, bits: int) -> Tensor:
    """Split bytes [n, w] into fields that follow each other: [n, w * 8 / bits]."""
    return unpack(packed.unsqueeze(-1), bits).flatten(1)
