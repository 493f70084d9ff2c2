"""From a format's fields to numbers: for each type, `load_NAME` reads what a few units of some rows need, and
`value_NAME` makes one group of 16 values of each.

Tensors have four axes from the start, [tokens, rows R, units U, lanes]: Triton carries the layout in which a thread
holds the 16 bytes that it has read from one operation to the next, but not through a new axis.

`load_NAME(w, n_blocks, block, unit, mask)`: `w` is the matrix in planes (`formats.Planes`), n_blocks all blocks of it;
`block` [1, R, U, 1] int64 and `unit` [1, 1, U, 1] say which block of the matrix and which unit of that block, `mask`
[1, 1, U, 1] which of them exist.

`value_NAME` makes one group of 16 values of each.

`load_NAME(w, n_blocks, block, unit, mask)`: `w` is the matrix in planes (`formats.Planes`), n_blocks all blocks of it;
`block` [R, U] int64 and `unit` [1, U] say which block of the matrix and which unit of that block, `mask` [1, U] which
of them exist.

`value_NAME(data, unit, S)`: q [1, R, U, 16] float32, scale and offset [1, R, U, 1] (the scale again where the
format has none). The weights are scale * q, or scale * q + offset, computed in float32 in ggml's order
(`ggml/src/ggml-quants.c`). `place` says which weights of the row they are.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from hybrid.head.kernels.formats import BlockFormat


@triton.jit
def place(unit, S: tl.constexpr, SHIFTS: tl.constexpr, GROUP: tl.constexpr):
    """The first of the 16 consecutive weights of a row that shift S of its unit gives (`BlockFormat.group`)."""
    return unit // GROUP * (GROUP * SHIFTS * 16) + S * (GROUP * 16) + unit % GROUP * 16


@triton.jit
def lanes():
    """0 … 15 on the last axis."""
    return tl.arange(0, 16)[None, None, None, :]


@triton.jit
def _bytes(plane, at, mask):
    """16 bytes from `at` on: [1, R, U, 16]."""
    return tl.load(plane + at + lanes(), mask=mask, other=0)


@triton.jit
def _half(plane, at, mask):
    """float16 number `at` of a plane, as float32."""
    return tl.load(plane.to(tl.pointer_type(tl.float16)) + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _word(plane, at, mask):
    """32-bit word `at` of a plane."""
    return tl.load(plane.to(tl.pointer_type(tl.int32)) + at, mask=mask, other=0)


@triton.jit
def _nibble(q, S: tl.constexpr):
    """The lower (S = 0) or upper four bits of bytes, as int32."""
    return ((q >> (4 * S)) & 15).to(tl.int32)


@triton.jit
def _bit(q, shift):
    """Bit `shift` of bytes, as int32."""
    return (q.to(tl.int32) >> shift) & 1


@triton.jit
def _looked_up(q, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Number q, 0 … 15, of 16 signed bytes in two words: shifts, because memory would be slower."""
    words = tl.where(q < 8, LOW, HIGH).to(tl.int64)
    return (words >> ((q & 7) * 8).to(tl.int64)).to(tl.int8).to(tl.float32)


# -- plain numbers ---------------------------------------------------------------------------------------------------


@triton.jit
def _numbers(plane, block, mask):
    """16 numbers of the type that `plane` points to, as float32 beside a scale of 1."""
    x = tl.load(plane + block * 16 + lanes(), mask=mask, other=0.0)
    return x.to(tl.float32), (block * 0 + 1).to(tl.float32)


@triton.jit
def load_f32(w, n_blocks, block, unit, mask):
    return _numbers(w.to(tl.pointer_type(tl.float32)), block, mask)


@triton.jit
def load_f16(w, n_blocks, block, unit, mask):
    return _numbers(w.to(tl.pointer_type(tl.float16)), block, mask)


@triton.jit
def load_bf16(w, n_blocks, block, unit, mask):
    return _numbers(w.to(tl.pointer_type(tl.bfloat16)), block, mask)


@triton.jit
def value_plain(data, unit, S: tl.constexpr):
    return data[0], data[1], data[1]


# -- blocks of 32 ------------------------------------------------------------------------------------------------------


@triton.jit
def load_q4_0(w, n_blocks, block, unit, mask):
    return _bytes(w, block * 16, mask), _half(w + n_blocks * 16, block, mask)


@triton.jit
def value_q4_0(data, unit, S: tl.constexpr):
    return _nibble(data[0], S).to(tl.float32) - 8.0, data[1], data[1]


@triton.jit
def load_q4_1(w, n_blocks, block, unit, mask):
    dm = w + n_blocks * 16
    return _bytes(w, block * 16, mask), _half(dm, block * 2, mask), _half(dm, block * 2 + 1, mask)


@triton.jit
def value_q4_1(data, unit, S: tl.constexpr):
    return _nibble(data[0], S).to(tl.float32), data[1], data[2]


@triton.jit
def _with_fifth_bit(q, word, S: tl.constexpr):
    """Nibbles with bits 16 S … 16 S + 15 of a word on top."""
    return (_nibble(q, S) | (((word >> (lanes() + 16 * S)) & 1) << 4)).to(tl.float32)


@triton.jit
def load_q5_0(w, n_blocks, block, unit, mask):
    high, d = w + n_blocks * 16, w + n_blocks * 20
    return _bytes(w, block * 16, mask), _word(high, block, mask), _half(d, block, mask)


@triton.jit
def value_q5_0(data, unit, S: tl.constexpr):
    return _with_fifth_bit(data[0], data[1], S) - 16.0, data[2], data[2]


@triton.jit
def load_q5_1(w, n_blocks, block, unit, mask):
    high, dm = w + n_blocks * 16, w + n_blocks * 20
    d, m = _half(dm, block * 2, mask), _half(dm, block * 2 + 1, mask)
    return _bytes(w, block * 16, mask), _word(high, block, mask), d, m


@triton.jit
def value_q5_1(data, unit, S: tl.constexpr):
    return _with_fifth_bit(data[0], data[1], S), data[2], data[3]


@triton.jit
def load_q8_0(w, n_blocks, block, unit, mask):
    return _bytes(w, block * 32 + unit * 16, mask), _half(w + n_blocks * 32, block, mask)


@triton.jit
def value_q8_0(data, unit, S: tl.constexpr):
    return data[0].to(tl.int8, bitcast=True).to(tl.float32), data[1], data[1]


# `kvalues_iq4nl` and `kvalues_mxfp4` of ggml-common.h as signed bytes, the first eight in one word, first lowest.
IQ4_LOW: tl.constexpr = tl.constexpr(
    int.from_bytes(bytes(x & 255 for x in (-127, -104, -83, -65, -49, -35, -22, -10)), "little", signed=True)
)
IQ4_HIGH: tl.constexpr = tl.constexpr(int.from_bytes(bytes((1, 13, 25, 38, 53, 69, 89, 113)), "little", signed=True))
FP4_LOW: tl.constexpr = tl.constexpr(int.from_bytes(bytes((0, 1, 2, 3, 4, 6, 8, 12)), "little", signed=True))
FP4_HIGH: tl.constexpr = tl.constexpr(
    int.from_bytes(bytes(-x & 255 for x in (0, 1, 2, 3, 4, 6, 8, 12)), "little", signed=True)
)


@triton.jit
def value_iq4_nl(data, unit, S: tl.constexpr):
    return _looked_up(_nibble(data[0], S), IQ4_LOW, IQ4_HIGH), data[1], data[1]


@triton.jit
def load_mxfp4(w, n_blocks, block, unit, mask):
    e = tl.load(w + n_blocks * 16 + block, mask=mask, other=0).to(tl.int32)
    bits = tl.where(e < 2, 0x00200000 << tl.minimum(e, 1), (e - 1) << 23)  # 2^(e - 128), denormal below 2
    return _bytes(w, block * 16, mask), bits.to(tl.float32, bitcast=True)


@triton.jit
def value_mxfp4(data, unit, S: tl.constexpr):
    return _looked_up(_nibble(data[0], S), FP4_LOW, FP4_HIGH), data[1], data[1]


# -- superblocks of 256 ----------------------------------------------------------------------------------------------


@triton.jit
def load_q2_k(w, n_blocks, block, unit, mask):
    scales, d = w + n_blocks * 64, w + n_blocks * 80
    word = block * 4 + unit // 2 * 2
    return (
        _bytes(w, block * 64 + unit * 16, mask),
        _word(scales, word, mask), _word(scales, word + 1, mask),
        _half(d, block * 2, mask), _half(d, block * 2 + 1, mask),
    )  # fmt: skip


@triton.jit
def value_q2_k(data, unit, S: tl.constexpr):
    packed = data[1 + S // 2] >> ((S % 2 * 2 + unit % 2) * 8)
    scale, least = (packed & 15).to(tl.float32), ((packed >> 4) & 15).to(tl.float32)
    q = ((data[0] >> (2 * S)) & 3).to(tl.float32)
    return q, data[3] * scale, -(data[4] * least)


@triton.jit
def load_q3_k(w, n_blocks, block, unit, mask):
    high, scales, d = w + n_blocks * 64, w + n_blocks * 96, w + n_blocks * 108
    return (
        _bytes(w, block * 64 + unit * 16, mask),
        _bytes(high, block * 32 + unit % 2 * 16, mask),
        _word(scales, block * 3, mask), _word(scales, block * 3 + 1, mask), _word(scales, block * 3 + 2, mask),
        _half(d, block, mask),
    )  # fmt: skip


@triton.jit
def value_q3_k(data, unit, S: tl.constexpr):
    at = (S % 2 * 2 + unit % 2) * 8  # scale 8 (unit // 2) + 2 S + unit % 2: nibbles, and pairs of bits on top
    low = (data[2 + S // 2] >> (at + unit // 2 * 4)) & 15
    top = (data[4] >> (at + (unit // 2 * 2 + S // 2) * 2)) & 3
    scale = (low | (top << 4)).to(tl.float32) - 32.0
    q = ((data[0] >> (2 * S)) & 3).to(tl.int32) | (_bit(data[1], unit // 2 * 4 + S) << 2)
    return q.to(tl.float32) - 4.0, data[5] * scale, data[5]


@triton.jit
def load_q4_k(w, n_blocks, block, unit, mask):
    scales, d = w + n_blocks * 128, w + n_blocks * 140
    return (
        _bytes(w, block * 128 + unit * 16, mask),
        _word(scales, block * 3, mask), _word(scales, block * 3 + 1, mask), _word(scales, block * 3 + 2, mask),
        _half(d, block * 2, mask), _half(d, block * 2 + 1, mask),
    )  # fmt: skip


@triton.jit
def _scale_and_min(first, second, low, d, dmin, part):
    """Of part 0 … 7 of a Q4_K or Q5_K block (`get_scale_min_k4`)."""
    shift = (part & 3) * 8
    a, b, c = (first >> shift) & 255, (second >> shift) & 255, (low >> shift) & 255
    scale = tl.where(part < 4, a & 63, (c & 15) | ((a >> 2) & 48))
    least = tl.where(part < 4, b & 63, (c >> 4) | ((b >> 2) & 48))
    return d * scale.to(tl.float32), -(dmin * least.to(tl.float32))


@triton.jit
def value_q4_k(data, unit, S: tl.constexpr):
    scale, offset = _scale_and_min(data[1], data[2], data[3], data[4], data[5], unit // 2 * 2 + S)
    return _nibble(data[0], S).to(tl.float32), scale, offset


@triton.jit
def load_q5_k(w, n_blocks, block, unit, mask):
    high, scales, d = w + n_blocks * 128, w + n_blocks * 160, w + n_blocks * 172
    return (
        _bytes(w, block * 128 + unit * 16, mask),
        _word(scales, block * 3, mask), _word(scales, block * 3 + 1, mask), _word(scales, block * 3 + 2, mask),
        _half(d, block * 2, mask), _half(d, block * 2 + 1, mask),
        _bytes(high, block * 32 + unit % 2 * 16, mask),
    )  # fmt: skip


@triton.jit
def value_q5_k(data, unit, S: tl.constexpr):
    part = unit // 2 * 2 + S
    scale, offset = _scale_and_min(data[1], data[2], data[3], data[4], data[5], part)
    q = _nibble(data[0], S) | (_bit(data[6], part) << 4)
    return q.to(tl.float32), scale, offset


@triton.jit
def load_q6_k(w, n_blocks, block, unit, mask):
    high, scales, d = w + n_blocks * 128, w + n_blocks * 192, w + n_blocks * 208
    scale = scales.to(tl.pointer_type(tl.int8)) + block * 16 + unit // 4 * 8 + unit % 4
    return (
        _bytes(w, block * 128 + unit * 16, mask),
        _bytes(high, block * 64 + unit // 4 * 32 + unit % 2 * 16, mask),
        tl.load(scale, mask=mask, other=0), tl.load(scale + 4, mask=mask, other=0),
        _half(d, block, mask),
    )  # fmt: skip


@triton.jit
def value_q6_k(data, unit, S: tl.constexpr):
    shift = (S * 2 + unit % 4 // 2) * 2
    q = _nibble(data[0], S) | (((data[1].to(tl.int32) >> shift) & 3) << 4)
    scale = data[4] * data[2 + S].to(tl.float32)
    return q.to(tl.float32) - 32.0, scale, scale


@triton.jit
def load_iq4_xs(w, n_blocks, block, unit, mask):
    low, high, d = w + n_blocks * 128, w + n_blocks * 132, w + n_blocks * 134
    tops = tl.load(high.to(tl.pointer_type(tl.int16)) + block, mask=mask, other=0).to(tl.int32)
    scale = ((_word(low, block, mask) >> (unit * 4)) & 15) | (((tops >> (unit * 2)) & 3) << 4)
    return _bytes(w, block * 128 + unit * 16, mask), _half(d, block, mask) * (scale.to(tl.float32) - 32.0)


@triton.jit
def value_iq4_xs(data, unit, S: tl.constexpr):
    return _looked_up(_nibble(data[0], S), IQ4_LOW, IQ4_HIGH), data[1], data[1]


DECODERS: dict[str, tuple[Any, Any]] = {
    "f32": (load_f32, value_plain),
    "f16": (load_f16, value_plain),
    "bf16": (load_bf16, value_plain),
    "q4_0": (load_q4_0, value_q4_0),
    "q4_1": (load_q4_1, value_q4_1),
    "q5_0": (load_q5_0, value_q5_0),
    "q5_1": (load_q5_1, value_q5_1),
    "q8_0": (load_q8_0, value_q8_0),
    "q2_k": (load_q2_k, value_q2_k),
    "q3_k": (load_q3_k, value_q3_k),
    "q4_k": (load_q4_k, value_q4_k),
    "q5_k": (load_q5_k, value_q5_k),
    "q6_k": (load_q6_k, value_q6_k),
    "iq4_nl": (load_q4_0, value_iq4_nl),
    "iq4_xs": (load_iq4_xs, value_iq4_xs),
    "mxfp4": (load_mxfp4, value_mxfp4),
}
"""`load` and `value` by the name of a format."""


def decoding(form: BlockFormat) -> dict[str, Any]:
    """The compile-time constants of kernels that decode blocks of this format."""
    load, value = DECODERS[form.name]
    return {
        "LOAD": load, "VALUE": value, "SHIFTS": form.shifts, "BLOCK_UNITS": form.block_units, "OFFSET": form.offset,
        "GROUP": form.group,
    }  # fmt: skip
