"""A KV cache made of layers: what all strategies have in common, and which layers each of them is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.errors import BadRequestError
from hybrid.head.attention import first_key
from hybrid.head.device import allocating
from hybrid.head.kernels.choice import Kernels
from hybrid.head.kv.base import QKV
from hybrid.head.kv.bus import Bus, Moved
from hybrid.head.kv.device import DeviceLayer
from hybrid.head.kv.host import HostSide
from hybrid.head.kv.layer import LayerKV, Stretch, locations
from hybrid.head.kv.rows import RowFormat
from hybrid.head.kv.state import pack, unpack
from hybrid.head.kv.stream import Mail, StreamedLayer, stage
from hybrid.head.kv.tiered import TieredLayer
from hybrid.model.spec import LayerSpec
from hybrid.schedule.kv_size import kv_bytes_per_token
from hybrid.schedule.kv_tiers import bucket_tokens, tiers
from hybrid.schedule.placement import Placement

Ints = npt.NDArray[np.int64]


class Recorded(NamedTuple):
    """What the part of one stretch in a step is recorded for."""

    n: int
    """Tokens."""
    seq: int
    """The sequence, where copies depend on it; otherwise whichever."""
    last: int
    """The last position at which the first token may be."""
    near: bool = False
    """Whether what `tiered` keeps of it in host memory is not seen, in any layer."""


class LayeredKVCache:
    """`KVCache` over one `LayerKV` a layer, all of it allocated at the start.

    One sequence's tokens in a batch are at most n_batch: the rings of windowed layers count on it.
    """

    def __init__(self, layers: Sequence[LayerSpec], placement: Placement, bus: Bus, kernels: Kernels | None) -> None:
        """Raises OutOfMemoryError if it does not fit, on either side."""
        self.n_ctx, self.n_sequences = placement.n_ctx, placement.n_sequences
        self._bus, self._kernels = bus, kernels
        self._batch: tuple[Tensor, Tensor, list[Stretch]] | None = None
        self._format = RowFormat(placement.kv_dtype)
        found = tiers(layers, placement)
        far = [(spec, tier.host) for spec, tier in zip(layers, found, strict=True) if tier.host]
        self._host = HostSide(far, placement, bus) if far and placement.kv != "stream" else None
        self.layers: list[LayerKV] = []
        for spec, tier in zip(layers, found, strict=True):
            if not tier.host:
                self.layers.append(DeviceLayer(spec, placement, bus.device))
            elif self._host is None:
                self.layers.append(StreamedLayer(spec, placement, bus))
            else:
                self.layers.append(TieredLayer(spec, placement, tier, self._host))
        for kv in self.layers:
            kv.kernels = kernels
        streamed = [kv for kv in self.layers if isinstance(kv, StreamedLayer)]
        self._slots = stage(streamed, bus.device)
        self._mail = Mail(streamed, bus) if streamed and kernels is not None else None
        """Where steps may be recorded."""
        self._next: list[LayerKV | None] = [
            next((kv for kv in self.layers[i:] if isinstance(kv, StreamedLayer)), None) for i in range(len(layers))
        ]
        """From each layer on, the next that must be fetched."""

    def attend(self, layer: int, qkv: QKV, positions: Tensor, seqs: Tensor) -> Tensor:
        """See `KVCache.attend`. Raises BadRequestError if tokens do not continue their sequence or do not fit."""
        stretches = self.stretches(positions, seqs)
        if self._kernels is not None:
            stretches = self._located(stretches)
        return self.layers[layer].step(stretches, qkv)

    def prefetch(self, layer: int, positions: Tensor, seqs: Tensor) -> None:
        """See `KVCache.prefetch`."""
        if self._next[layer] is not None:
            self.fetch(layer, self.stretches(positions, seqs))

    def fetch(self, layer: int, stretches: Sequence[Stretch]) -> None:
        """The same for these stretches."""
        if (kv := self._next[layer]) is not None:
            kv.prefetch(stretches)

    # -- recorded steps ------------------------------------------------------------------------------------------

    def recorded_for(self, stretches: Sequence[Stretch]) -> tuple[Recorded, ...]:
        """What a step of these is to be recorded for: one that has been recorded for the same serves them too."""
        far = [kv for kv in self.layers if isinstance(kv, TieredLayer)]
        near = bool(far) and all(kv.is_near(stretch) for kv in far for stretch in stretches)
        found = []
        for stretch in stretches:
            n = stretch.end - stretch.p0
            if self._mail is None:
                found.append(Recorded(n, 0, self.n_ctx - n, near))
            else:
                found.append(Recorded(n, stretch.seq, min(bucket_tokens(stretch.p0), self.n_ctx - n)))
        return tuple(found)

    def enter(self, stretches: Sequence[Stretch]) -> None:
        """A step begins that is recorded, or will be replayed, and every layer hears of it. Raises BadRequestError if
        these tokens do not continue their sequences."""
        for kv in self.layers:
            kv.enter(stretches)
        if self._slots:
            self._bus.compute.wait(self._bus.side.mark())

    def begin(self) -> None:
        """What is recorded first: the lanes part."""
        for slot in self._slots:
            slot.begin()
        if self._slots:
            self._bus.side.wait(self._bus.compute.mark())

    def end(self, n_tokens: int) -> None:
        """What is recorded last: they have met again, and the new rows go to the host."""
        if self._mail is not None:
            self._bus.compute.wait(self._bus.side.mark())
            self._mail.send(n_tokens)

    def leave(self, stretches: Sequence[Stretch]) -> None:
        """The step is over, as far as the host is concerned. Marks that were recorded mean nothing outside."""
        for slot in self._slots:
            slot.begin()
            slot.free = self._bus.compute.mark()
        if self._mail is not None:
            self._mail.sent(stretches)

    def trim(self, seq: int, n: int) -> int:
        """See `KVCache.trim`."""
        self._check_seq(seq)
        if n < 0 or not all(kv.can_continue(seq, n) for kv in self.layers):
            n = 0
        for kv in self.layers:
            kv.trim(seq, n)
        return self.length(seq)

    def length(self, seq: int) -> int:
        """Tokens of `seq` that every layer has stored."""
        return self.layers[-1].end[seq]

    @torch.inference_mode()
    def copy(self, src: int, dst: int, n: int) -> None:
        """See `KVCache.copy`. Raises BadRequestError if `src` no longer holds what the next token of `dst` will see."""
        self._check_seq(src)
        self._check_seq(dst)
        if not 0 <= n <= self.length(src) or not all(kv.can_continue(src, n) for kv in self.layers):
            raise BadRequestError(
                f"Sequence {src} holds {self.length(src)} tokens; {n} cannot be copied to sequence {dst}."
            )
        self.settle()
        for kv in self.layers:
            kv.copy(src, dst, n)

    @torch.inference_mode()
    def save(self, seq: int) -> bytes:
        """See `KVCache.save`: K and V of what each layer holds, with the shape they have. Every strategy's is the same
        and fits every other."""
        self._check_seq(seq)
        self.settle()
        n = self.length(seq)
        firsts = [kv.first[seq] for kv in self.layers]
        return pack(self._format, self._shape(), n, firsts, [kv.held(seq) for kv in self.layers])

    @torch.inference_mode()
    def load(self, seq: int, state: bytes) -> int:
        """See `KVCache.load`; the state may come from another strategy, n_ctx, n_batch or device."""
        self._check_seq(seq)
        n, firsts, rows = unpack(self._format, self._shape(), state)
        if n > self.n_ctx:
            raise BadRequestError(f"The saved state holds {n} tokens and the context has room for {self.n_ctx}.")
        if any(first > first_key(n, kv.window) for kv, first in zip(self.layers, firsts, strict=True)):
            raise BadRequestError("The saved state does not hold the whole window of every layer.")
        self.settle()
        for kv, first, (k, v) in zip(self.layers, firsts, rows, strict=True):
            kv.restore(seq, first, k, v)
        return n

    def settle(self) -> None:
        """Wait until all that is under way has been done."""
        if self._mail is not None:
            self._mail.deliver()
        self._bus.settle()

    def close(self) -> None:
        """Give back what torch does not free by itself (pinned pages, a thread). The cache is unusable afterwards."""
        if self._host is not None:
            self._host.close()
        self._bus.close()

    @property
    def alone(self) -> bool:
        """See `KVCache.alone`."""
        return self._host is None or self._host.alone

    @alone.setter
    def alone(self, alone: bool) -> None:
        if self._host is not None:
            self._host.alone = alone

    @property
    def nbytes(self) -> int:
        """Device bytes of all K and V and of the buffers between the sides."""
        between = sum(slot.buffer.nbytes for slot in self._slots) + (self._host.nbytes if self._host else 0)
        return sum(kv.nbytes for kv in self.layers) + between + (self._mail.nbytes if self._mail else 0)

    @property
    def host_nbytes(self) -> int:
        """Bytes in host memory, likewise."""
        between = (self._host.host_nbytes if self._host else 0) + (self._mail.nbytes if self._mail else 0)
        return sum(kv.host_nbytes for kv in self.layers) + between

    @property
    def moved(self) -> Moved:
        """Bytes that have crossed the bus so far, each way."""
        return self._bus.moved

    @property
    def notes(self) -> list[str]:
        """What the user should know, a sentence each."""
        return self._bus.notes

    def _shape(self) -> list[list[int]]:
        return [[kv.spec.n_kv_heads, kv.spec.head_dim_k, kv.spec.head_dim_v, kv.window] for kv in self.layers]

    def stretches(self, positions: Tensor, seqs: Tensor) -> list[Stretch]:
        """The batch as stretches of one sequence; every layer asks for those of the same batch. What the last one left
        under way is in its place then. Raises BadRequestError if they do not fit."""
        if self._batch is None or self._batch[0] is not positions or self._batch[1] is not seqs:
            if self._mail is not None:
                self._mail.deliver()
            self._batch = positions, seqs, self._split(positions.numpy(), seqs.numpy())
        return self._batch[2]

    def _located(self, stretches: list[Stretch]) -> list[Stretch]:
        """The batch's stretches, for kernels: the device, too, knows where the tokens are."""
        if stretches[0].where is None:
            where = locations(stretches).to(self._bus.device, non_blocking=True)
            stretches[:] = [replace(stretch, where=at) for stretch, at in zip(stretches, where, strict=True)]
        return stretches

    def _split(self, where: Ints, seq: Ints) -> list[Stretch]:
        breaks = np.flatnonzero((np.diff(where) != 1) | (np.diff(seq) != 0)) + 1
        starts = [0, *breaks.tolist()]
        for i, end in zip(starts, [*starts[1:], len(where)], strict=True):
            self._check_seq(int(seq[i]))
            if where[i] < 0 or where[end - 1] >= self.n_ctx:
                raise BadRequestError(f"Position {where[end - 1]} does not fit into a context of {self.n_ctx} tokens.")
        ends = [*starts[1:], len(where)]
        return [Stretch(int(seq[i]), int(where[i]), slice(i, end)) for i, end in zip(starts, ends, strict=True)]

    def _check_seq(self, seq: int) -> None:
        if not 0 <= seq < self.n_sequences:
            raise BadRequestError(f"There is no sequence {seq}: this cache has {self.n_sequences}.")


def open_cache(
    layers: Sequence[LayerSpec],
    placement: Placement,
    device: torch.device,
    bus: Bus | None = None,
    kernels: Kernels | None = None,
) -> LayeredKVCache:
    """The cache of these layers that `placement` asks for; with `kernels`, what can attends through them. Raises
    OutOfMemoryError if it does not fit."""
    bus = bus or Bus(device)
    n_tokens = [tier.device for tier in tiers(layers, placement)]
    row_bytes = [placement.n_sequences * kv_bytes_per_token(layer, placement.kv_dtype) for layer in layers]
    n_bytes = sum(n * size for n, size in zip(n_tokens, row_bytes, strict=True))
    try:
        with allocating("The KV cache", n_bytes, device):
            return LayeredKVCache(layers, placement, bus, kernels)
    except BaseException:
        bus.close()
        raise
