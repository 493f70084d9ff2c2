"""The process in which a file is tried (`hybrid.tail.preflight`): a JSON object in on stdin, JSON lines out on stdout.

Lines out: {"stage": "library"} and {"stage": "file"} when each begins, then {"done": true} or {"failed": CLASS,
"message"}. llama.cpp's log goes to stderr, so that it outlives this process.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
from contextlib import suppress
from typing import Any

from hybrid import _native
from hybrid.errors import BadFileError, EngineError, HybridError, OutOfMemoryError, UnsupportedError
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.schedule.limits import usable_cores
from hybrid.tail.llama import LogMark, lib
from hybrid.tail.unloaded import LOAD_MODE_NONE, cpu_params, load_files, unloaded
from hybrid.tail.virtual_gguf import FLOAT32, UINT32, VirtualGGUF, VirtualTensor, scalar_record, string, tensor_bytes

N_TRIED = 32
"""Tokens of a batch: enough for the kernels that only batches use."""
LOG_BYTES = 1 << 20
"""Of llama.cpp's log that are passed on; what it says when it aborts does not count."""
DEBUG = 1
"""ggml_log_level."""
CHARACTERS = [*range(1, 0x800), *range(0x800, 0xD800, 61), *range(0x10000, 0x110000, 4099)]
TEXT = "".join(map(chr, CHARACTERS))
"""Text in which every byte of UTF-8 occurs: a vocabulary that lacks one must not end the process later."""
STRING = 8
F32 = 0
SELF_TEST_TYPES = (2, 8, 12, 13, 14, 23, 1)
"""Q4_0, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_XS, F16: types for which processors have instructions of their own."""


def main() -> None:
    """Try what stdin asks for."""
    task = json.loads(sys.stdin.buffer.read())
    lib()
    _limit(task["cpu_s"], task["memory_bytes"])
    try:
        _say(stage="library")
        log = _Log()
        _try_library(log)
        _say(stage="file")
        _try_file(task["path"], task["k"], log)
        _say(done=True)
    except HybridError as e:
        _say(failed=type(e).__name__, message=str(e))
    except MemoryError:
        _say(failed=OutOfMemoryError.__name__, message="")


def _say(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def _limit(cpu_s: int, memory_bytes: int) -> None:
    """No core files, no endless loops, and no more memory than a description of a model may need. What was mapped
    from files does not count."""
    for what, soft, hard in (
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 2),
        (resource.RLIMIT_DATA, memory_bytes, memory_bytes),
    ):
        with suppress(OSError, ValueError):  # a limit that is lower already stays
            resource.setrlimit(what, (soft, hard))


class _Log:
    """llama.cpp's log, kept as always and written to stderr."""

    def __init__(self) -> None:
        keep = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_native.log_callback())
        written = 0

        def on_line(level: int, text: bytes, data: int | None) -> None:
            nonlocal written
            keep(level, text, data)
            if level != DEBUG and written < LOG_BYTES:
                written += os.write(2, text[:1024])

        self._callback = lib().llama_log_callback(on_line)

    def mark(self) -> LogMark:
        """A LogMark, which takes the log over; this one takes it back."""
        mark = LogMark()
        lib().llama_log_set(self._callback, None)
        return mark


# -- the library -----------------------------------------------------------------------------------------------------


def _try_library(log: _Log) -> None:
    """Run a model of one layer of zeros: where llama.cpp was built with instructions that this processor (or the
    compiler) gets wrong, no model runs."""
    mark = log.mark()
    file = _native.VirtualFile(_self_test_model().segments())
    params = cpu_params()
    params.load_mode = LOAD_MODE_NONE
    model = lib().llama_model_load_from_file_ptr(file.pointer, params)
    file.close()
    if not model:
        raise mark.error("load a model made to test it")
    context = _context(model, 2 * N_TRIED, mark)
    for n in (N_TRIED, 1):
        tokens = (ctypes.c_int32 * n)()
        if lib().llama_decode(context, lib().llama_batch_get_one(tokens, n)) != 0:
            raise mark.error("run a model made to test it")
    lib().llama_free(context)
    lib().llama_model_free(model)


def _self_test_model() -> VirtualGGUF:
    width = 256
    matrices = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    tensors = [_zeros("token_embd.weight", (width, width), 1), _zeros("output_norm.weight", (width,), F32)]
    tensors += [_zeros(f"blk.0.{name}_norm.weight", (width,), F32) for name in ("attn", "ffn")]
    tensors += [
        _zeros(f"blk.0.{name}.weight", (width, width), kind)
        for name, kind in zip(matrices, SELF_TEST_TYPES, strict=True)
    ]
    sizes = {"block_count": 1, "context_length": 256, "embedding_length": width, "feed_forward_length": width}
    sizes |= {"attention.head_count": 4, "vocab_size": width}
    texts = {"general.architecture": "llama", "tokenizer.ggml.model": "no_vocab"}
    records: list[bytes | memoryview] = [
        string(key) + STRING.to_bytes(4, "little") + string(value) for key, value in texts.items()
    ]
    records += [scalar_record(f"llama.{key}", UINT32, "I", value) for key, value in sizes.items()]
    records.append(scalar_record("llama.attention.layer_norm_rms_epsilon", FLOAT32, "f", 1e-5))
    return VirtualGGUF(version=3, alignment=32, records=records, tensors=tensors)


def _zeros(name: str, shape: tuple[int, ...], kind: int) -> VirtualTensor:
    return VirtualTensor(name, shape, kind, tensor_bytes(shape, kind))


# -- the file --------------------------------------------------------------------------------------------------------


def _try_file(path: str, k: int, log: _Log) -> None:
    """All that llama.cpp does with a file but for reading its weights: tensors, graphs, vocabulary."""
    with ModelFile(path) as file:
        spec = read_spec(file)
        if k == spec.n_layers:
            _try_vocabulary_alone(file, log)
            return
        mark = log.mark()
        with unloaded(file, spec, k) as model:
            log.mark()
            _check_kind(file, model)
            context = _context(model, min(max(spec.n_ctx_train, 256), 1 << 17), mark)
            remembers = bool(lib().llama_get_memory(context))
            lib().llama_free(context)
            if not remembers:
                raise UnsupportedError(f"{file.path} is a model for embeddings: it continues no text.")
            _try_vocabulary(file, model)
        if spec.unsupported is not None:
            _try_token(file, log)


def _try_token(file: ModelFile, log: _Log) -> None:
    """Compute a token with the weights themselves, which are mapped: they will be in the page cache when the program
    reads them."""
    params = cpu_params()
    params.use_extra_bufts = False  # weights in another order would be a copy
    mark = log.mark()
    model = load_files([shard.path for shard in file.shards], params)
    if model is None:
        raise mark.error(f"load {file.path.name}")
    context = _context(model, 256, mark, usable_cores())
    token = (ctypes.c_int32 * 1)(max(0, lib().llama_vocab_bos(lib().llama_model_get_vocab(model))))
    if lib().llama_decode(context, lib().llama_batch_get_one(token, 1)) != 0:
        raise mark.error("compute a token")
    lib().llama_free(context)
    lib().llama_model_free(model)


def _check_kind(file: ModelFile, model: int) -> None:
    """Refuse what `llama_decode` alone cannot run. Raises UnsupportedError."""
    if lib().llama_model_has_encoder(model) or not lib().llama_model_has_decoder(model):
        raise UnsupportedError(f"{file.path} is a model with an encoder ({file.architecture}): it cannot be run here.")
    if lib().llama_model_is_diffusion(model):
        raise UnsupportedError(f"{file.path} is a diffusion model ({file.architecture}): it cannot be run here.")


def _context(model: int, n_ctx: int, mark: LogMark, n_threads: int = 1) -> int:
    params = lib().llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, N_TRIED, N_TRIED
    params.n_threads = params.n_threads_batch = n_threads
    params.n_outputs_max = 1
    params.offload_kqv = params.op_offload = params.swa_full = False
    context = lib().llama_init_from_model(model, params)
    if not context:
        raise mark.error("set up its context")
    return int(context)


def _try_vocabulary_alone(file: ModelFile, log: _Log) -> None:
    params = cpu_params()
    params.vocab_only = True
    mark = log.mark()
    model = lib().llama_model_load_from_file(os.fsencode(file.path), params)
    if not model:
        raise mark.error(f"load the vocabulary of {file.path.name}")
    _try_vocabulary(file, model)
    lib().llama_model_free(model)


def _try_vocabulary(file: ModelFile, model: int) -> None:
    """Every token as text, and every byte as tokens, the ways the program does it."""
    vocab = lib().llama_model_get_vocab(model)
    n = int(lib().llama_vocab_n_tokens(vocab))
    if n == 0 or lib().llama_vocab_type(vocab) == 0:
        raise BadFileError(f"{file.path} has no vocabulary: it cannot read or write text.")
    text = TEXT.encode()
    room = 4 * len(text)
    tokens = (ctypes.c_int32 * max(room, n))(*range(n))
    for special in (False, True):
        size = 32 * n
        while True:
            out = ctypes.create_string_buffer(size)
            used = lib().llama_detokenize(vocab, tokens, n, out, size, special, special)
            if used >= 0:
                break
            if -used <= size:
                raise EngineError("llama.cpp could not spell the tokens of its vocabulary.")
            size = -used
    for special in (False, True):
        lib().llama_tokenize(vocab, text, len(text), tokens, room, special, special)


if __name__ == "__main__":
    main()
