"""llama.cpp's own offload: where llama-cpp-python was built with a GPU, llama.cpp keeps layers there itself.

It counts them from the last one, and its `n_gpu_layers` of L + 1 takes the output head along. For comparison, and for
architectures that our head does not know. Its VRAM is llama.cpp's business: the Ledger knows only what the same layers
take on the host, and the cost model what as many take in a split.
"""

from __future__ import annotations

import re
from dataclasses import replace

from hybrid.errors import BadRequestError, UnsupportedError
from hybrid.model.spec import ModelSpec
from hybrid.model.splits import find_splits
from hybrid.schedule import facts
from hybrid.schedule.budget import Budget, mib
from hybrid.schedule.ledger import CUDA_CONTEXT_BYTES, ledger_of
from hybrid.schedule.placement import ENGINES, KVStrategy, Placement

NOT_BUILT = (
    "This llama-cpp-python was built without a GPU, so llama.cpp can keep no layers there; use -ngl 0 or another "
    "--engine, or build it anew, with the CUDA toolkit: CMAKE_ARGS=-DGGML_CUDA=on pip install --no-deps --no-cache-dir "
    "--force-reinstall --no-binary llama-cpp-python llama-cpp-python=={version}"
)


def checked_engine(engine: str) -> str:
    """`engine`, if it is one."""
    if engine not in ENGINES:
        raise BadRequestError(f"engine must be one of {', '.join(ENGINES)}, not {engine!r}.")
    return engine


def asked_layers(asked: int | str, spec: ModelSpec) -> int:
    """llama.cpp's `n_gpu_layers` for what was asked of it: a number, "all", or "auto", which is all where it can.

    Raises UnsupportedError where there is something to offload and no GPU that llama.cpp was built for.
    """
    word = str(asked).strip().lower()
    if word not in ("all", "auto") and not re.fullmatch("-1|[0-9]{1,9}", word):
        raise BadRequestError(f"n_gpu_layers must be a number, 'all' or 'auto', not {asked!r}.")
    if word == "auto" and not supports_offload():
        return 0
    layers = spec.n_layers if word in ("all", "auto", "-1") else int(word)
    if layers == 0:
        return 0
    if not supports_offload():
        from importlib.metadata import version  # takes longer to import than what is said here every day

        raise UnsupportedError(NOT_BUILT.format(version=version("llama-cpp-python")) + ".")
    return layers if layers < spec.n_layers else spec.n_layers + 1


def auto_layers(spec: ModelSpec, base: Placement, reserve: int) -> tuple[int, str]:
    """What `auto` gives to llama.cpp, and why: all of a model that cannot be split, where a GPU has room; else 0."""
    if find_splits(spec).allowed != (0,) or not (gpus := facts.gpus()) or not supports_offload():
        return 0, ""
    need = own_vram_bytes(spec, replace(base, n_gpu_layers=0, llama_gpu_layers=spec.n_layers + 1, offload_kqv=True))
    free = gpus[0].free_bytes - reserve
    if need > free:
        return 0, f"llama.cpp could run this model on the GPU, but it needs {mib(need)} and {mib(free)} are free."
    return (
        spec.n_layers + 1,
        "This model cannot be split: llama.cpp runs all of it on its own GPU (--engine llama.cpp).",
    )


def own_vram_bytes(spec: ModelSpec, placement: Placement) -> int:
    """About what llama.cpp holds on its GPU: what the same layers take on the host, and a context of the driver's."""
    layers = min(placement.llama_gpu_layers, spec.n_layers)
    if not layers:
        return 0
    books = ledger_of(spec, placement).host
    weights = sum(books.static.layers[-layers:])
    if placement.llama_gpu_layers > spec.n_layers:
        weights += books.static.output_head
    kv = sum(books.dynamic.kv[-layers:]) if placement.offload_kqv else 0
    return weights + kv + books.dynamic.compute + CUDA_CONTEXT_BYTES


def own_candidates(spec: ModelSpec, base: Placement, budget: Budget) -> list[Placement]:
    """Layers on llama.cpp's GPU with their KV cache, as many as fit; and more than that with the cache in RAM. None
    where llama.cpp has no GPU. `base` is the placement with none."""
    if not (facts.gpus() and supports_offload()):
        return []

    def fits(p: Placement) -> bool:
        vram = budget.vram_bytes
        return (vram is None or own_vram_bytes(spec, p) <= vram) and budget.shortfall(ledger_of(spec, p)) is None

    def at(layers: int, offload_kqv: bool) -> Placement:
        return replace(base, n_gpu_layers=0, llama_gpu_layers=layers, offload_kqv=offload_kqv)

    counts = [*range(1, spec.n_layers), spec.n_layers + 1]
    beside = [layers for layers in counts if fits(at(layers, True))]
    more = [layers for layers in counts if layers > max(beside, default=0) and fits(at(layers, False))]
    return [at(layers, True) for layers in beside] + [at(layers, False) for layers in more]


def stand_in(spec: ModelSpec, placement: Placement) -> Placement:
    """The split that is taken for llama.cpp's own offload where seconds are predicted: as many layers on the GPU, their
    KV cache there or in RAM, where llama.cpp attends to it. Any other placement is its own."""
    layers = min(placement.llama_gpu_layers, spec.n_layers)
    if not layers:
        return placement
    kv: KVStrategy = "device" if placement.offload_kqv else "attend"
    return replace(placement, n_gpu_layers=layers, llama_gpu_layers=0, kv=kv, kv_budget=None, offload_kqv=False)


def supports_offload() -> bool:
    """Whether llama.cpp was built with a GPU backend and sees a device of it."""
    from hybrid.tail.llama import lib  # as torch elsewhere: imported only where the answer depends on it

    return bool(lib().llama_supports_gpu_offload())
