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

from hybrid.head.activation import Nonlinearity
from hybrid.head.kernels.decode import decoding, lanes, place
from hybrid.head.kernels.formats import FEW_TOKENS, BlockFormat, Planes, Stack
from hybrid.head.kernels.variant import Variant

UNITS = 32
"""Units of one row that a program reads at a time."""
WARPS = 4
REGISTERS = (
    dict.fromkeys([("f32", 1), ("f16", 1), ("bf16", 1), ("f16", 2), ("q5_0", 1), ("q5_1", 1)], 128)
    | {("mxfp4", 1): 168, ("q5_1", 2): 168}
    | dict.fromkeys([("q5_0", 8), ("iq4_nl", 8), ("q6_k", 8)], 255)
)  # fmt: skip
"""Formats, and tokens of a program, of which ptxas would spill some (`Variant.registers`)."""
PROGRAMS_A_SM = 4
"""Programs that keep a multiprocessor busy."""


@triton.jit
def _activated(x, ACT: tl.constexpr):
    """The nonlinearity (`hybrid.head.activation`) of the gate, or of the only factor."""
    if ACT == "gelu":
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))  # 2 sqrt(2 / pi): its tanh formula
    elif ACT == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif ACT == "swiglu_oai":
        x = tl.minimum(x, 7.0)
        x = x / (1.0 + tl.exp(-1.702 * x))
    return x


@triton.jit(do_not_specialize=["first_row", "n_rows", "n_held", "n_tokens", "split_units", "n_used"])
def matvec_kernel(
    w, x, bias, chosen, y, first_row, n_rows, n_held, n_in, n_tokens, split_units, expert_bytes, n_used,
    LOAD: tl.constexpr, VALUE: tl.constexpr, SHIFTS: tl.constexpr, BLOCK_UNITS: tl.constexpr, OFFSET: tl.constexpr,
    GROUP: tl.constexpr, BIAS: tl.constexpr, EXPERTS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """y[split, token, row] = the split's share of Σ x[token, k] · w[row, k] (+ bias[row]), for n_rows rows from
    first_row on of the n_held in planes. Grid: (rows / ROWS, splits, tokens / TOKENS).

    With ACT there is one split, and y is the activation of that; GATED, act(first half of the rows) · second half. With
    EXPERTS, TOKENS is 1, a token's matrix and bias are number chosen[token], and n_used tokens share a row of x."""
    split = tl.program_id(1)
    token = (tl.program_id(2) * TOKENS + tl.arange(0, TOKENS))[:, None, None, None]
    r = tl.arange(0, ROWS)[None, :, None, None]
    if GATED:  # as many rows of either half
        n_out = n_rows // 2
        to_row = tl.program_id(0) * (ROWS // 2) + r % (ROWS // 2)
        real = to_row < n_out
        row = tl.minimum(to_row, n_out - 1) + r // (ROWS // 2) * n_out
    else:
        n_out = n_rows
        to_row = tl.program_id(0) * ROWS + r
        real = to_row < n_out
        row = tl.minimum(to_row, n_rows - 1)
    x_row = token
    if EXPERTS:
        expert = tl.load(chosen + tl.program_id(2))
        w += expert * expert_bytes
        bias += expert * n_rows
        x_row = token // n_used
    n_units = n_in // (16 * SHIFTS)
    row_blocks = n_units // BLOCK_UNITS
    n_blocks = n_held.to(tl.int64) * row_blocks
    first = (first_row + row).to(tl.int64) * row_blocks
    stop = tl.minimum(split * split_units + split_units, n_units)
    total = tl.zeros([TOKENS, ROWS, UNITS, 1], tl.float32)
    for start in range(split * split_units, stop, UNITS):
        at = (start + tl.arange(0, UNITS))[None, None, :, None]
        mask = at < stop
        block, unit = at // BLOCK_UNITS, at % BLOCK_UNITS
        data = LOAD(w, n_blocks, first + block, unit, mask)
        for s in tl.static_range(SHIFTS):
            k = place(at, s, SHIFTS, GROUP)
            xs = tl.load(x + x_row * n_in + k + lanes(), mask=(token < n_tokens) & mask, other=0.0)
            q, scale, offset = VALUE(data, unit, s)
            total += scale * tl.sum(q * xs, 3, keep_dims=True)
            if OFFSET:
                total += offset * tl.sum(xs, 3, keep_dims=True)
    out = tl.sum(total, 2, keep_dims=True)
    if BIAS:
        out += tl.load(bias + row, mask=real, other=0.0)
    if GATED:
        halves = tl.permute(tl.reshape(out, [TOKENS, 2, ROWS // 2]), (0, 2, 1))
        gate, up = tl.split(halves)
        if ACT == "swiglu_oai":
            up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
        result = _activated(gate, ACT) * up
        to = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)[None, :]
        tokens = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)[:, None]
        tl.store(y + tokens * n_out + to, result, mask=(tokens < n_tokens) & (to < n_out))
    else:
        to = y + (split * n_tokens + token) * n_out + to_row
        tl.store(to, _activated(out, ACT), mask=(token < n_tokens) & real)


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
def variant(
    form: BlockFormat, tokens: int, bias: bool, experts: bool = False, act: str = "", gated: bool = False
) -> Variant:
    """For this format, up to `tokens` (a power of two) rows of x in a program, with or without a bias; `experts`: each
    row has a matrix of its own; `act`: the activation of the product, `gated`: of its first half, times the second."""
    constants = decoding(form) | {
        "BIAS": bias, "EXPERTS": experts, "ACT": act, "GATED": gated, "TOKENS": tokens, "ROWS": rows_of(tokens),
        "UNITS": UNITS,
    }  # fmt: skip
    name = f"experts {form.name}" if experts else f"matvec {form.name} x{tokens}"
    name += f" {'gated ' if gated else ''}{act}" if act else ""
    registers = REGISTERS.get((form.name, tokens), 0)
    return Variant(name, matvec_kernel, constants, TYPES, ALIGNED, {"num_warps": WARPS}, registers)


TYPES = dict.fromkeys(("w", "x", "bias", "chosen", "y"), "*fp32") | {"w": "*u8", "chosen": "*i64"} | dict.fromkeys(
    ("first_row", "n_rows", "n_held", "n_in", "n_tokens", "split_units", "expert_bytes", "n_used"), "i32"
)  # fmt: skip
ALIGNED = ("w", "x", "bias", "chosen", "y", "n_in", "expert_bytes")


def matvec(weight: Planes, x: Tensor, bias: Tensor | None, n_sm: int, then: Nonlinearity | None = None) -> Tensor:
    """x [n, n_in] float32, n <= FEW_TOKENS, contiguous, to x Wᵀ + b [n, n_rows] float32, or to what becomes of that
    [n, n_rows] or [n, n_rows / 2]. `n_sm` is the number of multiprocessors of the device."""
    tokens = tokens_of(weight.format, x.shape[0])
    splits, step = _split(weight, tokens, 1, n_sm)
    groups = triton.cdiv(x.shape[0], tokens)
    y = _launch(weight, x, bias, x, (tokens, splits, groups), (step, 0, 1), then)
    return y[0] if splits == 1 else _finished(y.sum(0), bias, then)


def expert_matvec(stack: Stack, x: Tensor, chosen: Tensor, n_sm: int, then: Nonlinearity | None = None) -> Tensor:
    """x [n / m, n_in] float32, contiguous, and chosen [n] int64, the numbers of each row's m experts, to [n, n_rows]
    float32: row i // m times matrix chosen[i], plus its bias, or what becomes of that as in `matvec`."""
    weight, bias, n = stack.first, stack.bias, chosen.shape[0]
    splits, step = _split(weight, 1, n, n_sm)
    y = _launch(weight, x, bias, chosen, (1, splits, n), (step, weight.data.nbytes, n // x.shape[0]), then)
    return y[0] if splits == 1 else _finished(y.sum(0), None if bias is None else bias[chosen], then)


def _launch(
    weight: Planes, x: Tensor, bias: Tensor | None, chosen: Tensor, sizes: tuple[int, int, int],
    more: tuple[int, int, int], then: Nonlinearity | None,
) -> Tensor:  # fmt: skip
    """One launch: the parts of all splits, or the whole result where there is one split. `sizes`: tokens of a program,
    splits, programs for all tokens; `more`: units of a split, bytes of an expert, products of a row of x."""
    tokens, splits, groups = sizes
    step, expert_bytes, n_used = more
    n = x.shape[0] * n_used
    whole = splits == 1
    act, gated = (then.activation, then.gated) if whole and then is not None else ("", False)
    form = variant(weight.format, tokens, whole and bias is not None, expert_bytes > 0, act, gated)
    n_out = weight.n_rows // 2 if gated else weight.n_rows
    y = torch.empty(splits, n, n_out, dtype=torch.float32, device=x.device)
    grid = triton.cdiv(weight.n_rows, form.constants["ROWS"]), splits, groups
    added = x if bias is None else bias
    rows = weight.first, weight.n_rows, weight.n_held
    form.launch(grid, weight.data, x, added, chosen, y, *rows, weight.n_in, n, step, expert_bytes, n_used)
    return y


def _finished(total: Tensor, bias: Tensor | None, then: Nonlinearity | None) -> Tensor:
    """What a launch of one split would have made of the sum of several."""
    if bias is not None:
        total.add_(bias)
    return total if then is None else then(total)


def _split(weight: Planes, tokens: int, n: int, n_sm: int) -> tuple[int, int]:
    """Programs that share a row's columns, and the units each takes, for n products launched at once."""
    n_units = weight.n_in // weight.format.unit_values
    splits = splits_of(n * weight.n_rows, n_units, tokens, n_sm)
    step = triton.cdiv(triton.cdiv(n_units, splits), UNITS) * UNITS
    return triton.cdiv(n_units, step), step


def moved_bytes(weight: Planes, n: int, gated: bool = False) -> int:
    """What `matvec` must move once: the matrix, x and y (half as wide where it is `gated`)."""
    return weight.nbytes + 4 * n * (weight.n_in + weight.n_rows // (2 if gated else 1))
