"""llama.cpp alone on a whole file: the oracle that tests, scripts and self-checks compare with."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hybrid.schedule.placement import KVDtype, Placement
from hybrid.tail.context import Context, Float32s, Int32s, context_params
from hybrid.tail.llama import lib
from hybrid.tail.model import open_files
from hybrid.tail.vocab import Vocabulary

FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
"""`llama_flash_attn_type`."""


class Reference(Context):
    """The whole model in one llama.cpp context, with room for the logits of every token of a batch.

    `taps` names tensors of the graph that are collected while it evaluates; `l_out-3` is the residual stream after
    layer 3. Use as a context manager. Errors as `Tail`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        n_ctx: int = 1024,
        n_batch: int | None = None,
        n_ubatch: int = 512,
        n_sequences: int = 1,
        n_threads: int = 1,
        kv_dtype: KVDtype = "f16",
        flash_attn: Literal["auto", "off", "on"] = "auto",
        swa_full: bool = False,
        kv_unified: bool = False,
        n_outputs_max: int | None = None,
        taps: Iterable[str] = (),
    ) -> None:
        placement = Placement(
            device="cpu",
            n_gpu_layers=0,
            n_ctx=n_ctx,
            n_batch=n_batch or n_ctx,
            n_ubatch=n_ubatch,
            n_sequences=n_sequences,
            kv_dtype=kv_dtype,
            swa_full=swa_full,
            kv_unified=kv_unified,
            n_threads_tail=n_threads,
            n_threads_tail_batch=n_threads,
        )
        model = open_files([Path(path)])
        try:
            params = context_params(placement, n_outputs_max or placement.n_batch)
            params.flash_attn_type = FLASH_ATTN[flash_attn]
            self._tap = Tap(taps)
            if self._tap.names:
                params.cb_eval = self._tap.callback
            super().__init__(model, params)
            self.vocabulary = Vocabulary(model)
            self._thread = ThreadPoolExecutor(1, "hybrid-reference")
            self._thread.submit(int).result()  # a signal amid the start of a thread would leave one that is not known
        except BaseException:
            model.close()
            raise

    def evaluate(self, tokens: Sequence[int] | npt.NDArray[Any], seq: int = 0, chunk: int | None = None) -> Float32s:
        """Append `tokens` to `seq` in chunks of at most `chunk` (n_batch if None); all their logits [n, n_vocab]."""
        ids = np.asarray(tokens, np.int32)
        step = min(chunk or self.n_batch, self.n_batch)
        rows = []
        for start in range(0, len(ids), step):
            part = ids[start : start + step]
            first = self.n_tokens(seq)
            where = np.arange(first, first + len(part), dtype=np.int32)
            self.decode(part, where, np.full(len(part), seq, np.int32), np.ones(len(part), np.bool_))
            rows.append(self.logits_block().copy())
        return np.concatenate(rows)

    def decode(
        self, inputs: Int32s | Float32s, positions: Int32s, seqs: Int32s, outputs: npt.NDArray[np.bool_]
    ) -> None:
        """As `Context.decode`, on a thread of its own: Python raises what a signal means (Ctrl-C, SIGTERM) in the main
        thread, and there it would be lost where it fell into a callback of the taps. This one aborts and passes it on.
        """
        try:
            self._thread.submit(super().decode, inputs, positions, seqs, outputs).result()
        except (KeyboardInterrupt, SystemExit):
            self.abort()
            self._thread.submit(int).result()  # when the evaluation has ended
            raise

    def tapped(self, name: str) -> Float32s:
        """What tensor `name` has held since the last call: [n_tokens, its width], in llama.cpp's order, which is the
        batch's order as long as there is one sequence."""
        return self._tap.take(name)

    def hidden(self, layer: int) -> Float32s:
        """The residual stream after `layer`, as `tapped(f"l_out-{layer}")`."""
        return self.tapped(f"l_out-{layer}")

    def close(self) -> None:
        """Free the context and the model. Harmless when repeated."""
        self._thread.shutdown()
        super().close()
        self.model.close()

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Tap:
    """Collects F32 tensors by name through llama.cpp's evaluation callback."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(name.encode() for name in names)
        self._chunks: dict[bytes, list[Float32s]] = {name: [] for name in self.names}
        ggml = ctypes.CDLL(lib()._lib._name)  # an instance of our own: argument types are set on it
        self._name_of = ggml.ggml_get_name
        self._name_of.restype, self._name_of.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        self._bytes_of = ggml.ggml_nbytes
        self._bytes_of.restype, self._bytes_of.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
        self._get = ggml.ggml_backend_tensor_get
        self._get.restype, self._get.argtypes = (
            None,
            [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t],
        )
        self.callback = lib().ggml_backend_sched_eval_callback(self._on_tensor)
        """Keep the Tap alive as long as the context."""

    def _on_tensor(self, tensor: int, ask: bool, _: Any) -> bool:
        name = self._name_of(tensor)
        if name not in self.names:
            return not ask
        if not ask:
            values = np.empty(self._bytes_of(tensor) // 4, np.float32)
            self._get(tensor, values.ctypes.data, 0, values.nbytes)
            self._chunks[name].append(values.reshape(-1, self._row_length(tensor)))
        return True

    def _row_length(self, tensor: int) -> int:
        """ne[0]: struct ggml_tensor begins with its type (int), its buffer (pointer) and ne[4]."""
        return ctypes.c_int64.from_address(tensor + 16).value

    def take(self, name: str) -> Float32s:
        chunks, self._chunks[name.encode()] = self._chunks[name.encode()], []
        return np.concatenate(chunks)
