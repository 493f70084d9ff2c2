"""How a row of K or V is stored: as numbers of a torch type, or as q8_0 blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid.head.kv import q8_0
from hybrid.schedule.placement import KVDtype

NUMBERS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class RowFormat:
    """A KV dtype in torch: `dtype` is what tensors of stored rows have (bytes for q8_0)."""

    name: KVDtype

    @property
    def dtype(self) -> torch.dtype:
        """Of a stored tensor."""
        return NUMBERS.get(self.name, torch.uint8)

    @property
    def computed(self) -> torch.dtype:
        """What an accelerator multiplies these rows in."""
        return NUMBERS.get(self.name, torch.float16)

    def width(self, head_dim: int) -> int:
        """Stored elements of one head's row."""
        return head_dim if self.name in NUMBERS else head_dim // q8_0.BLOCK * q8_0.BLOCK_BYTES

    def encode(self, rows: Tensor) -> Tensor:
        """[..., head_dim] numbers as [..., width] of `dtype`."""
        return rows.to(self.dtype) if self.name in NUMBERS else q8_0.quantize(rows)

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers again, in `dtype`; the same tensor where nothing is to be done."""
        return stored.to(dtype) if self.name in NUMBERS else q8_0.dequantize(stored).to(dtype)
