"""What tuning and comparing have in common: the tokens they evaluate, and a word about a machine that is not idle."""

from __future__ import annotations

import os
from contextlib import suppress

from hybrid.schedule.limits import usable_cores

WARMUP = 4
"""Tokens decoded before any is timed."""
BUSY = 0.75
"""A load average of so many times the cores, before anything was measured, is worth a word."""


def prompt_tokens(n: int, n_vocab: int) -> tuple[int, ...]:
    """n ordinary tokens, not all the same; the same ones every time."""
    span = max(1, min(n_vocab, 4096) - 100)
    return tuple(min(100, n_vocab - 1) + (7919 * i) % span if n_vocab > 200 else i % n_vocab for i in range(n))


def busy() -> list[str]:
    """A sentence where other programs' work will show in every figure."""
    with suppress(OSError):
        load = os.getloadavg()[0]
        if load > BUSY * usable_cores():
            return [
                f"Other programs keep the processors busy (a load of {load:.1f} on {usable_cores()} cores): "
                "what is measured now may not hold when they are done."
            ]
    return []
