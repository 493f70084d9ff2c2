"""llama.cpp through llama-cpp-python's low-level API and nothing else: the yardstick of the benchmarks.

    python scripts/raw_llama.py MODEL.gguf [--threads N]

prints pp512 and tg64 as llama-bench would.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Sequence

import llama_cpp as lib
import numpy as np
import psutil

_SILENT = lib.llama_log_callback(lambda level, text, data: None)  # C keeps calling it: never let it be collected


class RawLlama:
    """A model and a context with llama.cpp's own defaults, on the CPU unless it is told otherwise."""

    def __init__(
        self, path: str, *, n_ctx: int = 1024, n_threads: int | None = None, n_sequences: int = 1, n_gpu_layers: int = 0
    ) -> None:
        """`n_ctx` tokens for each sequence; `n_gpu_layers` as llama.cpp counts them."""
        lib.llama_log_set(_SILENT, None)
        n_threads = n_threads or psutil.cpu_count(logical=False) or 1
        model_params = lib.llama_model_default_params()
        model_params.n_gpu_layers = n_gpu_layers
        self.model = lib.llama_model_load_from_file(path.encode(), model_params)
        params = lib.llama_context_default_params()
        params.n_ctx = n_ctx * n_sequences
        params.n_batch = n_ctx
        params.n_seq_max = n_sequences
        params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = n_threads
        self.context = lib.llama_init_from_model(self.model, params)
        self.n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))

    def clear(self) -> None:
        """Empty the KV cache."""
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)

    def decode(self, tokens: Sequence[int], position: int, *, output: bool = True) -> None:
        """Evaluate `tokens` from `position` on in one batch; logits of the last one if `output`."""
        batch = lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = int(token), position + i, 1, 0
            batch.logits[i] = output and i == len(tokens) - 1
        status = lib.llama_decode(self.context, batch)
        lib.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        if output:
            lib.llama_get_logits_ith(self.context, -1)  # waits for the result

    def step(self, rows: Sequence[tuple[int, int, int]]) -> None:
        """Evaluate (token, position, sequence) rows in one batch, with the logits of each."""
        batch = lib.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (token, position, seq) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = int(token), position, 1, seq
            batch.logits[i] = True
        status = lib.llama_decode(self.context, batch)
        lib.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        lib.llama_get_logits_ith(self.context, -1)  # waits for the result

    def prompt(self, tokens: Sequence[int], seq: int) -> None:
        """Evaluate `tokens` at the beginning of `seq`, with the logits of the last."""
        batch = lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = int(token), i, 1, seq
            batch.logits[i] = i == len(tokens) - 1
        status = lib.llama_decode(self.context, batch)
        lib.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        lib.llama_get_logits_ith(self.context, -1)

    def forget(self, position: int, seq: int) -> None:
        """Drop what `seq` holds from `position` on."""
        lib.llama_memory_seq_rm(lib.llama_get_memory(self.context), seq, position, -1)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of `text`, with BOS where the model wants it."""
        data = text.encode()
        out = (ctypes.c_int32 * (len(data) + 8))()
        vocab = lib.llama_model_get_vocab(self.model)
        return list(out[: lib.llama_tokenize(vocab, data, len(data), out, len(out), True, False)])

    def close(self) -> None:
        """Free the context and the model."""
        lib.llama_free(self.context)
        lib.llama_model_free(self.model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    raw = RawLlama(args.model, n_threads=args.threads)
    tokens = np.random.default_rng(0).integers(100, min(raw.n_vocab, 40000), 512).tolist()
    for _ in range(2):  # the first round warms up
        raw.clear()
        start = time.perf_counter()
        raw.decode(tokens, 0)
        prefilled = time.perf_counter()
        for i in range(64):
            raw.decode(tokens[i : i + 1], 512 + i)
        end = time.perf_counter()
    print(f"pp512 {512 / (prefilled - start):.1f} t/s   tg64 {64 / (end - prefilled):.1f} t/s")
    raw.close()


if __name__ == "__main__":
    main()
