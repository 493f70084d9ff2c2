"""How long two sequences are the same."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix(ours: Sequence[object], theirs: Sequence[object]) -> int:
    """How many items both begin with."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
