"""A loaded llama_model: on the CPU whatever llama-cpp-python was built with, interruptible while it loads."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hybrid import _native
from hybrid.errors import Cancelled, HybridError
from hybrid.tail.llama import LogMark, lib
from hybrid.tail.unloaded import LOAD_MODE_NONE, cpu_params, load_files
from hybrid.tail.virtual_gguf import VirtualGGUF

POLL_S = 0.05
"""How often a load reports progress and looks whether it was cancelled."""


class Model:
    """A llama_model, freed once by `close`. Whoever uses `handle` keeps the Model alive."""

    def __init__(self, handle: int, model_bytes: int) -> None:
        self.handle = handle
        self.model_bytes = model_bytes
        """Bytes of its weight buffers as llama.cpp reports them; mapped files count in full."""

    @property
    def n_vocab(self) -> int:
        """Tokens in the vocabulary."""
        return int(lib().llama_vocab_n_tokens(lib().llama_model_get_vocab(self.handle)))

    @property
    def n_embd(self) -> int:
        """Values in one row of its input."""
        return int(lib().llama_model_n_embd_inp(self.handle))

    def close(self) -> None:
        """Free the model; every context made from it must be gone."""
        handle, self.handle = self.handle, 0
        if handle:
            lib().llama_model_free(handle)


def open_files(
    paths: Sequence[Path],
    *,
    vocab_only: bool = False,
    gpu_layers: int = 0,
    progress: Callable[[float], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Model:
    """llama.cpp's ordinary load of a file, or of all shards of one, by mmap; the last `gpu_layers` on its own GPU.

    `progress` gets fractions and `cancelled` is asked, both on the calling thread, about twenty times a second.
    Raises Cancelled (Ctrl-C included), OutOfMemoryError, EngineError with llama.cpp's own reason.
    """
    params = cpu_params() if gpu_layers == 0 else lib().llama_model_default_params()
    params.n_gpu_layers = gpu_layers
    params.vocab_only = vocab_only
    return _load(lambda: load_files(paths, params), params, f"load {paths[0].name}", progress, cancelled)


def open_virtual(
    virtual: VirtualGGUF,
    name: str,
    *,
    progress: Callable[[float], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Model:
    """Load a virtual file: nothing is written, and the weights are read once, into anonymous memory.

    As `open_files`; `name` is what errors call it. The files behind it must be open only during this call.
    """
    params = cpu_params()
    params.load_mode = LOAD_MODE_NONE
    file = _native.VirtualFile(virtual.segments())
    try:
        return _load(
            lambda: _handle(lib().llama_model_load_from_file_ptr(file.pointer, params)),
            params,
            f"load {name}",
            progress,
            cancelled,
        )
    except HybridError as error:
        if file.error and not isinstance(error, Cancelled):
            raise type(error)(f"{name} could not be read: {file.error}.") from error
        raise
    finally:
        file.close()  # llama.cpp does not own it


def _handle(pointer: Any) -> int | None:
    return int(pointer) if pointer else None


def _load(
    load: Callable[[], int | None],
    params: Any,
    doing: str,
    progress: Callable[[float], None] | None,
    cancelled: Callable[[], bool] | None,
) -> Model:
    """Run `load` on a thread of its own, so that this one can report, listen to `cancelled`, and receive Ctrl-C."""
    interrupt = _native.Interrupt()
    params.progress_callback = ctypes.cast(_native.Interrupt.on_progress, lib().llama_progress_callback)
    params.progress_callback_user_data = interrupt.pointer
    result: list[Model] = []
    failure: list[BaseException] = []

    def work() -> None:
        log = LogMark()
        try:
            handle = load()
            if handle is None:
                failure.append(log.error(doing))
            else:
                result.append(Model(handle, log.buffer_bytes("model")))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work, name="hybrid-load", daemon=True)
    thread.start()
    try:
        running = True
        while running:  # once more after the end, so that the last progress and a late Ctrl-C are seen
            thread.join(POLL_S)
            running = thread.is_alive()
            if progress is not None:
                progress(interrupt.progress)
            if cancelled is not None and cancelled():
                interrupt.set()
    except BaseException as error:
        interrupt.set()
        _join(thread)
        for model in result:
            model.close()
        if isinstance(error, KeyboardInterrupt):
            raise Cancelled("Loading was interrupted.") from None
        raise
    if interrupt.is_set:
        for model in result:
            model.close()
        raise Cancelled("Loading was interrupted.")
    if failure:
        raise failure[0]
    return result[0]


def _join(thread: threading.Thread) -> None:
    """Wait for the thread, whatever the user presses: its callbacks point into objects of the caller."""
    while thread.is_alive():
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            thread.join()
