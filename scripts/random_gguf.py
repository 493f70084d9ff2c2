"""Random GGUFs of realistic shapes, written in seconds: a few rows of each matrix are quantised, and repeat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

from tests.tiny import TEMPLATE, add_metadata, add_vocabulary, quantize

ROWS = 48
"""Rows that are quantised; the others repeat them."""


@dataclass(frozen=True)
class Shape:
    """A llama."""

    name: str
    n_layers: int
    n_embd: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_ff: int
    kinds: Callable[[int, str], T]
    """The type of a matrix by layer and name."""
    n_vocab: int = 32768


def q4_k_m(layer: int, name: str) -> T:
    """llama.cpp's mixture: values and the way down in Q6_K in every other layer."""
    return T.Q6_K if name in ("attn_v", "ffn_down") and layer % 2 == 0 else T.Q4_K


def q8_0(layer: int, name: str) -> T:
    """All of it."""
    return T.Q8_0


def q4_0(layer: int, name: str) -> T:
    """The way down in Q8_0."""
    return T.Q8_0 if name == "ffn_down" else T.Q4_0


EIGHT_B_Q4 = Shape("8B Q4_K_M", 4, 4096, 32, 8, 128, 14336, q4_k_m)
EIGHT_B_Q8 = Shape("8B Q8_0", 4, 4096, 32, 8, 128, 14336, q8_0)
ONE_B = Shape("1B Q4_K_M", 8, 2048, 32, 8, 64, 8192, q4_k_m)
TINY = Shape("tiny Q4_0", 1, 64, 2, 1, 32, 96, q4_0, n_vocab=0)


def few_rows(kind: int, n_rows: int, n_in: int, seed: int = 0) -> np.ndarray:
    """A random matrix as blocks [n_rows, row_bytes] uint8, a few of whose rows repeat."""
    rng = np.random.default_rng(seed)
    few = (rng.standard_normal((min(n_rows, ROWS), n_in)) / np.sqrt(n_in)).astype(np.float32)
    blocks = quantize(few, T(kind)).view(np.uint8).reshape(len(few), -1)
    return np.resize(blocks, (n_rows, blocks.shape[1]))


def write(path: Path, shape: Shape, seed: int = 0) -> Path:
    """Write the model and return its path; with a working vocabulary, filled up to n_vocab."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), "llama")
    keys: dict[str, Any] = {
        "block_count": shape.n_layers,
        "context_length": 131072,
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_heads,
        "attention.head_count_kv": shape.n_kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "rope.dimension_count": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 500000.0,
    }
    add_metadata(writer, {f"llama.{key}": value for key, value in keys.items()})
    n_vocab = add_vocabulary(writer, shape.n_vocab)
    writer.add_chat_template(TEMPLATE)

    def matrix(name: str, rows: int, cols: int, kind: T) -> None:
        writer.add_tensor(name, few_rows(kind, rows, cols, int(rng.integers(1 << 30))), raw_dtype=kind)

    def vector(name: str) -> None:
        writer.add_tensor(name, (1 + 0.1 * rng.standard_normal(shape.n_embd)).astype(np.float32))

    matrix("token_embd.weight", n_vocab, shape.n_embd, T.Q8_0)
    vector("output_norm.weight")
    for i in range(shape.n_layers):
        q, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
        for name, rows, cols in (
            ("attn_q", q, shape.n_embd), ("attn_k", kv, shape.n_embd), ("attn_v", kv, shape.n_embd),
            ("attn_output", shape.n_embd, q), ("ffn_gate", shape.n_ff, shape.n_embd),
            ("ffn_up", shape.n_ff, shape.n_embd), ("ffn_down", shape.n_embd, shape.n_ff),
        ):  # fmt: skip
            matrix(f"blk.{i}.{name}.weight", rows, cols, shape.kinds(i, name))
        vector(f"blk.{i}.attn_norm.weight")
        vector(f"blk.{i}.ffn_norm.weight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
