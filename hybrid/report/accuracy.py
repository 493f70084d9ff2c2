"""Distances between next-token distributions, in float64, from logits [n_tokens, n_vocab]."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.floating]
_BLOCK = 64
"""Rows taken at a time: a 262k vocabulary in float64 is 2 MiB a row."""


def log_softmax(logits: Rows) -> npt.NDArray[np.float64]:
    """Log-probabilities, row by row."""
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
    return x


def mean_kl(p: Rows, q: Rows) -> float:
    """Mean over tokens of KL(p || q), in nats."""
    if p.shape != q.shape:
        raise ValueError(f"logits of {p.shape} cannot be compared with {q.shape}")
    total = 0.0
    for i in range(0, len(p), _BLOCK):
        log_p, log_q = log_softmax(p[i : i + _BLOCK]), log_softmax(q[i : i + _BLOCK])
        total += float((np.exp(log_p) * (log_p - log_q)).sum())
    return total / len(p)


def argmax_agreement(p: Rows, q: Rows) -> float:
    """The share of tokens whose most likely successor is the same."""
    return float((p.argmax(axis=1) == q.argmax(axis=1)).mean())


def log_likelihood(logits: Rows, tokens: Sequence[int]) -> float:
    """Sum of log p(tokens[i + 1]) under row i, in nats; exp(-sum / count) is the perplexity."""
    total = 0.0
    for i in range(0, len(tokens) - 1, _BLOCK):
        following = np.asarray(tokens[i + 1 : i + 1 + _BLOCK])
        log_p = log_softmax(logits[i : i + len(following)])
        total += float(log_p[np.arange(len(following)), following].sum())
    return total


def relative_difference(a: Rows, b: Rows) -> float:
    """||a - b|| / ||b|| over all values."""
    reference = b.astype(np.float64)
    return float(np.linalg.norm(a - reference) / np.linalg.norm(reference))
