"""Causal attention of one run of tokens over the keys of its sequence, in bounded memory.

Torch's scaled-dot-product attention does the work where it can; a blocked softmax of our own does it where torch
cannot (a soft cap on the scores, sinks) or where keys must be converted first and are too many to convert at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

ROWS = 128
"""Query tokens at a time on the CPU: bounds the mask, and spares a chunk half of its masked-out products."""
ROWS_ACCELERATOR = 256
"""More on an accelerator, which wants few launches."""
CONVERT_BYTES = 16 << 20
"""Float32 bytes of K and V to convert at a time: about what stays in cache until it is multiplied."""


Block = tuple[int, int, Tensor, Tensor]
"""Consecutive keys: the first position, the one after the last, K and V [n, n_kv_heads, head_dim] of them."""


@dataclass(frozen=True)
class Keys:
    """K and V of one sequence in one layer, wherever they are held."""

    read: Callable[[int, int, torch.dtype], tuple[Tensor, Tensor]]
    """(lo, hi, dtype) to K and V [hi - lo, n_kv_heads, head_dim] of positions lo … hi - 1 in `dtype`."""
    dtype: torch.dtype
    """What they are stored in, reading which copies nothing; of packed ones, what an accelerator multiplies them in."""
    n_values: int
    """Values of K and V together for one token."""
    packed: bool = False
    """Whether they are stored as quantised blocks, which reading always converts."""

    def blocks(self, lo: int, hi: int, n: int, dtype: torch.dtype) -> Iterator[Block]:
        """Positions lo … hi - 1, at most n of them at a time."""
        for at in range(lo, hi, n):
            end = min(hi, at + n)
            yield at, end, *self.read(at, end, dtype)


def attend(
    q: Tensor, p0: int, keys: Keys, *, window: int, scale: float, softcap: float, sinks: Tensor | None = None
) -> Tensor:
    """Attention of q [n, n_heads, head_dim_k] float32 at positions p0, p0 + 1, …, whose own keys are stored already.

    A query at p sees keys at max(0, p - window + 1) … p, all if window is 0; scores are softcap * tanh(s / softcap)
    where softcap is not 0. `sinks` [n_heads] are scores of a key that every query sees and whose value is zero.
    Returns [n, n_heads, head_dim_v] float32.

    On the CPU everything is computed in float32: torch reads float16 there at a fraction of the memory's speed. On
    an accelerator the products are in the stored dtype, with the softmax in float32.
    """
    n, first = q.shape[0], first_key(p0, window)
    on_cpu = q.device.type == "cpu"
    dtype = torch.float32 if on_cpu else keys.dtype
    block = block_tokens(keys.n_values)
    converted = keys.packed or keys.dtype != dtype
    if softcap or sinks is not None or (converted and p0 + n - first > block):
        blocks = keys.blocks(first, p0 + n, block, dtype)
        return attend_blocks(q, p0, blocks, window=window, scale=scale, softcap=softcap, sinks=sinks)[0]
    k, v = keys.read(first, p0 + n, dtype)
    q = q.to(dtype)
    step = ROWS if on_cpu else ROWS_ACCELERATOR
    out = []
    for row in range(0, n, step):
        rows = q[row : row + step]
        lo, hi = first_key(p0 + row, window), p0 + row + rows.shape[0]
        out.append(_torch_attention(rows, k[lo - first : hi - first], v[lo - first : hi - first], lo, window, scale))
    return (out[0] if len(out) == 1 else torch.cat(out)).float()


def block_tokens(n_values: int) -> int:
    """Keys to convert at a time where a token's K and V have n_values values."""
    return max(1, CONVERT_BYTES // (4 * n_values))


def _torch_attention(q: Tensor, k: Tensor, v: Tensor, lo: int, window: int, scale: float) -> Tensor:
    """SDPA of queries that end where the keys end. `lo` is the position of the first key.

    The query heads that share a KV head become rows of one head: no kernel then has to repeat K and V, and torch keeps
    to one that needs no [n_heads, n, n_keys] scores (its own grouping rules those out where there is a mask).
    """
    n, n_heads, _ = q.shape
    hi = lo + k.shape[0]
    visible = None  # one query sees every key given
    if n > 1:
        visible = _visible(hi - n, n, lo, hi, window, q.device).repeat(n_heads // k.shape[1], 1)
    out = F.scaled_dot_product_attention(
        _grouped(q, k.shape[1]).unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        visible,
        scale=scale,
    )
    return out.view(k.shape[1], -1, n, v.shape[2]).permute(2, 0, 1, 3).reshape(n, n_heads, -1)


def attend_blocks(
    q: Tensor,
    p0: int,
    blocks: Iterable[Block],
    *,
    window: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `attend`, over the keys in `blocks` alone, in any order and one block at a time: a running softmax in float32
    (Milakov and Gimelshein 2018; FlashAttention). Products are made in the blocks' dtype.

    Returns out [n, n_heads, head_dim_v] and the log-sum-exp of each row's scores (sinks included) [n, n_heads], both
    float32: what merges this part with another. A row that sees no key gives 0 and -inf. There is one block at least.
    """
    n, n_heads, _ = q.shape
    total: Tensor | None = None
    for lo, hi, k, v in blocks:
        n_kv_heads = k.shape[1]
        out = torch.zeros(n_kv_heads, n_heads // n_kv_heads, n, v.shape[2], device=q.device)
        peak = torch.full((*out.shape[:3], 1), -torch.inf, device=q.device)
        weight = torch.zeros_like(peak)
        for row in range(0, n, ROWS):
            rows = slice(row, min(n, row + ROWS))
            last = p0 + rows.stop
            if last <= lo or first_key(p0 + row, window) >= hi:
                continue  # none of these queries sees this block
            visible = _visible(p0 + row, last - p0 - row, lo, hi, window, q.device)
            out[:, :, rows], peak[:, :, rows], weight[:, :, rows] = _partial(q[rows], k, v, visible, scale, softcap)
        if total is None:
            total, best, norm = out, peak, weight
            continue
        top = torch.maximum(best, peak)
        old, new = _shrink(best, top), _shrink(peak, top)
        total = total.mul_(old).add_(out.mul_(new))
        norm = norm * old + weight * new
        best = top
    assert total is not None
    if sinks is not None:
        sink = sinks.view(n_kv_heads, -1, 1, 1)
        top = torch.maximum(best, sink)
        total, norm = total * _shrink(best, top), norm * _shrink(best, top) + torch.exp(sink - top)
        best = top
    lse = (best + torch.log(norm)).squeeze(-1).permute(2, 0, 1).reshape(n, n_heads)
    return (total / norm.clamp_min(TINY)).permute(2, 0, 1, 3).reshape(n, n_heads, -1), lse


TINY = torch.finfo(torch.float32).tiny
"""Less than any sum of exponentials relative to the largest, which is 1 at least."""


def _partial(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Unnormalised attention over one block: sums [n_kv_heads, group, n, head_dim_v], and for each row the largest
    score and the sum of exponentials relative to it, both [n_kv_heads, group, n, 1]. A row that sees nothing gives
    -inf and 0."""
    n, n_heads, _ = q.shape
    n_kv_heads, group = k.shape[1], n_heads // k.shape[1]
    scores = torch.bmm(_grouped((q * scale).to(k.dtype), n_kv_heads), k.permute(1, 2, 0)).float()
    scores = scores.view(n_kv_heads, group, n, -1)
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores.masked_fill_(~visible, -torch.inf)
    peak = scores.amax(-1, keepdim=True)
    scores.sub_(peak.clamp_min(torch.finfo(torch.float32).min)).exp_()
    out = torch.bmm(scores.view(n_kv_heads, group * n, -1).to(v.dtype), v.transpose(0, 1)).float()
    return out.view(n_kv_heads, group, n, -1), peak, scores.sum(-1, keepdim=True)


def _shrink(peak: Tensor, top: Tensor) -> Tensor:
    """exp(peak - top), 0 where both are -inf (a row that has seen no key yet)."""
    return torch.exp(peak - top.clamp_min(torch.finfo(torch.float32).min))


def _visible(p0: int, n: int, lo: int, hi: int, window: int, device: torch.device) -> Tensor:
    """Whether queries at p0 … p0 + n - 1 see keys at lo … hi - 1: bool [n, hi - lo]."""
    queries = torch.arange(p0, p0 + n, device=device).unsqueeze(1)
    held = torch.arange(lo, hi, device=device)
    visible = held <= queries
    return visible & (held > queries - window) if window else visible


def first_key(position: int, window: int) -> int:
    """The first position that a query at `position` sees."""
    return max(0, position - window + 1) if window else 0


def _grouped(q: Tensor, n_kv_heads: int) -> Tensor:
    """[n, n_heads, head_dim] to [n_kv_heads, group * n, head_dim]: first head's queries, second head's, …"""
    n, n_heads, head_dim = q.shape
    group = n_heads // n_kv_heads
    return q.view(n, n_kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(n_kv_heads, group * n, head_dim)
