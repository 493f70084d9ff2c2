"""One layer of a KV cache: which positions of each sequence it holds. Where the rows lie is its strategy's affair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid.errors import BadRequestError
from hybrid.head.attention import first_key
from hybrid.head.kernels.choice import Kernels
from hybrid.head.kv.base import QKV
from hybrid.head.kv.ring import Empty, Ring, Rows, capacity
from hybrid.head.kv.rows import RowFormat
from hybrid.model.spec import LayerSpec
from hybrid.schedule.placement import Placement


class UnrecordableError(Exception):
    """What computes has to know where the tokens are, so that it cannot be replayed elsewhere."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens of one sequence within a batch."""

    seq: int
    p0: int
    """Position of the first."""
    rows: slice
    """Where they are in the batch."""
    where: Tensor | None = None
    """[2] int32 on the device, where it has kernels: p0 and seq."""
    recorded: bool = False
    """What is launched for it will be replayed for others: `where` alone says where they are, and p0 is the last that
    can be."""

    @property
    def end(self) -> int:
        """The position after the last."""
        n: int = self.rows.stop - self.rows.start
        return self.p0 + n


def locations(stretches: Sequence[Stretch]) -> Tensor:
    """What `Stretch.where` is made of: [n, 2] int32, on the host."""
    return torch.tensor([[stretch.p0, stretch.seq] for stretch in stretches], dtype=torch.int32)


class LayerKV:
    """Bookkeeping of one layer: positions `first` … `end` - 1 of each sequence are held. Strategies derive from it."""

    def __init__(self, spec: LayerSpec, placement: Placement) -> None:
        self.spec = spec
        self.window = spec.window
        self.capacity = capacity(spec.window, placement)
        self.format = RowFormat(placement.kv_dtype)
        self.kernels: Kernels | None = None
        """Of the device, where it has any."""
        self.n_batch = placement.n_batch
        self.first = [0] * placement.n_sequences
        self.end = [0] * placement.n_sequences

    # -- what a strategy does ------------------------------------------------------------------------------------

    def step(self, stretches: Sequence[Stretch], qkv: QKV) -> Tensor:
        """Store the k and v of a batch and attend: `KVCache.attend` for one layer. `stretches` cover the batch."""
        raise NotImplementedError

    def prefetch(self, stretches: Sequence[Stretch]) -> None:
        """These tokens attend here next; most strategies have everything where it is needed."""

    def prepare(self, qkv: QKV) -> QKV:
        """The part of `step` that does not depend on where the tokens are, but through their rotation."""
        return qkv

    def follow(self, stretches: Sequence[Stretch], qkv: QKV) -> Tensor:
        """The part of `step` behind `prepare`."""
        raise NotImplementedError

    def held(self, seq: int) -> Rows:
        """Stored rows of positions first … end - 1, in order."""
        raise NotImplementedError

    def put(self, seq: int, first: int, k: Tensor, v: Tensor) -> None:
        """Write stored rows for positions first, first + 1, … into an empty sequence."""
        raise NotImplementedError

    def copy_rows(self, src: int, dst: int, n: int) -> None:
        """Make the rows that are held of the first n positions of dst those of src, which is another sequence."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """On the device."""
        raise NotImplementedError

    @property
    def host_nbytes(self) -> int:
        """In host memory."""
        return 0

    # -- bookkeeping ---------------------------------------------------------------------------------------------

    def enter(self, stretches: Sequence[Stretch]) -> None:
        """Note that a batch has come. Raises BadRequestError if it does not continue its sequences."""
        for stretch in stretches:
            self.append(stretch)

    def append(self, stretch: Stretch) -> None:
        """Note that the stretch has come. Raises BadRequestError if it does not continue its sequence."""
        seq, p0, n = stretch.seq, stretch.p0, stretch.end - stretch.p0
        if p0 != self.end[seq]:
            raise BadRequestError(f"Position {p0} does not continue sequence {seq}, which has {self.end[seq]} tokens.")
        if n > self.n_batch:
            raise BadRequestError(f"{n} tokens of one sequence at a time are more than the batch size {self.n_batch}.")
        self.end[seq] = stretch.end
        self.first[seq] = max(self.first[seq], stretch.end - self.capacity)

    def can_continue(self, seq: int, n: int) -> bool:
        """Whether a token at position n would find all it sees."""
        return self.first[seq] <= first_key(n, self.window)

    def trim(self, seq: int, n: int) -> None:
        """Forget positions >= n. What a ring has overwritten before n stays lost, so `first` stays."""
        self.end[seq] = min(self.end[seq], n)
        if self.end[seq] == 0:
            self.first[seq] = 0

    def copy(self, src: int, dst: int, n: int) -> None:
        """Make the first n positions of dst those of src."""
        if src != dst:
            self.copy_rows(src, dst, n)
        self.first[dst], self.end[dst] = self.first[src], self.end[src]
        self.trim(dst, n)

    def restore(self, seq: int, first: int, k: Tensor, v: Tensor) -> None:
        """Replace the sequence by stored rows for positions first, first + 1, …, less the oldest that have no room."""
        end = first + k.shape[0]
        first = max(first, end - self.capacity)
        rows = k.shape[0] - (end - first)
        self.trim(seq, 0)
        self.put(seq, first, k[rows:], v[rows:])
        self.first[seq], self.end[seq] = first, end


class RingLayer(LayerKV):
    """A layer all of whose rows lie in one ring, wherever that is."""

    def __init__(self, spec: LayerSpec, placement: Placement, empty: Empty) -> None:
        super().__init__(spec, placement)
        self.ring = Ring(spec, self.format, placement.n_sequences, self.capacity, empty)

    def held(self, seq: int) -> Rows:
        """See `LayerKV.held`."""
        return self.ring.stored(seq, self.first[seq], self.end[seq])

    def put(self, seq: int, first: int, k: Tensor, v: Tensor) -> None:
        """See `LayerKV.put`."""
        self.ring.write(seq, first, k, v)

    def copy_rows(self, src: int, dst: int, n: int) -> None:
        """See `LayerKV.copy_rows`."""
        self.ring.copy(src, dst, self.first[src], max(self.first[src], n))
