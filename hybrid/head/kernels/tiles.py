"""Weights of some rows as numbers, for products with many rows: what torch's matmul then multiplies by."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid.head.kernels.decode import decoding, lanes, place
from hybrid.head.kernels.formats import BlockFormat, Planes
from hybrid.head.kernels.variant import TRITON_TYPES, Variant

ROWS, UNITS, WARPS = 4, 32, 4
"""Of one program."""


@triton.jit(do_not_specialize=["n_held", "start", "stop"])
def tile_kernel(
    w, out, n_held, n_in, start, stop,
    LOAD: tl.constexpr, VALUE: tl.constexpr, SHIFTS: tl.constexpr, BLOCK_UNITS: tl.constexpr, OFFSET: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """out[row - start, k] = w[row, k] for start <= row < stop, of n_held rows in planes. Grid: (rows / ROWS, units of a
    row / UNITS)."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[None, :, None, None]
    at = (tl.program_id(1) * UNITS + tl.arange(0, UNITS))[None, None, :, None]
    n_units = n_in // (16 * SHIFTS)
    row_blocks = n_units // BLOCK_UNITS
    first = tl.minimum(start + row, stop - 1).to(tl.int64) * row_blocks
    block, unit = at // BLOCK_UNITS, at % BLOCK_UNITS
    data = LOAD(w, n_held.to(tl.int64) * row_blocks, first + block, unit, at < n_units)
    for s in tl.static_range(SHIFTS):
        q, scale, offset = VALUE(data, unit, s)
        value = scale * q
        if OFFSET:
            value += offset
        to = out + row.to(tl.int64) * n_in + place(at, s, SHIFTS, GROUP) + lanes()
        tl.store(to, value.to(out.dtype.element_ty), mask=(start + row < stop) & (at < n_units))


@cache
def variant(form: BlockFormat, dtype: torch.dtype) -> Variant:
    """For this format and numbers of this type."""
    constants = decoding(form) | {"ROWS": ROWS, "UNITS": UNITS}
    types = {"w": "*u8", "out": "*" + TRITON_TYPES[dtype]} | dict.fromkeys(("n_held", "n_in", "start", "stop"), "i32")
    # a fused multiply-add would round otherwise than ggml does
    options = {"num_warps": WARPS, "enable_fp_fusion": False}
    name = f"tile {form.name} {TRITON_TYPES[dtype]}"
    return Variant(name, tile_kernel, constants, types, ("w", "out", "n_in"), options)


def dequantize(weight: Planes, start: int, stop: int, out: Tensor) -> None:
    """Rows start … stop - 1 of `weight` into `out` [stop - start, n_in], each computed in float32 and rounded once."""
    n_units = weight.n_in // weight.format.unit_values
    grid = triton.cdiv(stop - start, ROWS), triton.cdiv(n_units, UNITS)
    args = weight.data, out, weight.n_held, weight.n_in, weight.first + start, weight.first + stop
    variant(weight.format, out.dtype).launch(grid, *args)


def moved_bytes(weight: Planes, start: int, stop: int, value_bytes: int) -> int:
    """What `dequantize` must read and write once."""
    n_blocks = (stop - start) * weight.n_blocks
    return n_blocks * (weight.format.n_bytes + weight.format.values * value_bytes)
