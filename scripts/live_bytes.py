"""Counting the bytes of live torch storages, temporaries included, by watching every operator that torch dispatches.

What a kernel allocates and frees inside itself is not seen (on the CPU: small per-thread buffers); nor is memory that
was there before, which is what makes the count the *dynamic* book of whatever runs under it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def pretend_full(cache: Any, n_tokens: int) -> None:
    """Let a KV cache of the head count n_tokens of each sequence as written: attention then reads them, and what they
    hold does not matter where only bytes do."""
    for kv in cache.layers:
        kv.end = [n_tokens] * cache.n_sequences
        kv.first = [max(0, n_tokens - kv.capacity)] * cache.n_sequences
        if hasattr(kv, "split"):
            kv.split = [kv.tier.split(n_tokens)] * cache.n_sequences


class LiveBytes(TorchDispatchMode):
    """`with LiveBytes() as count: ...`; then `count.peak` is the most bytes alive at once, `count.now` those left."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device = torch.device(device).type
        self.now = self.peak = 0
        self._owners: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # in inference mode composite operators arrive whole: look inside
            out = func.decompose(*args, **(kwargs or {}))
        if out is not NotImplemented:
            return out
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self.device:
                self._own(tensor, known)
        self.peak = max(self.peak, self.now)
        return out

    def _own(self, tensor: torch.Tensor, known: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._owners:
            if key in known:
                return  # a view of something older than this count
            self._owners[key] = 0
            self.now += storage.nbytes()
        self._owners[key] += 1
        weakref.finalize(tensor, self._disown, key, storage.nbytes())

    def _disown(self, key: int, n_bytes: int) -> None:
        self._owners[key] -= 1
        if self._owners[key] == 0:
            del self._owners[key]
            self.now -= n_bytes
