"""The plain types: blocks of 32 weights with one float16 scale `d`, some with a float16 offset `m`."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid.head.dequant.bits import half, interleaved, unpack


def q4_0(blocks: Tensor) -> Tensor:
    """d, 16 bytes of nibbles: d * (q - 8)."""
    return half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def q4_1(blocks: Tensor) -> Tensor:
    """d, m, 16 bytes of nibbles: d * q + m."""
    return half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + half(blocks, 2)


def q5_0(blocks: Tensor) -> Tensor:
    """d, 32 fifth bits, 16 bytes of nibbles: d * (q - 16)."""
    q = _nibbles(blocks[:, 6:]) | (interleaved(blocks[:, 2:6], 1) << 4)
    return half(blocks, 0) * (q.float() - 16)


def q5_1(blocks: Tensor) -> Tensor:
    """d, m, 32 fifth bits, 16 bytes of nibbles: d * q + m."""
    q = _nibbles(blocks[:, 8:]) | (interleaved(blocks[:, 4:8], 1) << 4)
    return half(blocks, 0) * q.float() + half(blocks, 2)


def q8_0(blocks: Tensor) -> Tensor:
    """d, 32 signed bytes: d * q."""
    return half(blocks, 0) * blocks[:, 2:].view(torch.int8).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[n, 16] bytes to [n, 32]: all low nibbles first."""
    return unpack(packed, 4).flatten(1)
