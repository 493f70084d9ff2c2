"""ggml's q8_0: 32 values as one float16 scale d and 32 signed bytes, in torch, on any device.

The source is llama.cpp's ggml-quants.c (quantize_row_q8_0_ref): d = max|x| / 127, rounded to float16 when stored but
not when dividing; values are rounded half away from zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
"""Values of a block."""
BLOCK_BYTES = 34
"""Its bytes: d, then the values."""


def row_bytes(n_values: int) -> int:
    """Bytes of a row of n_values. Raises ValueError where they do not fill whole blocks."""
    if n_values % BLOCK:
        raise ValueError(f"q8_0 stores whole blocks of {BLOCK} values; {n_values} are none.")
    return n_values // BLOCK * BLOCK_BYTES


def quantize(x: Tensor) -> Tensor:
    """x [..., n] of any float type to uint8 [..., n // 32 * 34], bit for bit as ggml does."""
    width = row_bytes(x.shape[-1])  # raises ValueError
    blocks = x.float().reshape(*x.shape[:-1], width // BLOCK_BYTES, BLOCK)
    d = blocks.abs().amax(-1, keepdim=True) / 127
    scaled = blocks * torch.where(d == 0, torch.zeros_like(d), 1 / d)
    size = scaled.abs()
    whole = size.floor()
    rounded = whole + (2 * (size - whole)).floor()  # adding 0.5 would round up what lies just below a half
    values = torch.copysign(rounded, scaled).to(torch.int8)
    return torch.cat([d.half().view(torch.uint8), values.view(torch.uint8)], -1).reshape(*x.shape[:-1], width)


def dequantize(rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 [..., n // 32 * 34] to [..., n] in `dtype`; the products are made in float32, as ggml does."""
    if rows.dtype != torch.uint8 or rows.shape[-1] % BLOCK_BYTES:
        raise ValueError(f"q8_0 rows are bytes in blocks of {BLOCK_BYTES}; got {rows.dtype} [{rows.shape[-1]}].")
    n_blocks = rows.shape[-1] // BLOCK_BYTES
    blocks = rows.contiguous().view(*rows.shape[:-1], n_blocks, BLOCK_BYTES)
    d = blocks[..., :2].contiguous().view(torch.float16).float()
    values = blocks[..., 2:].contiguous().view(torch.int8).float()
    return (values * d).to(dtype).reshape(*rows.shape[:-1], n_blocks * BLOCK)
