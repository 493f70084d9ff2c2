"""The protocol every KV cache strategy of the head implements. The decoder does not know which one it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hybrid.head.kv.bus import Moved
from hybrid.head.rope import Rotation


@dataclass(frozen=True)
class QKV:
    """What the tokens of a batch bring to the attention of a layer, on the device."""

    q: Tensor
    """[n_tokens, n_heads, head_dim_k] float32."""
    k: Tensor
    """[n_tokens, n_kv_heads, head_dim_k], likewise `v` with head_dim_v: float32, or rows as they are stored."""
    v: Tensor
    sinks: Tensor | None = None
    """[n_heads] float32: the score of a key that every query sees and whose value is zero."""
    rotation: Rotation | None = None
    """What q and k have yet to be turned by."""

    def of(self, rows: slice) -> QKV:
        """That of these tokens."""
        rotation = None if self.rotation is None else self.rotation.of(rows)
        return QKV(self.q[rows], self.k[rows], self.v[rows], self.sinks, rotation)


class KVCache(Protocol):
    """Keys and values of the head's layers, for `n_sequences` sequences.

    A strategy stores K and V *and* attends, because some strategies never bring K/V to the device.
    Sequences are numbered from 0; positions within a sequence are contiguous from 0.
    """

    def attend(self, layer: int, qkv: QKV, positions: Tensor, seqs: Tensor) -> Tensor:
        """Store k, v at (seqs, positions) of `layer`, then attend causally (and within the layer's window).

        positions, seqs: [n_tokens] int64 *on the host*; the tokens of one sequence come in order and continue it.
        A strategy may turn q and k while it stores k. Returns [n_tokens, n_heads, head_dim_v].
        """
        ...

    def prefetch(self, layer: int, positions: Tensor, seqs: Tensor) -> None:
        """A hint that these tokens (as in `attend`) attend in `layer` next; strategies that stream start copying."""
        ...

    def trim(self, seq: int, n: int) -> int:
        """Forget every position >= n of `seq`. Returns how many tokens remain usable: n,
        or 0 where a windowed layer no longer holds the window before n (the sequence is then empty)."""
        ...

    def copy(self, src: int, dst: int, n: int) -> None:
        """Make the first n positions of `dst` equal to those of `src`."""
        ...

    def save(self, seq: int) -> bytes:
        """The sequence's state, to be given to `load` of a cache of the same shape, whatever its strategy."""
        ...

    def load(self, seq: int, state: bytes) -> int:
        """Replace `seq` by a saved state; returns its number of tokens. Raises BadRequestError if it does not fit."""
        ...

    def close(self) -> None:
        """Give back what it holds beside torch's memory. The cache is unusable afterwards."""
        ...

    alone: bool
    """Whether nobody else computes on the CPU while it attends. Otherwise, what it computes there keeps to the head's
    own threads."""

    @property
    def nbytes(self) -> int:
        """Device bytes the cache holds, buffers for what comes from the host included."""
        ...

    @property
    def host_nbytes(self) -> int:
        """Bytes it holds in host memory."""
        ...

    @property
    def moved(self) -> Moved:
        """Bytes that have crossed between host memory and the device for it so far, as the copies counted them."""
        ...

    @property
    def notes(self) -> list[str]:
        """What the user should know, a sentence each."""
        ...


DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
