"""Tiny random GGUFs with a working byte-level vocabulary, for tests that need a model but not its weights."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

PIECES = ["▁the", "▁a", "▁of", "he", "in", "er", "an", "▁Hello", "▁world", "ing"]
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant: {% endif %}"
)


def quantize(values: np.ndarray, kind: T) -> np.ndarray:
    """`values` [rows, n] float32 as ggml blocks [rows, bytes], by llama.cpp's own quantiser (knows every type)."""
    if kind == T.F32:
        return values.astype(np.float32)
    package = importlib.util.find_spec("llama_cpp")  # importing it would take llama.cpp's log from the tail
    assert package is not None
    assert package.origin is not None
    lib = ctypes.CDLL(str(Path(package.origin).parent / "lib" / "libggml-base.so"))
    fn = lib.ggml_quantize_chunk
    fn.restype = ctypes.c_size_t
    fn.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p] + [ctypes.c_int64] * 3 + [ctypes.c_void_p]
    values = np.ascontiguousarray(values, np.float32)
    rows, n = values.shape
    block, size = gguf.GGML_QUANT_SIZES[kind]
    out = np.empty((rows, n // block * size), np.uint8)
    importance = np.ones(n, np.float32)  # some i-quants insist on one
    wrote = fn(int(kind), values.ctypes.data, out.ctypes.data, 0, rows, n, importance.ctypes.data)
    assert wrote == out.nbytes, (kind, wrote, out.nbytes)
    return out


def vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types of a SentencePiece vocabulary: specials, 256 bytes, single characters, a few pieces."""
    tokens, kinds = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>"], [2, 3, 3, 3, 3]
    tokens += [f"<0x{b:02X}>" for b in range(256)]
    kinds += [6] * 256
    singles = ["▁", *map(chr, range(33, 127))]
    tokens += singles + PIECES
    kinds += [1] * (len(singles) + len(PIECES))
    scores = [0.0] * 261 + [-100.0] * len(singles) + [-1.0 - i for i in range(len(PIECES))]
    return tokens, scores, kinds


def add_metadata(writer: gguf.GGUFWriter, values: dict[str, Any]) -> None:
    """Add keys, each of the type that its value is of."""
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def add_vocabulary(writer: gguf.GGUFWriter, n_least: int = 0) -> int:
    """Add `vocabulary`, filled up to `n_least` tokens with unused ones; returns how many there are."""
    tokens, scores, kinds = vocabulary()
    for i in range(len(tokens), n_least):
        tokens.append(f"<unused{i}>")
        scores.append(-1000.0)
        kinds.append(5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    return len(tokens)


def write_tiny(
    path: str | Path,
    architecture: str = "llama",
    *,
    n_layers: int = 6,
    n_embd: int = 256,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 64,
    n_ff: int = 512,
    n_ctx: int = 512,
    window: int = 16,
    kind: T | list[T] = T.F32,
    embd_kind: T = T.F32,
    tied: bool = True,
    rope_freqs: bool = False,
    biases: bool = False,
    metadata: dict[str, Any] | None = None,
    template: str = TEMPLATE,
    seed: int = 0,
) -> Path:
    """Write a random model of `architecture` (llama or gemma3) and return its path.

    `kind` is the type of all matrices in the blocks; a list is cycled over them. `window` 0 leaves gemma3's window out.
    `metadata` adds or replaces keys (a list of bools becomes a boolean array).
    """
    rng = np.random.default_rng(seed)
    kinds = kind if isinstance(kind, list) else [kind]
    writer = gguf.GGUFWriter(str(path), architecture)
    a = architecture
    base: dict[str, Any] = {
        f"{a}.block_count": n_layers,
        f"{a}.context_length": n_ctx,
        f"{a}.embedding_length": n_embd,
        f"{a}.feed_forward_length": n_ff,
        f"{a}.attention.head_count": n_heads,
        f"{a}.attention.head_count_kv": n_kv_heads,
        f"{a}.attention.key_length": head_dim,
        f"{a}.attention.value_length": head_dim,
        f"{a}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{a}.rope.freq_base": 10000.0,
    }
    if a == "llama":
        base[f"{a}.rope.dimension_count"] = head_dim
    if a == "gemma3":
        base[f"{a}.rope.freq_base"] = 1000000.0
        if window:
            base[f"{a}.attention.sliding_window"] = window
    add_metadata(writer, {**base, **(metadata or {})})
    n_vocab = add_vocabulary(writer)
    writer.add_add_bos_token(True)
    writer.add_chat_template(template)
    count = 0

    def matrix(name: str, rows: int, cols: int, as_kind: T | None = None) -> None:
        nonlocal count
        chosen = as_kind if as_kind is not None else kinds[count % len(kinds)]
        count += as_kind is None
        values = (rng.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)
        data = quantize(values, chosen)
        writer.add_tensor(name, data, raw_dtype=chosen)

    def vector(name: str, n: int, around: float = 1.0) -> None:
        writer.add_tensor(name, (around + 0.1 * rng.standard_normal(n)).astype(np.float32))

    matrix("token_embd.weight", n_vocab, n_embd, embd_kind)
    vector("output_norm.weight", n_embd)
    if not tied:
        matrix("output.weight", n_vocab, n_embd, embd_kind)
    if rope_freqs:
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, head_dim // 2, dtype=np.float32))
    for i in range(n_layers):
        b = f"blk.{i}."
        vector(b + "attn_norm.weight", n_embd)
        matrix(b + "attn_q.weight", n_heads * head_dim, n_embd)
        matrix(b + "attn_k.weight", n_kv_heads * head_dim, n_embd)
        matrix(b + "attn_v.weight", n_kv_heads * head_dim, n_embd)
        matrix(b + "attn_output.weight", n_embd, n_heads * head_dim)
        if biases:
            for name, n in (("q", n_heads * head_dim), ("k", n_kv_heads * head_dim), ("v", n_kv_heads * head_dim)):
                vector(f"{b}attn_{name}.bias", n, 0.0)
            vector(b + "attn_output.bias", n_embd, 0.0)
        if a == "gemma3":
            vector(b + "attn_q_norm.weight", head_dim)
            vector(b + "attn_k_norm.weight", head_dim)
            vector(b + "post_attention_norm.weight", n_embd)
            vector(b + "post_ffw_norm.weight", n_embd)
        vector(b + "ffn_norm.weight", n_embd)
        matrix(b + "ffn_gate.weight", n_ff, n_embd)
        matrix(b + "ffn_up.weight", n_ff, n_embd)
        matrix(b + "ffn_down.weight", n_embd, n_ff)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)
