"""Quantised matrices for kernel tests: valid ones, random bytes, and what happens to them on the way to planes."""

from __future__ import annotations

import gguf
import numpy as np
import torch

from hybrid.head.kernels.formats import FORMATS, Planes
from hybrid.model.ggml_types import GGML_TYPES
from tests.tiny import quantize

PLAIN = {0: np.float32, 1: np.float16}


def quantised(kind: int, n_rows: int, n_in: int, *, seed: int = 0, size: float = 1.0) -> torch.Tensor:
    """Random normal weights times `size` as blocks, [n_rows, row_bytes] uint8, by llama.cpp's quantiser."""
    values = np.random.default_rng(seed).standard_normal((n_rows, n_in)).astype(np.float32) * np.float32(size)
    raw = quantize(values, gguf.GGMLQuantizationType(kind))
    return torch.from_numpy(np.ascontiguousarray(raw).view(np.uint8).reshape(n_rows, -1).copy())


def any_bytes(kind: int, n_rows: int, n_in: int, seed: int) -> torch.Tensor:
    """Blocks of any bytes: scales may be NaN, infinite, zero or denormal."""
    n_bytes = n_in // GGML_TYPES[kind].block * GGML_TYPES[kind].n_bytes
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (n_rows, n_bytes), dtype=np.uint8))


def in_planes(raw: torch.Tensor, kind: int, n_in: int, device: torch.device) -> Planes:
    """The blocks in planes on the device, written in two goes."""
    planes = Planes(torch.full((raw.numel(),), 0xA5, dtype=torch.uint8, device=device), kind, (len(raw), n_in))
    half = len(raw) // 2
    planes.write(half, raw[half:].to(device))
    planes.write(0, raw[:half].to(device))
    return planes


def numbers(raw: torch.Tensor, kind: int) -> torch.Tensor:
    """`gguf.dequantize`'s float32 values, [n_rows, n_in]."""
    with np.errstate(all="ignore"):
        values = gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType(kind))
    return torch.from_numpy(np.array(values, np.float32))


def width(kind: int, n_blocks: int) -> int:
    """Weights of so many blocks; of the types without blocks, of so many groups of 32."""
    return n_blocks * max(32, FORMATS[kind].values)
