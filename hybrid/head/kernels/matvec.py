"""Products of a few rows with a quantised matrix, straight from its blocks: every byte of the matrix is read once.

A program multiplies ROWS rows of the matrix by all the tokens. A thread reads units of 16 bytes and multiplies what
they decode to in float32 by x, which is float32 too; sums over a unit stay within the thread, and scales are applied to
those sums. Where a matrix has too few rows to keep the device busy, its columns are split among programs whose partial
sums a second pass adds, always in the same order.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid.head.kernels.decode import decoding, lanes, place
from hybrid.head.kernels.formats import FEW_TOKENS, BlockFormat, Planes, Stack
from hybrid.head.kernels.variant import Variant

UNITS = 32
"""Units of one row that a program reads at a time."""
WARPS = 4
PROGRAMS_A_SM = 4
"""Programs that keep a multiprocessor busy."""


@triton.jit(do_not_specialize=["n_rows", "n_tokens", "split_units"])
def matvec_kernel(
    w, x, bias, chosen, y, n_rows, n_in, n_tokens, split_units, expert_bytes,
    LOAD: tl.constexpr, VALUE: tl.constexpr, SHIFTS: tl.constexpr, BLOCK_UNITS: tl.constexpr, OFFSET: tl.constexpr,
    GROUP: tl.constexpr, BIAS: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    """y[split, token, row] = the split's share of Σ x[token, k] · w[row, k] (+ bias[row]). Grid: (rows / ROWS, splits,
    tokens / TOKENS). With EXPERTS, TOKENS is 1 and a token's matrix and bias are number chosen[token]."""
    split = tl.program_id(1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[None, :, None, None]
    token = (tl.program_id(2) * TOKENS + tl.arange(0, TOKENS))[:, None, None, None]
    if EXPERTS:
        expert = tl.load(chosen + tl.program_id(2))
        w += expert * expert_bytes
        bias += expert * n_rows
    n_units = n_in // (16 * SHIFTS)
    row_blocks = n_units // BLOCK_UNITS
    n_blocks = n_rows.to(tl.int64) * row_blocks
    first = tl.minimum(row, n_rows - 1).to(tl.int64) * row_blocks
    stop = tl.minimum(split * split_units + split_units, n_units)
    total = tl.zeros([TOKENS, ROWS, UNITS, 1], tl.float32)
    for start in range(split * split_units, stop, UNITS):
        at = (start + tl.arange(0, UNITS))[None, None, :, None]
        mask = at < stop
        block, unit = at // BLOCK_UNITS, at % BLOCK_UNITS
        data = LOAD(w, n_blocks, first + block, unit, mask)
        for s in tl.static_range(SHIFTS):
            k = place(at, s, SHIFTS, GROUP)
            xs = tl.load(x + token * n_in + k + lanes(), mask=(token < n_tokens) & mask, other=0.0)
            q, scale, offset = VALUE(data, unit, s)
            total += scale * tl.sum(q * xs, 3, keep_dims=True)
            if OFFSET:
                total += offset * tl.sum(xs, 3, keep_dims=True)
    out = tl.sum(total, 2, keep_dims=True)
    if BIAS:
        out += tl.load(bias + row, mask=row < n_rows, other=0.0)
    to = y + (split * n_tokens + token) * n_rows + row
    tl.store(to, out, mask=(token < n_tokens) & (row < n_rows))


def rows_of(tokens: int) -> int:
    """Rows of the matrix a program takes, so that sums for all tokens stay in registers."""
    return 8 if tokens <= 2 else 4


def tokens_of(form: BlockFormat, n: int) -> int:
    """Tokens, of n, that a program takes at once: units that decode to many values leave registers for fewer."""
    return min(4 if form.shifts > 2 else FEW_TOKENS, int(triton.next_power_of_2(n)))


def splits_of(n_rows: int, n_units: int, tokens: int, n_sm: int) -> int:
    """Programs that share the columns of one row."""
    programs = -(-n_rows // rows_of(tokens))
    return max(1, min(-(-n_units // UNITS), PROGRAMS_A_SM * n_sm // programs))


@cache
def variant(form: BlockFormat, tokens: int, bias: bool, experts: bool = False) -> Variant:
    """For this format, up to `tokens` (a power of two) rows of x in a program, with or without a bias; `experts`: each
    row has a matrix of its own."""
    constants = decoding(form) | {
        "BIAS": bias, "EXPERTS": experts, "TOKENS": tokens, "ROWS": rows_of(tokens), "UNITS": UNITS,
    }  # fmt: skip
    name = f"experts {form.name}" if experts else f"matvec {form.name} x{tokens}"
    return Variant(name, matvec_kernel, constants, TYPES, ALIGNED, {"num_warps": WARPS})


TYPES = {
    "w": "*u8", "x": "*fp32", "bias": "*fp32", "chosen": "*i64", "y": "*fp32", "n_rows": "i32", "n_in": "i32",
    "n_tokens": "i32", "split_units": "i32", "expert_bytes": "i32",
}  # fmt: skip
ALIGNED = ("w", "x", "bias", "chosen", "y", "n_in", "expert_bytes")


def matvec(weight: Planes, x: Tensor, bias: Tensor | None, n_sm: int) -> Tensor:
    """x [n, n_in] float32, n <= FEW_TOKENS, contiguous, to x Wᵀ + b [n, n_rows] float32. `n_sm` is the number of
    multiprocessors of the device."""
    n = x.shape[0]
    tokens = tokens_of(weight.format, n)
    splits, step = _split(weight, tokens, 1, n_sm)
    y = torch.empty(splits, n, weight.n_rows, dtype=torch.float32, device=x.device)
    added = bias is not None and splits == 1
    form = variant(weight.format, tokens, added)
    grid = triton.cdiv(weight.n_rows, form.constants["ROWS"]), splits, triton.cdiv(n, tokens)
    form.launch(grid, weight.data, x, bias if added else x, x, y, weight.n_rows, weight.n_in, n, step, 0)
    if splits == 1:
        return y[0]
    total = y.sum(0)
    return total if bias is None else total.add_(bias)


def expert_matvec(stack: Stack, x: Tensor, chosen: Tensor, n_sm: int) -> Tensor:
    """x [n, n_in] float32, contiguous, and chosen [n] int64, the number of each row's expert, both on the device, to
    [n, n_rows] float32: row i times matrix chosen[i], plus its bias."""
    weight, bias, n = stack.first, stack.bias, x.shape[0]
    splits, step = _split(weight, 1, n, n_sm)
    y = torch.empty(splits, n, weight.n_rows, dtype=torch.float32, device=x.device)
    added = bias is not None and splits == 1
    form = variant(weight.format, 1, added, experts=True)
    grid = triton.cdiv(weight.n_rows, form.constants["ROWS"]), splits, n
    sizes = weight.n_rows, weight.n_in, n, step, weight.nbytes
    form.launch(grid, weight.data, x, bias if added else x, chosen, y, *sizes)
    if splits == 1:
        return y[0]
    total = y.sum(0)
    return total if bias is None else total.add_(bias[chosen])


def _split(weight: Planes, tokens: int, n: int, n_sm: int) -> tuple[int, int]:
    """Programs that share a row's columns, and the units each takes, for n products launched at once."""
    n_units = weight.n_in // weight.format.unit_values
    splits = splits_of(n * weight.n_rows, n_units, tokens, n_sm)
    step = triton.cdiv(triton.cdiv(n_units, splits), UNITS) * UNITS
    return triton.cdiv(n_units, step), step


def moved_bytes(weight: Planes, n: int) -> int:
    """What `matvec` must move once: the matrix, x and y."""
    return weight.data.nbytes + 4 * n * (weight.n_in + weight.n_rows)
