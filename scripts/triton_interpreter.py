"""What Triton's interpreter lacks for the kernels here: it keeps bfloat16 numbers as 16-bit integers, multiplies these
in products of tiles, and cuts float32 off where a GPU rounds to the nearest."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def mend_bfloat16() -> None:
    """Let it round to the nearest, and multiply bfloat16 tiles: products are exact in float32, in which a GPU adds them
    up too."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    builder: Any = InterpreterBuilder
    if hasattr(builder, "rounds_to_nearest"):
        return
    dot, cast = builder.create_dot, builder.cast_impl

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        return dot(self, widened(a), widened(b), *more)

    def cast_impl(self: Any, src: Any, to: Any) -> Any:
        if (src.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, src, to)
        rounded = torch.from_numpy(np.array(src.data)).to(torch.bfloat16).view(torch.int16)
        return TensorHandle(rounded.numpy().view(np.uint16), tl.bfloat16)

    builder.create_dot, builder.cast_impl, builder.rounds_to_nearest = create_dot, cast_impl, True
