"""A model opened by llama.cpp without its weights: enough for the context, its graphs and the vocabulary."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import fsencode
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid import _native
from hybrid.model.file import ModelFile
from hybrid.tail.llama import LogMark, lib

if TYPE_CHECKING:
    from hybrid.model.spec import ModelSpec

LOAD_MODE_NONE = 0
SPLIT_MODE_NONE = 0
NO_GPU = -1


def cpu_params() -> Any:
    """llama.cpp's parameters for a model on the CPU, whatever the library was built with."""
    params = lib().llama_model_default_params()
    params.n_gpu_layers = 0
    params.split_mode = SPLIT_MODE_NONE
    params.main_gpu = NO_GPU
    return params


def load_files(paths: Sequence[Path], params: Any) -> int | None:
    """The handle of a llama_model from a file, or from all shards of one; None where llama.cpp says no."""
    names = [fsencode(path) for path in paths]
    if len(names) == 1:
        handle = lib().llama_model_load_from_file(names[0], params)
    else:
        handle = lib().llama_model_load_from_splits((ctypes.c_char_p * len(names))(*names), len(names), params)
    return int(handle) if handle else None


@contextmanager
def unloaded(file: ModelFile, spec: ModelSpec, k: int) -> Iterator[int]:
    """The handle of a llama_model with layers k.. of `file`; its tensors have shapes and no memory.

    Raises UnsupportedError for a k that is not allowed, EngineError or OutOfMemoryError with llama.cpp's own reason.
    """
    params = cpu_params()
    params.no_alloc, params.load_mode = True, LOAD_MODE_NONE
    log = LogMark()
    if k == 0:
        handle = lib().llama_model_load_from_file(fsencode(file.path), params)
    else:
        from hybrid.tail.slice import tail_slice  # numpy, which a whole file does not need

        virtual = _native.VirtualFile(tail_slice(file, spec, k).segments())
        handle = lib().llama_model_load_from_file_ptr(virtual.pointer, params)
        virtual.close()
    if not handle:
        raise log.error(f"open {file.path.name} without loading it")
    try:
        yield handle
    finally:
        lib().llama_model_free(handle)
