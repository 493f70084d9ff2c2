"""The tail against llama.cpp: the whole model in one context, the slice in another, the same batches for both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.schedule.placement import Placement
from hybrid.tail.reference import Reference
from hybrid.tail.tail import Tail


def placement(k: int, **more: Any) -> Placement:
    """A tail on one thread; chunks as large as the context."""
    values = {"n_ctx": 256, "n_threads_tail": 1, "n_threads_tail_batch": 1, **more}
    return Placement(**{"device": "cpu", "n_gpu_layers": k, "n_batch": values["n_ctx"], **values})


def open_tail(path: Path, k: int, **more: Any) -> Tail:
    """The tail of a file at k with room for all logits of a batch."""
    chosen = placement(k, **more)
    with ModelFile(path) as file:
        return Tail(file, read_spec(file), chosen, n_outputs_max=chosen.n_batch)


def run_tail(tail: Tail, hidden: np.ndarray, chunks: Sequence[int], seq: int = 0) -> np.ndarray:
    """Append hidden states to `seq` in chunks of these sizes; all logits."""
    rows = []
    start = 0
    for n in chunks:
        first = tail.n_tokens(seq)
        part = hidden[start : start + n]
        tail.decode(part, np.arange(first, first + n), np.full(n, seq), np.ones(n, bool))
        rows.append(tail.logits_block().copy())
        start += n
    return np.concatenate(rows)


@dataclass
class Oracle:
    """llama.cpp's logits for `tokens`, and what each layer handed to the next."""

    logits: np.ndarray
    hidden: list[np.ndarray]


def oracle(path: Path, tokens: np.ndarray, chunks: Sequence[int], **more: Any) -> Oracle:
    """Evaluate `tokens` in chunks of these sizes with llama.cpp alone."""
    with ModelFile(path) as file:
        n_layers = read_spec(file).n_layers
    rows = []
    taps = [f"l_out-{i}" for i in range(n_layers)]
    with Reference(path, n_ctx=256, taps=taps, **more) as reference:
        start = 0
        for n in chunks:
            rows.append(reference.evaluate(tokens[start : start + n]))
            start += n
        hidden = [reference.hidden(i) for i in range(n_layers - 1)]
    return Oracle(np.concatenate(rows), hidden)


def some_tokens(n: int, n_vocab: int = 300, seed: int = 1) -> np.ndarray:
    """Random ordinary tokens (the tiny vocabulary begins with specials)."""
    return np.random.default_rng(seed).integers(5, n_vocab, n).astype(np.int32)
