"""How each GGUF type lies on a device whose kernels read it: the one table of block formats.

A GGUF block is a few fields one after another (`ggml/src/ggml-common.h`); 18 or 210 bytes long, it starts at odd
addresses, which a GPU reads a byte at a time. On the device a matrix is therefore kept *in planes*: the first field of
all blocks, then the second of all blocks, and so on, the fields that are read 16 bytes at a time in front. No byte is
changed and none is added, so `planes` and `blocks` are each other's inverse.

This module needs no Triton; `hybrid.head.kernels.decode` has the functions that turn a format's fields into numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

LANES = 16
"""Bytes of the main field that a thread reads at a time: a *unit*. Each of a unit's shifts gives as many values."""


FEW_TOKENS = 8
"""Rows of x that are multiplied straight from the blocks, at most. With more of them, tensor cores and a dequantised
tile are quicker."""


@dataclass(frozen=True)
class Field:
    """Bytes start … start + size - 1 of a block."""

    start: int
    size: int


@dataclass(frozen=True)
class BlockFormat:
    """One GGUF type. `fields` are in the order of their planes; the first holds the quantised values."""

    name: str
    """Of the type, in lower case: the functions in `decode` are called after it."""
    values: int
    """Weights of a block."""
    fields: tuple[Field, ...]
    shifts: int
    """Groups of `LANES` values that a unit of the first field holds."""
    group: int = 1
    """Consecutive units whose values are interleaved: the first shift's of all of them, then the second's, …"""
    offset: bool = False
    """Whether a weight is scale * q + offset instead of scale * q."""

    @property
    def n_bytes(self) -> int:
        """Of a block."""
        return sum(field.size for field in self.fields)

    @property
    def unit_values(self) -> int:
        """Weights that one unit decodes to."""
        return LANES * self.shifts

    @property
    def block_units(self) -> int:
        """Units of a block."""
        return self.values // self.unit_values


def _format(name: str, values: int, shifts: int, sizes: str, group: int = 1, offset: bool = False) -> BlockFormat:
    """`sizes`: the fields in the file's order as `letter:bytes`; planes follow the letters' order."""
    parts = [(part[0], int(part[2:])) for part in sizes.split()]
    starts = [0, *accumulate(size for _, size in parts)]
    found = sorted((letter, Field(start, size)) for (letter, size), start in zip(parts, starts, strict=False))
    return BlockFormat(name, values, tuple(field for _, field in found), shifts, group, offset)


FORMATS: dict[int, BlockFormat] = {
    0: _format("f32", 16, 1, "a:64"),
    1: _format("f16", 16, 1, "a:32"),
    2: _format("q4_0", 32, 2, "b:2 a:16"),
    3: _format("q4_1", 32, 2, "b:4 a:16", offset=True),
    6: _format("q5_0", 32, 2, "c:2 b:4 a:16"),
    7: _format("q5_1", 32, 2, "c:4 b:4 a:16", offset=True),
    8: _format("q8_0", 32, 1, "b:2 a:32"),
    10: _format("q2_k", 256, 4, "b:16 a:64 c:4", group=2, offset=True),
    11: _format("q3_k", 256, 4, "b:32 a:64 c:12 d:2", group=2),
    12: _format("q4_k", 256, 2, "c:4 b:12 a:128", group=2, offset=True),
    13: _format("q5_k", 256, 2, "d:4 c:12 b:32 a:128", group=2, offset=True),
    14: _format("q6_k", 256, 2, "a:128 b:64 c:16 d:2", group=4),
    20: _format("iq4_nl", 32, 2, "b:2 a:16"),
    23: _format("iq4_xs", 256, 2, "d:2 c:2 b:4 a:128"),
    30: _format("bf16", 16, 1, "a:32"),
    39: _format("mxfp4", 32, 2, "b:1 a:16"),
}
"""By `GGMLQuantizationType`. The plain types count as blocks of `LANES` values, a unit each."""


def fits(kind: int, n_in: int) -> bool:
    """Whether rows of n_in weights of this type are whole blocks of a format here."""
    return kind in FORMATS and n_in % FORMATS[kind].values == 0


class Planes:
    """A matrix of n_rows rows of one type, in planes, in `data` uint8: all of what lies there, or some rows of it."""

    def __init__(self, data: Tensor, kind: int, shape: tuple[int, int], within: tuple[int, int] | None = None) -> None:
        """`shape` is (n_rows, n_in). `within`: these are the rows from within[0] on of a matrix of within[1] rows,
        whose planes are in `data`."""
        self.data, self.kind = data, kind
        self.n_rows, self.n_in = shape
        self.first, self.n_held = within or (0, self.n_rows)
        self.format = FORMATS[kind]
        self.n_blocks = self.n_in // self.format.values
        """Of a row."""

    @property
    def nbytes(self) -> int:
        """As many as in the file."""
        return self.n_rows * self.n_blocks * self.format.n_bytes

    def part(self, first: int, n: int) -> Planes:
        """Rows first … first + n - 1, where they are."""
        return Planes(self.data, self.kind, (n, self.n_in), (self.first + first, self.n_held))

    def write(self, row: int, raw: Tensor) -> None:
        """Lay the rows `raw` [n, row_bytes], blocks as in the file, from `row` on."""
        blocks, row = raw.view(raw.shape[0], self.n_blocks, self.format.n_bytes), self.first + row
        for field, plane in self._planes():
            plane[row : row + raw.shape[0]].copy_(blocks[..., field.start : field.start + field.size])

    def rows(self, first: int, last: int) -> Tensor:
        """Rows first … last - 1 as blocks again, [n, row_bytes]."""
        first, last = self.first + first, self.first + min(last, self.n_rows)
        shape = (last - first, self.n_blocks, self.format.n_bytes)
        blocks = torch.empty(shape, dtype=torch.uint8, device=self.data.device)
        for field, plane in self._planes():
            blocks[..., field.start : field.start + field.size] = plane[first:last]
        return blocks.view(last - first, -1)

    def _planes(self) -> Iterator[tuple[Field, Tensor]]:
        """Each field with its plane [n_held, n_blocks, size]."""
        at = 0
        for field in self.format.fields:
            n_bytes = self.n_held * self.n_blocks * field.size
            yield field, self.data[at : at + n_bytes].view(self.n_held, self.n_blocks, field.size)
            at += n_bytes


@dataclass(frozen=True)
class Stack:
    """Matrices of one type and shape that follow each other in memory, an expert each."""

    first: Planes
    bias: Tensor | None
    """[n_experts, n_rows] float32."""
