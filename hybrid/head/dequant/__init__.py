"""Dequantisation of raw GGUF bytes in plain torch, on any torch device.

`dequantize` equals `gguf.dequantize` bit for bit in float32: every formula keeps ggml's order of operations.
The block layouts are those of `ggml/src/ggml-common.h`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybrid.errors import UnsupportedError
from hybrid.head.dequant import blocks32, iquants, kquants
from hybrid.model.ggml_types import GGML_TYPES, type_name

PLAIN: dict[int, torch.dtype] = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Types whose bytes are already numbers: F32, F16, BF16."""

BLOCKS: dict[int, Callable[[Tensor], Tensor]] = {
    2: blocks32.q4_0,
    3: blocks32.q4_1,
    6: blocks32.q5_0,
    7: blocks32.q5_1,
    8: blocks32.q8_0,
    10: kquants.q2_k,
    11: kquants.q3_k,
    12: kquants.q4_k,
    13: kquants.q5_k,
    14: kquants.q6_k,
    20: iquants.iq4_nl,
    23: iquants.iq4_xs,
    39: iquants.mxfp4,
}
"""Quantised types: [n_blocks, block_bytes] uint8 to [n_blocks, block_values] float32."""

SUPPORTED = frozenset(PLAIN) | frozenset(BLOCKS)
"""`GGMLQuantizationType` values that `dequantize` knows; `dequantize_on_host` takes the others."""


def dequantize(raw: Tensor, kind: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Weights of `raw` [rows, row_bytes] uint8 (contiguous), a tensor of type `kind`, as [rows, n] in `dtype`.

    Computed in float32 and rounded once to `dtype`. Runs where `raw` is. Raises UnsupportedError for other types.
    """
    if kind in PLAIN:
        return raw.view(PLAIN[kind]).to(dtype)
    if kind not in BLOCKS:
        raise UnsupportedError(f"Weights of type {type_name(kind)} have no dequantisation on the device.")
    blocks = raw.view(-1, GGML_TYPES[kind].n_bytes)
    return BLOCKS[kind](blocks).view(raw.shape[0], -1).to(dtype)


def dequantize_on_host(raw: Tensor, kind: int) -> Tensor:
    """The same for every other type that `gguf` can decode: float32 on the CPU, through numpy.

    Raises UnsupportedError for the types `gguf` cannot decode either.
    """
    import gguf

    try:
        values = gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType(kind))
    except NotImplementedError as error:
        raise UnsupportedError(f"Weights of type {type_name(kind)} cannot be read by the GPU half.") from error
    return torch.from_numpy(values)
