"""Opening a head on a file, and running tokens through it in pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybrid.head.device import Compute
from hybrid.head.head import Head
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.schedule.placement import Placement


def open_head(
    path: Path,
    k: int | None = None,
    *,
    compute: Compute | None = None,
    progress: Callable[[float], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
    **placement: Any,
) -> Head:
    """The first k layers (all if None) on the emulated device, with a float32 cache of 256 tokens."""
    with ModelFile(path) as file:
        spec = read_spec(file)
        values = {"device": "cpu", "n_ctx": 256, "n_batch": 256, "kv_dtype": "f32", **placement}
        chosen = Placement(n_gpu_layers=spec.n_layers if k is None else k, **values)
        return Head(file, spec, chosen, compute=compute, progress=progress, cancelled=cancelled)


def run(head: Head, tokens: np.ndarray, chunks: Sequence[int] | None = None, seq: int = 0, at: int = 0) -> np.ndarray:
    """Hidden states of `tokens`, appended to `seq` from position `at` in chunks of these sizes (one chunk if None)."""
    out, start = [], 0
    for n in chunks or [len(tokens)]:
        where = np.arange(at + start, at + start + n)
        out.append(head.forward(tokens[start : start + n], where, np.full(n, seq)).numpy())
        start += n
    return np.concatenate(out)


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """|got - want| / |want| over all values."""
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want.astype(np.float64)))


def mean_kl(p: np.ndarray, q: np.ndarray) -> float:
    """KL(p || q) of two [n_tokens, n_vocab] logit arrays, mean over tokens, nats."""

    def log_softmax(a: np.ndarray) -> np.ndarray:
        a = a.astype(np.float64) - a.max(1, keepdims=True)
        return a - np.log(np.exp(a).sum(1, keepdims=True))

    p, q = log_softmax(p), log_softmax(q)
    return float((np.exp(p) * (p - q)).sum(1).mean())


def some_tokens(n: int, seed: int = 1) -> np.ndarray:
    """Random ordinary tokens of the tiny vocabulary."""
    return np.random.default_rng(seed).integers(5, 300, n)
