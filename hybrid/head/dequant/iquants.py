"""The 4-bit types whose nibbles are indices into a fixed table of 16 uneven steps."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from hybrid.head.dequant.bits import half, interleaved, unpack

STEPS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""`kvalues_iq4nl` of `ggml-common.h`."""
MXFP4_STEPS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""`kvalues_mxfp4`: twice the values of a 4-bit float with 2 bits of exponent and one of mantissa."""


def iq4_nl(blocks: Tensor) -> Tensor:
    """d, 16 bytes of nibbles; blocks of 32."""
    return half(blocks, 0) * _look_up(STEPS, unpack(blocks[:, 2:], 4).flatten(1))


def iq4_xs(blocks: Tensor) -> Tensor:
    """d, 8 scales' upper bit pairs (2 bytes) and lower nibbles (4 bytes), 128 bytes of nibbles; 8 parts of 32."""
    scales = interleaved(blocks[:, 4:8], 4) | (interleaved(blocks[:, 2:4], 2) << 4)
    dl = (half(blocks, 0) * (scales.float() - 32)).unsqueeze(-1)  # [n, 8, 1]
    q = unpack(blocks[:, 8:].reshape(-1, 8, 16), 4).flatten(2)  # [n, 8, 32]
    return (dl * _look_up(STEPS, q)).flatten(1)


def mxfp4(blocks: Tensor) -> Tensor:
    """An exponent e, 16 bytes of nibbles; blocks of 32. The scale is 2^(e - 128) (`ggml_e8m0_to_fp32_half`)."""
    e = blocks[:, :1].int()
    bits = torch.where(e < 2, 0x00200000 << e.clamp(max=1), (e - 1) << 23)  # below 2 it is denormal
    return bits.view(torch.float32) * _look_up(MXFP4_STEPS, unpack(blocks[:, 1:], 4).flatten(1))


def _look_up(steps: tuple[int, ...], q: Tensor) -> Tensor:
    return _table(steps, q.device)[q.int()]


@cache
def _table(steps: tuple[int, ...], device: torch.device) -> Tensor:
    """The steps on `device`, copied there once."""
    return torch.tensor(steps, dtype=torch.float32, device=device)
