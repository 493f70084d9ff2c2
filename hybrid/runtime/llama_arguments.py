"""The constructor arguments of `llama_cpp.Llama`: which of them `Hybrid` takes, and what it says about the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

from hybrid.errors import BadRequestError, UnsupportedError

_KV_TYPES = {None: "f16", 0: "f32", 1: "f16", 8: "q8_0", 30: "bf16"}
"""ggml_type -> our name."""
_ANY = object()
"""Takes any value: it changes nothing here, or nothing that shows."""
_AS_THEY_ARE: dict[str, tuple[Any, ...] | object] = {
    "logits_all": _ANY,  # logprobs need no setting here
    "flash_attn": _ANY,  # llama.cpp uses it wherever it can
    "no_perf": _ANY,
    "use_mmap": (True,),
    "use_mlock": (False,),
    "vocab_only": (False,),
    "embedding": (False,),
    "split_mode": (1, 0),
    "main_gpu": (0,),
    "tensor_split": (None,),
    "kv_overrides": (None,),
    "rope_scaling_type": (None, -1),
    "pooling_type": (-1,),
    "attention_type": (-1,),
    "rope_freq_base": (0, 0.0),
    "rope_freq_scale": (0, 0.0),
    "yarn_ext_factor": (-1.0,),
    "yarn_attn_factor": (1.0,),
    "yarn_beta_fast": (32.0,),
    "yarn_beta_slow": (1.0,),
    "yarn_orig_ctx": (0,),
    "offload_kqv": (True,),
    "op_offload": (None, False),
    "swa_full": (None, False),
    "lora_base": (None,),
    "lora_scale": (1.0,),
    "lora_path": (None,),
    "numa": (False, 0),
    "chat_format": (None,),
    "chat_handler": (None,),
    "additional_files": (None,),  # of from_pretrained, which fetches all shards
    "local_dir": (None,),
    "local_dir_use_symlinks": _ANY,
    "cache_dir": (None,),
    "draft_model": (None,),
    "tokenizer": (None,),
}
"""What may be given because it is so anyway. Another value is refused."""
_INSTEAD = {
    "embedding": "it makes no embeddings",
    "chat_format": "give chat_template, such as chatml; by default it is the model's own",
    "offload_kqv": "the KV cache of the layers on the GPU is there too",
    "local_dir": "HF_HOME says where fetched files are kept",
    "cache_dir": "HF_HOME says where fetched files are kept",
    "n_threads_batch": "n_threads is for both",
}


@dataclass(frozen=True)
class LlamaArguments:
    """Those of its arguments that mean something here."""

    kv_dtype: str | None = None
    repeat_last_n: int | None = None
    spm_infill: bool = False
    offload_kqv: bool = True


def read_llama_arguments(given: Mapping[str, Any], engine: str, n_threads: int | None) -> LlamaArguments:
    """What `given` asks for beside `Hybrid`'s own arguments; `engine` and `n_threads` are two of those.

    Raises TypeError for a name that neither class knows, UnsupportedError for what this one cannot do.
    """
    own = {"type_k", "type_v", "spm_infill"}
    if engine == "llama.cpp":
        own.add("offload_kqv")
    if given.get("n_threads_batch") in (None, n_threads):
        own.add("n_threads_batch")
    for name, value in given.items():
        if name == "last_n_tokens_size":
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise BadRequestError(f"last_n_tokens_size must be a whole number of 0 or more, not {value!r}.")
        elif name in own:
            continue
        elif name in _AS_THEY_ARE:
            allowed = _AS_THEY_ARE[name]
            if isinstance(allowed, tuple) and not any(value is a or value == a for a in allowed):
                raise _refusal(name, value)
        elif name in _INSTEAD:
            raise _refusal(name, value)
        else:
            raise TypeError(f"Hybrid() got an unexpected keyword argument {name!r}")
    return LlamaArguments(
        _kv_dtype(given.get("type_k"), given.get("type_v")),
        given.get("last_n_tokens_size"),
        spm_infill=bool(given.get("spm_infill", False)),
        offload_kqv=bool(given.get("offload_kqv", True)),
    )


def _kv_dtype(k: Any, v: Any) -> str | None:
    """The KV cache's type by ggml's numbers for its two halves; None where neither is given."""
    if not all(isinstance(kind, (int, NoneType)) and kind in _KV_TYPES for kind in (k, v)):
        raise UnsupportedError("type_k and type_v must be f32 (0), f16 (1), q8_0 (8) or bf16 (30).")
    if _KV_TYPES[k] != _KV_TYPES[v]:
        raise UnsupportedError("type_k and type_v must be the same: the KV cache has one type here.")
    return None if k is None and v is None else _KV_TYPES[k]


def _refusal(name: str, value: Any) -> UnsupportedError:
    why = _INSTEAD.get(name, "only llama_cpp.Llama has it")
    return UnsupportedError(f"Hybrid cannot take {name}={value!r:.40}: {why}.")
