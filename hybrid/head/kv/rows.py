"""How a row of K or V is stored: as numbers of a torch type, or as q8_0 blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid.head.kv import q8_0
from hybrid.head.kv.cpu_attention import HOST_DTYPES, decode, encode
from hybrid.schedule.placement import KVDtype


@dataclass(frozen=True)
class RowFormat:
    """A KV dtype in torch, the same on both sides of the bus."""

    name: KVDtype

    @property
    def packed(self) -> bool:
        """Whether rows are quantised blocks."""
        return self.name == "q8_0"

    @property
    def dtype(self) -> torch.dtype:
        """Of a tensor of stored rows: bytes for q8_0."""
        return HOST_DTYPES[self.name]

    @property
    def computed(self) -> torch.dtype:
        """What an accelerator multiplies these rows in."""
        return torch.float16 if self.packed else self.dtype

    def width(self, head_dim: int) -> int:
        """Stored elements of one head's row."""
        return q8_0.row_bytes(head_dim) if self.packed else head_dim

    def encode(self, rows: Tensor) -> Tensor:
        """[..., head_dim] numbers as [..., width] of `dtype`."""
        return encode(rows, self.name)

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers again, in `dtype`; the same tensor where nothing is to be done."""
        return decode(stored, dtype)
