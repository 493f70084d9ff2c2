"""K and V of one layer on the device: as long as the context where attention is global, a ring where it is windowed."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hybrid.errors import BadRequestError
from hybrid.head.attention import Keys, attend, first_key
from hybrid.model.spec import LayerSpec
from hybrid.schedule.placement import Placement


def capacity(window: int, placement: Placement) -> int:
    """Tokens per sequence a layer has room for: n_ctx, or window + n_batch where that is less (and not `swa_full`).

    window + n_batch lets the first token of a chunk see its whole window after the chunk has been stored.
    """
    if not window or placement.swa_full:
        return placement.n_ctx
    return min(placement.n_ctx, window + placement.n_batch)


class LayerKV:
    """K and V [n_sequences, capacity, n_kv_heads, head_dim] of one layer. Position p of a sequence lies at
    p % capacity; positions `first` … `end` - 1 are held."""

    def __init__(self, spec: LayerSpec, placement: Placement, dtype: torch.dtype, device: torch.device) -> None:
        self.window, self.scale, self.softcap = spec.window, spec.attn_scale, spec.attn_softcap
        self.capacity = capacity(spec.window, placement)
        self.n_batch = placement.n_batch
        self.n_values = spec.n_embd_k + spec.n_embd_v
        shape = (placement.n_sequences, self.capacity, spec.n_kv_heads)
        self.k = torch.zeros(*shape, spec.head_dim_k, dtype=dtype, device=device)
        self.v = torch.zeros(*shape, spec.head_dim_v, dtype=dtype, device=device)
        self.first = [0] * placement.n_sequences
        self.end = [0] * placement.n_sequences

    def store(self, seq: int, p0: int, k: Tensor, v: Tensor) -> None:
        """Append k, v [n, n_kv_heads, head_dim] at p0, which must be where the sequence ends."""
        n = k.shape[0]
        if p0 != self.end[seq]:
            raise BadRequestError(f"Position {p0} does not continue sequence {seq}, which has {self.end[seq]} tokens.")
        if n > self.n_batch:
            raise BadRequestError(f"{n} tokens of one sequence at a time are more than the batch size {self.n_batch}.")
        self._write(seq, p0, k, v)
        self.end[seq] = p0 + n
        self.first[seq] = max(self.first[seq], p0 + n - self.capacity)

    def attend(self, seq: int, p0: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attention of q [n, n_heads, head_dim_k] at p0, …, the positions stored last. `sinks`: see `KVCache`."""
        keys = Keys(partial(self._read, seq), self.k.dtype, self.n_values)
        return attend(q, p0, keys, window=self.window, scale=self.scale, softcap=self.softcap, sinks=sinks)

    def can_continue(self, seq: int, n: int) -> bool:
        """Whether a token at position n would find all it sees."""
        return self.first[seq] <= first_key(n, self.window)

    def trim(self, seq: int, n: int) -> None:
        """Forget positions >= n. What the ring has overwritten before n stays lost, so `first` stays."""
        self.end[seq] = min(self.end[seq], n)
        if self.end[seq] == 0:
            self.first[seq] = 0

    def copy(self, src: int, dst: int, n: int) -> None:
        """Make the first n positions of dst those of src; the two rings have the same layout."""
        if src != dst:
            rows = slice(0, min(n, self.capacity)) if self.first[src] == 0 else slice(None)
            self.k[dst, rows] = self.k[src, rows]
            self.v[dst, rows] = self.v[src, rows]
        self.first[dst] = self.first[src]
        self.end[dst] = self.end[src]
        self.trim(dst, n)

    def held(self, seq: int) -> tuple[Tensor, Tensor]:
        """K and V [end - first, n_kv_heads, head_dim] of what is held, in order."""
        return self._read(seq, self.first[seq], self.end[seq], self.k.dtype)

    def restore(self, seq: int, first: int, k: Tensor, v: Tensor) -> None:
        """Replace the sequence by rows for positions first, first + 1, …; the oldest go if there are too many."""
        end = first + k.shape[0]
        first = max(first, end - self.capacity)
        rows = k.shape[0] - (end - first)
        self._write(seq, first, k[rows:], v[rows:])
        self.first[seq], self.end[seq] = first, end

    def _write(self, seq: int, p0: int, k: Tensor, v: Tensor) -> None:
        at, n = p0 % self.capacity, k.shape[0]
        before_wrap = min(n, self.capacity - at)
        for held, new in ((self.k[seq], k), (self.v[seq], v)):
            held[at : at + before_wrap] = new[:before_wrap]
            if before_wrap < n:
                held[: n - before_wrap] = new[before_wrap:]

    def _read(self, seq: int, lo: int, hi: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V of positions lo … hi - 1 in `dtype`: views where nothing wraps and nothing is converted."""
        at, n = lo % self.capacity, hi - lo
        k, v = self.k[seq], self.v[seq]
        if at + n <= self.capacity:
            return k[at : at + n].to(dtype), v[at : at + n].to(dtype)
        rest = at + n - self.capacity
        return torch.cat([k[at:].to(dtype), k[:rest].to(dtype)]), torch.cat([v[at:].to(dtype), v[:rest].to(dtype)])
