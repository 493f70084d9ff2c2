"""What llama.cpp's CPU flash attention costs a cached token: the yardstick of bench_attention.py.

    python scripts/llama_attention.py [--n-heads 32] [--n-kv-heads 8] [--head-dim 128] [--depth 32768] [--threads N]

A random model with the given heads and hardly anything else decodes a token at that depth and, in a second context, at
an empty one; the difference is attention.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
import time
from pathlib import Path

import gguf
import llama_cpp as lib
import numpy as np

from hybrid.schedule.limits import usable_cores

N_VOCAB, N_EMBD, N_FF = 64, 256, 32
CHUNK = 2048
"""Tokens that are really evaluated; the rest of the cache is copies of them, moved to where they belong."""
_SILENT = lib.llama_log_callback(lambda level, text, data: None)  # C keeps calling it: never let it be collected


def write_model(path: Path, n_heads: int, n_kv_heads: int, head_dim: int, n_layers: int, n_ctx: int) -> None:
    """A llama-like GGUF of random float16 matrices, without a vocabulary."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(n_layers)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(n_heads)
    writer.add_head_count_kv(n_kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(N_VOCAB)
    writer.add_tokenizer_model("no_vocab")

    def matrix(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(name, (rng.standard_normal((rows, columns)) * columns**-0.5).astype(np.float16))

    matrix("token_embd.weight", N_VOCAB, N_EMBD)
    writer.add_tensor("output_norm.weight", np.ones(N_EMBD, np.float32))
    for i in range(n_layers):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(N_EMBD, np.float32))
        matrix(f"blk.{i}.attn_q.weight", n_heads * head_dim, N_EMBD)
        matrix(f"blk.{i}.attn_k.weight", n_kv_heads * head_dim, N_EMBD)
        matrix(f"blk.{i}.attn_v.weight", n_kv_heads * head_dim, N_EMBD)
        matrix(f"blk.{i}.attn_output.weight", N_EMBD, n_heads * head_dim)
        matrix(f"blk.{i}.ffn_gate.weight", N_FF, N_EMBD)
        matrix(f"blk.{i}.ffn_up.weight", N_FF, N_EMBD)
        matrix(f"blk.{i}.ffn_down.weight", N_EMBD, N_FF)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaAttention:
    """Two contexts of one random model: one with `depth` tokens in its float16 cache, one empty."""

    def __init__(
        self, n_heads: int, n_kv_heads: int, head_dim: int, depth: int, n_threads: int, n_layers: int = 2
    ) -> None:
        if depth % CHUNK:
            raise ValueError(f"the depth must be a multiple of {CHUNK}")
        lib.llama_log_set(_SILENT, None)
        self.depth, self.n_layers = depth, n_layers
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "random.gguf"
            write_model(path, n_heads, n_kv_heads, head_dim, n_layers, depth + CHUNK)
            params = lib.llama_model_default_params()
            params.n_gpu_layers = 0
            self._model = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise RuntimeError("llama.cpp does not load the random model")
        self._deep = self._context(depth + CHUNK, n_threads)
        self._empty = self._context(256, n_threads)
        self._fill()

    def _context(self, n_ctx: int, n_threads: int) -> lib.llama_context_p:
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = n_ctx, CHUNK, 512, 2
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = 1  # on
        params.kv_unified = True
        context = lib.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError("llama.cpp does not make a context")
        return context

    def _fill(self) -> None:
        """Evaluate CHUNK tokens, then load their state again and again as sequence 1, moved on, and make it part of
        sequence 0: a cache of any depth in the time of a short prompt."""
        memory = lib.llama_get_memory(self._deep)
        rng = np.random.default_rng(1)
        self._decode(self._deep, rng.integers(0, N_VOCAB, CHUNK).tolist(), 0)
        size = lib.llama_state_seq_get_size(self._deep, 0)
        state = (ctypes.c_uint8 * size)()
        lib.llama_state_seq_get_data(self._deep, state, size, 0)
        for start in range(CHUNK, self.depth, CHUNK):
            if not lib.llama_state_seq_set_data(self._deep, state, size, 1):
                raise RuntimeError("llama.cpp does not take its own state back")
            lib.llama_memory_seq_add(memory, 1, 0, -1, start)
            lib.llama_memory_seq_cp(memory, 1, 0, -1, -1)
            lib.llama_memory_seq_rm(memory, 1, -1, -1)
        if lib.llama_memory_seq_pos_max(memory, 0) != self.depth - 1:
            raise RuntimeError("the cache is not as deep as it should be")
        self.deep_s()  # moves the keys' rotation
        self.empty_s()

    def _decode(self, context: lib.llama_context_p, tokens: list[int], position: int) -> float:
        """Seconds to evaluate tokens in sequence 0."""
        batch = lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position + i, 1, 0
            batch.logits[i] = i == len(tokens) - 1
        start = time.perf_counter()
        status = lib.llama_decode(context, batch)
        lib.llama_get_logits_ith(context, -1)  # waits for the result
        taken = time.perf_counter() - start
        lib.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        return taken

    def deep_s(self) -> float:
        """Seconds for one token after `depth` others."""
        taken = self._decode(self._deep, [1], self.depth)
        lib.llama_memory_seq_rm(lib.llama_get_memory(self._deep), 0, self.depth, -1)
        return taken

    def empty_s(self) -> float:
        """Seconds for one token after none."""
        taken = self._decode(self._empty, [1], 0)
        lib.llama_memory_clear(lib.llama_get_memory(self._empty), False)
        return taken

    def layer_s(self) -> float:
        """Seconds of attention in one layer, measured once."""
        return (self.deep_s() - min(self.empty_s() for _ in range(3))) / self.n_layers

    def close(self) -> None:
        """Free the contexts and the model."""
        lib.llama_free(self._deep)
        lib.llama_free(self._empty)
        lib.llama_model_free(self._model)


def shape_parser(doc: str | None, repeats: int) -> argparse.ArgumentParser:
    """A parser of what is measured: the heads' shape, the depth, threads and repeats."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n-heads", type=int, default=32)
    parser.add_argument("--n-kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--depth", type=int, default=32768)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--repeats", type=int, default=repeats)
    return parser


def main() -> None:
    parser = shape_parser(__doc__, repeats=5)
    args = parser.parse_args()
    llama = LlamaAttention(args.n_heads, args.n_kv_heads, args.head_dim, args.depth, args.threads)
    n_bytes = 4 * args.n_kv_heads * args.head_dim * args.depth
    for _ in range(args.repeats):
        taken = llama.layer_s()
        print(f"{1e3 * taken:.2f} ms a layer at {args.depth} tokens, {n_bytes / taken / 1e9:.1f} GB/s")
    llama.close()


if __name__ == "__main__":
    main()
