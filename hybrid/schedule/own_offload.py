"""llama.cpp's own offload: where llama-cpp-python was built with a GPU, llama.cpp keeps layers there itself.

It counts them from the last one, and its `n_gpu_layers` of L + 1 takes the output head along. For comparison, and for
architectures that our head does not know. Its VRAM is llama.cpp's business: no Ledger foresees it.
"""

from __future__ import annotations

import re

from hybrid.errors import BadRequestError, UnsupportedError
from hybrid.model.spec import ModelSpec
from hybrid.model.splits import find_splits
from hybrid.schedule import facts
from hybrid.schedule.budget import mib
from hybrid.schedule.ledger import CUDA_CONTEXT_BYTES, ledger_of
from hybrid.schedule.placement import ENGINES, Placement

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
    books = ledger_of(spec, base).host
    need = books.static.n_bytes + sum(books.dynamic.kv) + books.dynamic.compute + CUDA_CONTEXT_BYTES
    free = gpus[0].free_bytes - reserve
    if need > free:
        return 0, f"llama.cpp could run this model on the GPU, but it needs {mib(need)} and {mib(free)} are free."
    return (
        spec.n_layers + 1,
        "This model cannot be split: llama.cpp runs all of it on its own GPU (--engine llama.cpp).",
    )


def supports_offload() -> bool:
    """Whether llama.cpp was built with a GPU backend and sees a device of it."""
    from hybrid.tail.llama import lib  # as torch elsewhere: imported only where the answer depends on it

    return bool(lib().llama_supports_gpu_offload())
