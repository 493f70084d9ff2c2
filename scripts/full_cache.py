"""A KV cache that counts as full without having been filled."""

from __future__ import annotations

from typing import Any


def pretend_full(cache: Any, n_tokens: int) -> None:
    """Let a KV cache of the head count n_tokens of each sequence as written: attention then reads them, and what they
    hold does not matter where only bytes do."""
    for kv in cache.layers:
        kv.end = [n_tokens] * cache.n_sequences
        kv.first = [max(0, n_tokens - kv.capacity)] * cache.n_sequences
        if hasattr(kv, "split"):
            kv.split = [kv.tier.split(n_tokens)] * cache.n_sequences
