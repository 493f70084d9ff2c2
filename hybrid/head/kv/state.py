"""A sequence's K and V as bytes: a short header that describes itself, then the rows. No pickle.

Layout: magic (8 bytes), header length and CRC-32 of all that follows (two little-endian uint32), the header as JSON
(`version`, `dtype`: float32, float16, bfloat16 or q8_0, `layers`: [n_kv_heads, head_dim_k, head_dim_v, window] each,
`n_tokens`, `first`: each layer's first position held), then for each layer K and V of positions first … n_tokens - 1,
row by row.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid.errors import BadRequestError
from hybrid.head.kv.rows import RowFormat

MAGIC = b"HYBRIDKV"
VERSION = 1
PREFIX = struct.Struct("<8sII")


def pack(
    stored: RowFormat, shape: list[list[int]], n_tokens: int, first: list[int], rows: Sequence[tuple[Tensor, Tensor]]
) -> bytes:
    """The state of one sequence whose layers have `shape` and hold `rows` (K, V), each from position `first` on."""
    header = json.dumps(
        {"version": VERSION, "dtype": _name(stored), "layers": shape, "n_tokens": n_tokens, "first": first}
    ).encode()
    parts = [header]
    parts += [x.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes() for pair in rows for x in pair]
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return b"".join([PREFIX.pack(MAGIC, len(header), crc), *parts])


def unpack(
    stored: RowFormat, shape: list[list[int]], state: bytes
) -> tuple[int, list[int], list[tuple[Tensor, Tensor]]]:
    """(n_tokens, first, rows on the CPU) of a state. Raises BadRequestError unless it is whole and of this shape."""
    header, body = _open(state)
    dtype = stored.dtype
    wanted = {"version": VERSION, "dtype": _name(stored), "layers": shape}
    for key, value in wanted.items():
        if header.get(key) != value:
            raise BadRequestError(f"The saved state does not fit this cache: its {key} differs.")
    n, first = header.get("n_tokens"), header.get("first")
    if type(n) is not int or type(first) is not list or len(first) != len(shape):
        raise BadRequestError("The saved state is damaged: its header makes no sense.")
    if any(type(f) is not int or not 0 <= f <= n for f in first):
        raise BadRequestError("The saved state is damaged: its header makes no sense.")
    sizes = [
        (n - f, heads, stored.width(dim))
        for f, (heads, dim_k, dim_v, _) in zip(first, shape, strict=True)
        for dim in (dim_k, dim_v)
    ]
    if sum(math.prod(size) for size in sizes) * dtype.itemsize != len(body):
        raise BadRequestError("The saved state is damaged: its length does not match its header.")
    values = torch.empty(len(body) // dtype.itemsize, dtype=dtype)
    values.view(torch.uint8).numpy()[:] = np.frombuffer(body, np.uint8)
    flat = torch.split(values, [math.prod(size) for size in sizes])
    tensors = [x.view(size) for x, size in zip(flat, sizes, strict=True)]
    return n, first, list(zip(tensors[0::2], tensors[1::2], strict=True))


def _name(stored: RowFormat) -> str:
    return stored.name if stored.packed else str(stored.dtype).removeprefix("torch.")


def _open(state: bytes) -> tuple[dict[str, Any], memoryview]:
    """The header and the rows' bytes, once the checksum has been found right."""
    if len(state) < PREFIX.size:
        raise BadRequestError("The saved state is too short to be one.")
    magic, header_bytes, crc = PREFIX.unpack_from(state)
    if magic != MAGIC:
        raise BadRequestError("These bytes are not a saved state of this program.")
    rest = memoryview(state)[PREFIX.size :]
    if header_bytes > len(rest) or zlib.crc32(rest) != crc:
        raise BadRequestError("The saved state is damaged or truncated: its checksum does not match.")
    try:
        header = json.loads(bytes(rest[:header_bytes]))
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise BadRequestError("The saved state is damaged: its header makes no sense.")
    return header, rest[header_bytes:]
