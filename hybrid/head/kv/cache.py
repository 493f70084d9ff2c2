"""A KV cache made of layers: what all strategies have in common, and which layers each of them is made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.errors import BadRequestError
from hybrid.head.attention import first_key
from hybrid.head.device import allocating
from hybrid.head.kernels.choice import Kernels
from hybrid.head.kv.bus import Bus, Moved
from hybrid.head.kv.device import DeviceLayer
from hybrid.head.kv.host import HostSide
from hybrid.head.kv.layer import LayerKV, Stretch
from hybrid.head.kv.rows import RowFormat
from hybrid.head.kv.state import pack, unpack
from hybrid.head.kv.stream import StreamedLayer, stage
from hybrid.head.kv.tiered import TieredLayer
from hybrid.head.rope import Rotation
from hybrid.model.spec import LayerSpec
from hybrid.schedule.kv_size import kv_bytes_per_token
from hybrid.schedule.kv_tiers import tiers
from hybrid.schedule.placement import Placement

Ints = npt.NDArray[np.int64]


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
        self._next: list[LayerKV | None] = [
            next((kv for kv in self.layers[i:] if isinstance(kv, StreamedLayer)), None) for i in range(len(layers))
        ]
        """From each layer on, the next that must be fetched."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        seqs: Tensor,
        sinks: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """See `KVCache.attend`. Raises BadRequestError if tokens do not continue their sequence or do not fit."""
        return self.layers[layer].step(self.stretches(positions, seqs), q, k, v, sinks, rotation)

    def prefetch(self, layer: int, positions: Tensor, seqs: Tensor) -> None:
        """See `KVCache.prefetch`."""
        if self._next[layer] is not None:
            self.fetch(layer, self.stretches(positions, seqs))

    def fetch(self, layer: int, stretches: Sequence[Stretch]) -> None:
        """The same for these stretches."""
        if (kv := self._next[layer]) is not None:
            kv.prefetch(stretches)

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
        self._bus.settle()
        for kv in self.layers:
            kv.copy(src, dst, n)

    @torch.inference_mode()
    def save(self, seq: int) -> bytes:
        """See `KVCache.save`: K and V of what each layer holds, with the shape they have. Every strategy's is the same
        and fits every other."""
        self._check_seq(seq)
        self._bus.settle()
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
        self._bus.settle()
        for kv, first, (k, v) in zip(self.layers, firsts, rows, strict=True):
            kv.restore(seq, first, k, v)
        return n

    def settle(self) -> None:
        """Wait until all that is under way has been done."""
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
        return sum(kv.nbytes for kv in self.layers) + between

    @property
    def host_nbytes(self) -> int:
        """Bytes in host memory, likewise."""
        return sum(kv.host_nbytes for kv in self.layers) + (self._host.host_nbytes if self._host else 0)

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
        """The batch as stretches of one sequence; every layer asks for those of the same batch. Raises BadRequestError
        if they do not fit."""
        if self._batch is None or self._batch[0] is not positions or self._batch[1] is not seqs:
            self._batch = positions, seqs, self._split(positions.numpy(), seqs.numpy())
        return self._batch[2]

    def _split(self, where: Ints, seq: Ints) -> list[Stretch]:
        breaks = np.flatnonzero((np.diff(where) != 1) | (np.diff(seq) != 0)) + 1
        starts = [0, *breaks.tolist()]
        for i, end in zip(starts, [*starts[1:], len(where)], strict=True):
            self._check_seq(int(seq[i]))
            if where[i] < 0 or where[end - 1] >= self.n_ctx:
                raise BadRequestError(f"Position {where[end - 1]} does not fit into a context of {self.n_ctx} tokens.")
        there: Sequence[Tensor | None] = [None] * len(starts)
        if self._kernels is not None:
            there = (
                torch.from_numpy(np.stack([where, seq], 1)[starts].astype(np.int32))
                .to(self._bus.device, non_blocking=True)
                .unbind()
            )
        return [
            Stretch(int(seq[i]), int(where[i]), slice(i, end), at)
            for i, end, at in zip(starts, [*starts[1:], len(where)], there, strict=True)
        ]

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
