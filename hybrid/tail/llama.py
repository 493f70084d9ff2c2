"""The only door to llama.cpp: loads llama-cpp-python's ctypes bindings, checks that they are what we were written for,
and keeps llama.cpp's log instead of letting it print.

Handles (model, context, vocabulary, memory) are plain ints, as in the bindings.
"""

from __future__ import annotations

import ctypes
import re
import threading
from functools import cache
from typing import Any

from hybrid import _native
from hybrid.errors import EngineError, HostMemoryError, HybridError, OutOfMemoryError, UnsupportedError
from hybrid.tail.bindings import import_bindings

LLAMA_CPP_PYTHON = "0.3.36"
"""The release whose structs and symbols this package is written for; `pyproject.toml` pins the same."""

_REMEDY = f"install it with `pip install llama-cpp-python=={LLAMA_CPP_PYTHON}`"

WARN, ERROR = 3, 4
"""ggml_log_level."""

# What a release with other structs would not pass: their sizes, some offsets, and the defaults that the library writes.
_SIZES = {"llama_model_params": 80, "llama_context_params": 160, "llama_batch": 56, "llama_token_data_array": 32}
_OFFSETS = {
    "llama_model_params": {
        "n_gpu_layers": 16,
        "main_gpu": 32,
        "progress_callback": 48,
        "vocab_only": 72,
        "load_mtp": 77,
    },
    "llama_context_params": {"n_threads": 28, "flash_attn_type": 52, "cb_eval": 88, "type_k": 104, "kv_unified": 133},
    "llama_batch": {"token": 8, "embd": 16, "pos": 24, "n_seq_id": 32, "seq_id": 40, "logits": 48},
    "llama_token_data_array": {"size": 8, "selected": 16, "sorted": 24},
}
_MODEL_DEFAULTS = {
    "devices": None,
    "tensor_buft_overrides": None,
    "n_gpu_layers": -1,
    "split_mode": 1,
    "load_mode": -1,
    "lazy_mode": 1,
    "main_gpu": 0,
    "progress_callback_user_data": None,
    "vocab_only": False,
    "check_tensors": False,
    "use_extra_bufts": True,
    "no_host": False,
    "no_alloc": False,
    "load_mtp": False,
}
_CONTEXT_DEFAULTS = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_outputs_max": 0,
    "n_threads": 4,
    "n_threads_batch": 4,
    "flash_attn_type": -1,
    "rope_freq_base": 0.0,
    "yarn_ext_factor": -1.0,
    "defrag_thold": -1.0,
    "cb_eval_user_data": None,
    "type_k": 1,
    "type_v": 1,
    "abort_callback_data": None,
    "embeddings": False,
    "offload_kqv": True,
    "op_offload": True,
    "swa_full": True,
    "kv_unified": False,
    "n_samplers": 0,
    "ctx_other": None,
}
_SYMBOLS = (
    "llama_backend_init",
    "llama_log_set",
    "llama_model_load_from_file",
    "llama_model_load_from_splits",
    "llama_model_load_from_file_ptr",
    "llama_model_free",
    "llama_init_from_model",
    "llama_free",
    "llama_decode",
    "llama_get_logits",
    "llama_get_memory",
    "llama_memory_seq_rm",
    "llama_memory_seq_cp",
    "llama_memory_seq_pos_min",
    "llama_memory_seq_pos_max",
    "llama_state_seq_get_size",
    "llama_state_seq_get_data",
    "llama_state_seq_set_data",
    "llama_set_n_threads",
    "llama_n_batch",
    "llama_n_ctx_seq",
    "llama_model_n_swa",
    "llama_model_is_recurrent",
    "llama_model_is_hybrid",
    "llama_model_n_embd_inp",
    "llama_model_get_vocab",
    "llama_vocab_n_tokens",
    "llama_tokenize",
    "llama_detokenize",
    "llama_token_to_piece",
    "llama_vocab_get_attr",
    "llama_vocab_is_eog",
    "llama_vocab_is_control",
    "llama_model_chat_template",
    "llama_sampler_chain_init",
    "llama_sampler_sample",
    "llama_sampler_apply",
)


@cache
def lib() -> Any:
    """llama-cpp-python's ctypes module, checked, with llama.cpp's log silenced and its backend ready.

    Imported on first use. Raises UnsupportedError in one sentence where it is missing or is
    another release than the one we pin.
    """
    try:
        bindings, version = import_bindings()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise UnsupportedError(f"llama-cpp-python cannot be loaded ({error}); {_REMEDY}.") from error
    check_abi(bindings, version)
    _keep_log(bindings)
    bindings.llama_backend_init()
    return bindings


def _keep_log(bindings: Any) -> None:
    """Have llama.cpp log to us."""
    bindings.llama_log_set(ctypes.cast(_native.log_callback(), bindings.llama_log_callback), None)


def check_abi(bindings: Any, version: str) -> None:
    """Compare the bindings with what this package relies on.

    We pass structs by value, so another layout would be memory corruption, not an error.
    Raises UnsupportedError that names the first difference and the remedy.
    """
    difference = _difference(bindings, version)
    if difference:
        raise UnsupportedError(
            f"This version of hybrid needs llama-cpp-python {LLAMA_CPP_PYTHON}, but {difference}; {_REMEDY}."
        )


def _difference(bindings: Any, version: str) -> str | None:
    if version != LLAMA_CPP_PYTHON:
        return f"{version} is installed"
    for symbol in _SYMBOLS:
        if not hasattr(bindings, symbol):
            return f"the installed one lacks {symbol}"
    for name, size in _SIZES.items():
        struct = getattr(bindings, name, None)
        if struct is None or ctypes.sizeof(struct) != size:
            return f"{name} has another size in the installed one"
        for field, offset in _OFFSETS[name].items():
            if getattr(getattr(struct, field, None), "offset", None) != offset:
                return f"{name}.{field} lies elsewhere in the installed one"
    for made, expected in (
        (bindings.llama_model_default_params(), _MODEL_DEFAULTS),
        (bindings.llama_context_default_params(), _CONTEXT_DEFAULTS),
    ):
        for field, value in expected.items():
            found = getattr(made, field)
            if found != value:
                return f"its library's default for {type(made).__name__}.{field} is {found!r}, not {value!r}"
    return None


@cache
def decode_address() -> int:
    """Where `llama_decode` is, for `_native.decode`."""
    return ctypes.cast(lib().llama_decode, ctypes.c_void_p).value or 0


def address(pointer: int, kind: Any) -> Any:
    """An address as a ctypes pointer or callback of type `kind`."""
    return ctypes.cast(pointer, kind)


class LogMark:
    """llama.cpp's log lines of the calling thread from now on: why something failed, and what it allocated."""

    def __init__(self) -> None:
        _keep_log(lib())  # again: llama-cpp-python's high-level package takes the log over when a program imports it
        self._count = _native.log_count()
        self._thread = threading.get_ident()

    def lines(self, least_level: int = 0) -> list[str]:
        """The lines of at least that level, in order."""
        since = _native.log_since(self._count)
        return [
            text.decode(errors="replace")
            for level, thread, text in since
            if thread == self._thread and level >= least_level
        ]

    def buffer_bytes(self, kind: str) -> int:
        """Bytes of all buffers of a kind (`model`, `KV`, `compute`, `output`) that were reported, to 0.01 MiB each."""
        found = (re.search(rf"\b{kind} buffer size = *([\d.]+) MiB", line) for line in self.lines())
        return sum(round(float(match[1]) * 2**20) for match in found if match)

    def error(self, doing: str, thrown: str = "") -> HybridError:
        """The failure of `doing` as an exception, with what llama.cpp threw, or its own last words."""
        lines = [thrown] if thrown else [_without_function(line) for line in self.lines(ERROR)]
        # The last lines only repeat that it failed; the first says why.
        reason = lines[0] if lines else "it gave no reason"
        sentence = f"llama.cpp could not {doing}: {reason.rstrip('. ')}."
        said = " ".join(lines)
        if re.search(r"(failed|unable|cannot) to allocate|bad_alloc|out of memory", said):
            full = OutOfMemoryError if re.search("on device|[Dd]evice memory", said) else HostMemoryError
            return full(sentence)
        return EngineError(sentence)


def _without_function(line: str) -> str:
    """`load_tensors: error loading model: missing tensor 'x'` -> `missing tensor 'x'`."""
    return re.sub(r"^\w+: *(error loading model(?: \w+)?: *)*", "", line)
