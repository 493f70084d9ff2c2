"""The `device` strategy: K and V of every layer lie on the head's device, next to its weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hybrid.errors import BadRequestError, UnsupportedError
from hybrid.head.attention import first_key
from hybrid.head.device import allocating
from hybrid.head.kv.base import DTYPES
from hybrid.head.kv.ring import LayerKV, capacity
from hybrid.head.kv.state import pack, unpack
from hybrid.model.spec import LayerSpec
from hybrid.schedule.placement import Placement


class DeviceKVCache:
    """One `LayerKV` a layer, all of it allocated at the start; nothing grows later.

    A stretch of one sequence in a batch is at most n_batch tokens: the rings of windowed layers count on it.
    """

    def __init__(self, layers: Sequence[LayerSpec], placement: Placement, device: torch.device) -> None:
        """Raises UnsupportedError for a dtype this strategy has not, OutOfMemoryError if it does not fit."""
        if placement.kv_dtype not in DTYPES:
            raise UnsupportedError(
                f"The KV cache on the device cannot be {placement.kv_dtype} yet; choose one of {', '.join(DTYPES)}."
            )
        self.n_ctx, self.n_sequences = placement.n_ctx, placement.n_sequences
        self.dtype = DTYPES[placement.kv_dtype]
        with allocating("The KV cache", kv_bytes(layers, placement), device):
            self._layers = [LayerKV(spec, placement, self.dtype, device) for spec in layers]

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        seqs: Tensor,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `KVCache.attend`. Raises BadRequestError if tokens do not continue their sequence or do not fit."""
        kv, out = self._layers[layer], []
        for seq, p0, rows in self._runs(positions, seqs):
            kv.store(seq, p0, k[rows], v[rows])
            out.append(kv.attend(seq, p0, q[rows], sinks))
        return out[0] if len(out) == 1 else torch.cat(out)

    def prefetch(self, layer: int) -> None:
        """Nothing to fetch: it is there."""

    def trim(self, seq: int, n: int) -> int:
        """See `KVCache.trim`."""
        self._check_seq(seq)
        if n < 0 or not all(kv.can_continue(seq, n) for kv in self._layers):
            n = 0
        for kv in self._layers:
            kv.trim(seq, n)
        return self.length(seq)

    def length(self, seq: int) -> int:
        """Tokens of `seq` that every layer has stored."""
        return self._layers[-1].end[seq]

    @torch.inference_mode()
    def copy(self, src: int, dst: int, n: int) -> None:
        """See `KVCache.copy`. Raises BadRequestError if `src` no longer holds what the next token of `dst` will see."""
        self._check_seq(src)
        self._check_seq(dst)
        if not 0 <= n <= self.length(src) or not all(kv.can_continue(src, n) for kv in self._layers):
            raise BadRequestError(
                f"Sequence {src} holds {self.length(src)} tokens; {n} cannot be copied to sequence {dst}."
            )
        for kv in self._layers:
            kv.copy(src, dst, n)

    @torch.inference_mode()
    def save(self, seq: int) -> bytes:
        """See `KVCache.save`: K and V of what each layer holds, with the shape they have."""
        self._check_seq(seq)
        n = self.length(seq)
        return pack(self._shape(), n, [kv.first[seq] for kv in self._layers], [kv.held(seq) for kv in self._layers])

    @torch.inference_mode()
    def load(self, seq: int, state: bytes) -> int:
        """See `KVCache.load`; the state may come from a cache of another n_ctx, n_batch or device."""
        self._check_seq(seq)
        n, firsts, rows = unpack(self._shape(), self.dtype, state)
        if n > self.n_ctx:
            raise BadRequestError(f"The saved state holds {n} tokens and the context has room for {self.n_ctx}.")
        if any(first > first_key(n, kv.window) for kv, first in zip(self._layers, firsts, strict=True)):
            raise BadRequestError("The saved state does not hold the whole window of every layer.")
        for kv, first, (k, v) in zip(self._layers, firsts, rows, strict=True):
            kv.restore(seq, first, k, v)
        return n

    @property
    def nbytes(self) -> int:
        """Device bytes of all K and V tensors."""
        return sum(kv.k.nbytes + kv.v.nbytes for kv in self._layers)

    def _shape(self) -> list[list[int]]:
        return [[kv.k.shape[2], kv.k.shape[3], kv.v.shape[3], kv.window] for kv in self._layers]

    def _runs(self, positions: Tensor, seqs: Tensor) -> list[tuple[int, int, slice]]:
        """The batch as (sequence, first position, rows of the batch), one for each stretch of one sequence."""
        where, seq = positions.numpy(), seqs.numpy()
        breaks = np.flatnonzero((np.diff(where) != 1) | (np.diff(seq) != 0)) + 1
        starts = [0, *breaks.tolist()]
        runs = [
            (int(seq[i]), int(where[i]), slice(i, end))
            for i, end in zip(starts, [*starts[1:], len(where)], strict=True)
        ]
        for number, p0, rows in runs:
            self._check_seq(number)
            last = p0 + rows.stop - rows.start - 1
            if p0 < 0 or last >= self.n_ctx:
                raise BadRequestError(f"Position {last} does not fit into a context of {self.n_ctx} tokens.")
        return runs

    def _check_seq(self, seq: int) -> None:
        if not 0 <= seq < self.n_sequences:
            raise BadRequestError(f"There is no sequence {seq}: this cache has {self.n_sequences}.")


def kv_bytes(layers: Sequence[LayerSpec], placement: Placement) -> int:
    """Device bytes a `DeviceKVCache` of these layers will hold."""
    values = sum(capacity(spec.window, placement) * (spec.n_embd_k + spec.n_embd_v) for spec in layers)
    return placement.n_sequences * values * DTYPES[placement.kv_dtype].itemsize
