"""The k-quants: superblocks of 256 weights, whose 16 or 8 parts have small integer scales of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid.head.dequant.bits import half, unpack


def q2_k(blocks: Tensor) -> Tensor:
    """16 (scale, min) nibble pairs, 64 bytes of 2-bit values, d, dmin; 16 parts of 16."""
    scales = unpack(blocks[:, :16], 4).float()  # [n, 2, 16]
    dl = (half(blocks, 80) * scales[:, 0]).unsqueeze(-1)
    ml = (half(blocks, 82) * scales[:, 1]).unsqueeze(-1)
    q = unpack(blocks[:, 16:80].reshape(-1, 2, 32), 2)  # [n, 2, 4, 32]
    return (dl * q.reshape(-1, 16, 16).float() - ml).flatten(1)


def q3_k(blocks: Tensor) -> Tensor:
    """32 bytes of third bits (a set bit means no offset), 64 bytes of 2-bit values, 16 6-bit scales, d."""
    packed = blocks[:, 96:108]
    scales = unpack(packed[:, :8], 4).flatten(1) | (unpack(packed[:, 8:], 2).flatten(1) << 4)
    dl = (half(blocks, 108) * (scales.float() - 32)).unsqueeze(-1)  # [n, 16, 1]
    low = unpack(blocks[:, 32:96].reshape(-1, 2, 32), 2).flatten(1)  # [n, 256]
    high = unpack(blocks[:, :32], 1).flatten(1)
    q = (low | (high << 2)).float() - 4
    return (dl * q.reshape(-1, 16, 16)).flatten(1)


def q4_k(blocks: Tensor) -> Tensor:
    """d, dmin, 8 6-bit (scale, min) pairs, 128 bytes of nibbles; 8 parts of 32."""
    q = unpack(blocks[:, 16:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    return _scale_and_shift(blocks, q)


def q5_k(blocks: Tensor) -> Tensor:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles."""
    low = unpack(blocks[:, 48:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    return _scale_and_shift(blocks, low | (unpack(blocks[:, 16:48], 1) << 4))


def q6_k(blocks: Tensor) -> Tensor:
    """128 bytes of nibbles, 64 bytes of upper bit pairs, 16 signed scales, d; 16 parts of 16."""
    low = unpack(blocks[:, :128].reshape(-1, 2, 64), 4).flatten(1)
    high = unpack(blocks[:, 128:192].reshape(-1, 2, 32), 2).flatten(1)
    dl = (half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()).unsqueeze(-1)
    q = (low | (high << 4)).float() - 32
    return (dl * q.reshape(-1, 16, 16)).flatten(1)


def _scale_and_shift(blocks: Tensor, q: Tensor) -> Tensor:
    """(d * scale) * q - dmin * min, for Q4_K and Q5_K. The 12 scale bytes hold the first four pairs' 6 bits each,
    with the last four pairs' upper two bits on top of them and their lower four in the last four bytes."""
    first, second, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (low & 15) | ((first >> 2) & 48)], dim=1).float()
    mins = torch.cat([second & 63, (low >> 4) | ((second >> 2) & 48)], dim=1).float()
    d = (half(blocks, 0) * scales).unsqueeze(-1)  # [n, 8, 1]
    m = (half(blocks, 2) * mins).unsqueeze(-1)
    return (d * q.float() - m).flatten(1)
