"""Request: what a person asked for, and whether it makes sense."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hybrid.errors import BadRequestError, UnsupportedError
from hybrid.model.spec import ModelSpec
from hybrid.model.splits import find_splits
from hybrid.schedule.budget import VRAM_RESERVE
from hybrid.schedule.placement import KV_DTYPES, KV_STRATEGIES, KVDtype, KVStrategy

KV_AVAILABLE: tuple[KVStrategy, ...] = KV_STRATEGIES
"""The strategies that the head has."""
MAX_N_THREADS = 512
"""GGML_MAX_N_THREADS in llama.cpp's ggml.h."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a person asked for; None means "you choose"."""

    n_gpu_layers: int | str = "auto"
    device: str | None = None
    n_ctx: int | None = None
    n_batch: int | None = None
    n_ubatch: int | None = None
    n_threads: int | None = None
    n_sequences: int | str = 1
    """Sequences at a time; "auto": as many as fit beside the context and the layers chosen for one."""
    most_sequences: int = 8
    """For "auto"."""
    n_draft: int = 0
    kv: str = "device"
    kv_dtype: str = "f16"
    kv_budget: int | None = None
    """Device bytes that `tiered` may use for K and V; None: the VRAM that is left."""
    kv_keep_sliding: bool = True
    engine: str = "auto"
    """Whose GPU layers `n_gpu_layers` are: "hybrid" (ours), "llama.cpp" (its own), or "auto"."""
    offload_kqv: bool = True
    """With llama.cpp's own GPU layers: whether their KV cache is there too."""
    vram_reserve: int = VRAM_RESERVE
    """Bytes of the free VRAM that `auto` leaves to the desktop."""


def positive(name: str, value: object, most: int = 2**31 - 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise BadRequestError(f"{name} must be a whole number between 1 and {most}, not {value!r}.")
    return value


def natural(name: str, value: object) -> int:
    return 0 if value == 0 and not isinstance(value, bool) else positive(name, value)


def checked_kv(request: Request) -> tuple[KVStrategy, KVDtype]:
    for strategy in KV_STRATEGIES:
        if strategy == request.kv:
            break
    else:
        raise BadRequestError(f"kv must be one of {', '.join(KV_STRATEGIES)}, not {request.kv!r}.")
    for dtype in KV_DTYPES:
        if dtype == request.kv_dtype:
            break
    else:
        raise BadRequestError(f"kv_dtype must be one of {', '.join(KV_DTYPES)}, not {request.kv_dtype!r}.")
    if strategy not in KV_AVAILABLE:
        raise UnsupportedError(f"The KV strategy {strategy!r} is not in this version; use --kv {KV_AVAILABLE[0]}.")
    return strategy, dtype


def checked_kv_budget(request: Request) -> int | None:
    budget = request.kv_budget
    if budget is None:
        return None
    if request.kv != "tiered":
        raise BadRequestError("kv_budget is what the device may hold of a tiered KV cache; use it with --kv tiered.")
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 0:
        raise BadRequestError(f"kv_budget must be a whole number of bytes, 0 or more, not {budget!r}.")
    return budget


def wanted_layers(asked: int | str, spec: ModelSpec) -> int | None:
    """The k asked for, clamped to L; None for auto. Raises where the architecture cannot be split there."""
    if isinstance(asked, str):
        word = asked.strip().lower()
        if word == "auto":
            return None
        if word == "all":
            asked = -1
        elif re.fullmatch("-?[0-9]+", word):
            asked = int(word)
        else:
            raise BadRequestError(f"n_gpu_layers must be a number, 'all' or 'auto', not {asked!r}.")
    if asked == -1:  # llama-cpp-python's "all"
        asked = spec.n_layers
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 0:
        raise BadRequestError(f"n_gpu_layers must be 0 or more, 'all' or 'auto', not {asked!r}.")
    k = min(asked, spec.n_layers)
    if refusal := find_splits(spec).refusal(k):
        raise UnsupportedError(f"This model cannot run with {k} layers on the GPU: {refusal}.")
    return k
