"""RMSNorm of rows, and of the residual stream with what is added to it, in one launch."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid.head.kernels.variant import Variant

MAX_DIM = 16384
"""Values of a row, which one program keeps in registers."""
WARP_VALUES = 512
"""Of a row, for every warp."""


@triton.jit(do_not_specialize=["eps", "scale"])
def add_and_norm_kernel(
    h, more, post, weight, total, normed, dim, eps, scale,
    ADD: tl.constexpr, POST: tl.constexpr, NORM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """total = h + scale · more (ADD), of which `more` is normalised with `post` first (POST); normed = the norm of it
    with `weight` (NORM). Grid: (rows,)."""
    d = tl.arange(0, PAD)
    real = d < dim
    at = tl.program_id(0).to(tl.int64) * dim + d
    x = tl.load(h + at, mask=real, other=0.0)
    if ADD:
        y = tl.load(more + at, mask=real, other=0.0)
        if POST:
            y *= tl.rsqrt(tl.sum(y * y, 0) / dim + eps) * tl.load(post + d, mask=real, other=0.0)
        x += scale * y
        tl.store(total + at, x, mask=real)
    if NORM:
        x *= tl.rsqrt(tl.sum(x * x, 0) / dim + eps) * tl.load(weight + d, mask=real, other=0.0)
        tl.store(normed + at, x, mask=real)


@cache
def variant(dim: int, add: bool, post: bool, norm: bool) -> Variant:
    """For rows of this size, whether something is added, is normalised first, and whether the sum is."""
    pad = int(triton.next_power_of_2(dim))
    pointers = ("h", "more", "post", "weight", "total", "normed")
    types = dict.fromkeys(pointers, "*fp32") | {"dim": "i32", "eps": "fp32", "scale": "fp32"}
    constants = {"ADD": add, "POST": post, "NORM": norm, "PAD": pad}
    name = "norm" if not add else f"{'norm, ' if post else ''}add{', norm' if norm else ''}"
    warps = min(16, max(1, pad // WARP_VALUES))
    return Variant(f"{name} {pad}", add_and_norm_kernel, constants, types, (*pointers, "dim"), {"num_warps": warps})


def add_and_norm(
    h: Tensor, more: Tensor | None, post: Tensor | None, weight: Tensor | None, eps: float, scale: float
) -> tuple[Tensor, Tensor] | None:
    """h [n, dim] float32 + scale * `more` (h itself without), where `more` is first divided by its root mean square and
    multiplied by `post` [dim] where that is there; and the sum normalised likewise with `weight` [dim] (the sum itself
    without). None where a row is too long."""
    n, dim = h.shape
    if dim > MAX_DIM:
        return None
    h = h.contiguous()
    more = None if more is None else more.contiguous()
    total = h if more is None else torch.empty_like(h)
    normed = total if weight is None else torch.empty_like(h)
    given = [h if t is None else t for t in (more, post, weight)]
    form = variant(dim, more is not None, post is not None, weight is not None)
    form.launch((n,), h, *given, total, normed, dim, eps, scale)
    return total, normed


def moved_bytes(n: int, dim: int, add: bool, norm: bool) -> int:
    """What `add_and_norm` of n rows must move once: h, what is added, the sum, its norm, and a weight."""
    return 4 * dim * (n * (1 + 2 * add + norm) + norm)
