"""K and V of one layer in one memory: as long as the context where attention is global, a ring where it is windowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hybrid.head.kv.rows import RowFormat
from hybrid.model.spec import LayerSpec
from hybrid.schedule.placement import Placement

Rows = tuple[Tensor, Tensor]
"""K and V of consecutive positions of one sequence, [n, n_kv_heads, …]."""
Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Makes a tensor of a shape and dtype."""


def capacity(window: int, placement: Placement) -> int:
    """Tokens per sequence a layer has room for: n_ctx, or window + n_batch where that is less (and not `swa_full`).

    window + n_batch lets the first token of a chunk see its whole window after the chunk has been stored.
    """
    if not window or placement.swa_full:
        return placement.n_ctx
    return min(placement.n_ctx, window + placement.n_batch)


class Ring:
    """Stored rows [n_sequences, capacity, n_kv_heads, width] of K and of V. Position p of a sequence lies at
    p % capacity. It knows where rows are, not which of them mean something."""

    def __init__(self, spec: LayerSpec, rows: RowFormat, n_sequences: int, capacity: int, empty: Empty) -> None:
        self.format, self.capacity = rows, capacity
        shape = (n_sequences, capacity, spec.n_kv_heads)
        self.k = empty((*shape, rows.width(spec.head_dim_k)), rows.dtype)
        self.v = empty((*shape, rows.width(spec.head_dim_v)), rows.dtype)

    def slices(self, lo: int, hi: int) -> Iterator[tuple[slice, slice]]:
        """Where positions lo … hi - 1 lie, in order: (rows of the ring, rows counted from lo), one or two of them."""
        done = 0
        while done < hi - lo:
            at = (lo + done) % self.capacity
            n = min(hi - lo - done, self.capacity - at)
            yield slice(at, at + n), slice(done, done + n)
            done += n

    def write(self, seq: int, p0: int, k: Tensor, v: Tensor) -> None:
        """Store rows that are in this ring's format already, at p0, p0 + 1, …; no more of them than fit."""
        for at, rows in self.slices(p0, p0 + k.shape[0]):
            self.k[seq, at] = k[rows]
            self.v[seq, at] = v[rows]

    def stored(self, seq: int, lo: int, hi: int) -> Rows:
        """Positions lo … hi - 1 as they are stored: views where nothing wraps."""
        parts = [(self.k[seq, at], self.v[seq, at]) for at, _ in self.slices(lo, hi)]
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return self.k[seq, :0], self.v[seq, :0]
        return torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])

    def read(self, seq: int, lo: int, hi: int, dtype: torch.dtype) -> Rows:
        """Positions lo … hi - 1 as numbers in `dtype`: views where nothing wraps and nothing is converted."""
        decode = self.format.decode
        parts = [(decode(self.k[seq, at], dtype), decode(self.v[seq, at], dtype)) for at, _ in self.slices(lo, hi)]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])

    def copy(self, src: int, dst: int, lo: int, hi: int) -> None:
        """Make positions lo … hi - 1 of sequence dst those of src."""
        for at, _ in self.slices(lo, hi):
            self.k[dst, at] = self.k[src, at]
            self.v[dst, at] = self.v[src, at]

    @property
    def nbytes(self) -> int:
        """Of K and V together."""
        return self.k.nbytes + self.v.nbytes


def carved(buffer: Tensor) -> Empty:
    """Makes tensors of consecutive bytes of `buffer` (uint8)."""
    used = 0

    def carve(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nonlocal used
        n_bytes = dtype.itemsize * torch.Size(shape).numel()
        part = buffer[used : used + n_bytes].view(dtype).view(shape)
        used += n_bytes
        return part

    return carve
