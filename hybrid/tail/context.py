"""A llama_context: evaluates batches and keeps their KV. What would make llama.cpp abort is refused before it can."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from hybrid import _native
from hybrid.errors import BadRequestError, Cancelled, HostMemoryError
from hybrid.schedule.placement import Placement
from hybrid.tail.llama import LogMark, decode_address, lib
from hybrid.tail.model import Model
from hybrid.tail.sequences import Sequences

KV_TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}
"""`ggml_type` numbers of the KV dtypes."""
NO_MEMORY, THROWN = -2, -1000
"""What a batch came to: llama.cpp's own number where a graph cannot be allocated, and one it has not."""
Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]


def context_params(placement: Placement, n_outputs_max: int) -> Any:
    """llama.cpp's parameters for the tail of `placement`, on the CPU whatever the library was built with, unless the
    placement gives llama.cpp layers on a GPU of its own."""
    params = lib().llama_context_default_params()
    params.n_ctx = placement.n_ctx * placement.n_sequences
    params.n_batch = placement.n_batch
    params.n_ubatch = min(placement.n_ubatch, placement.n_batch)
    params.n_seq_max = placement.n_sequences
    params.n_outputs_max = max(n_outputs_max, placement.n_sequences)
    params.n_threads = placement.n_threads_tail
    params.n_threads_batch = placement.n_threads_tail_batch
    params.type_k = params.type_v = KV_TYPES[placement.kv_dtype]  # llama.cpp turns flash attention on where V needs it
    params.offload_kqv, params.op_offload = placement.offload_kqv, placement.llama_gpu_layers > 0
    params.swa_full = placement.swa_full
    params.kv_unified = placement.kv_unified
    return params


class Context(Sequences):
    """A context of `model`. Freed once by `close`, before its model.

    Raises OutOfMemoryError or EngineError with llama.cpp's reason if it cannot be made.
    """

    def __init__(self, model: Model, params: Any) -> None:
        self.model = model
        self.n_vocab = model.n_vocab
        self.n_embd = model.n_embd
        handle = model.handle
        self.can_go_back = not (lib().llama_model_is_recurrent(handle) or lib().llama_model_is_hybrid(handle))
        """Whether a sequence can forget its last tokens; a recurrent state cannot."""
        self._open(params)

    def _open(self, params: Any) -> None:
        interrupt = _native.Interrupt()
        params.abort_callback = ctypes.cast(_native.Interrupt.on_abort, lib().ggml_abort_callback)
        params.abort_callback_data = interrupt.pointer
        log = LogMark()
        handle = lib().llama_init_from_model(self.model.handle, params)
        if not handle:
            raise log.error("set up its context")
        window = int(lib().llama_model_n_swa(self.model.handle))
        super().__init__(int(handle), int(params.n_seq_max), window, separate=not params.kv_unified)
        self._interrupt = interrupt  # llama.cpp keeps a pointer to it
        self.kv_bytes = log.buffer_bytes("KV") + log.buffer_bytes("RS")
        self.compute_bytes = log.buffer_bytes("compute")
        self.n_outputs_max = int(params.n_outputs_max)
        self.output_bytes = 4 * self.n_vocab * self.n_outputs_max
        self.n_batch = int(lib().llama_n_batch(self.context))
        self.n_ctx = int(lib().llama_n_ctx_seq(self.context))
        self._outputs = np.zeros(0, np.int64)
        self._make_batch()

    def _make_batch(self) -> None:
        """One llama_batch for the context's life; its arrays are ours, filled through numpy."""
        n = self.n_batch
        self._positions = np.zeros(n, np.int32)
        self._seqs = np.zeros(n, np.int32)
        self._n_seqs = np.ones(n, np.int32)
        self._flags = np.zeros(n, np.int8)
        self._seq_pointers = (self._seqs.ctypes.data + 4 * np.arange(n)).astype(np.uintp)
        self._batch = batch = lib().llama_batch()
        int32_p = ctypes.POINTER(ctypes.c_int32)
        batch.pos = ctypes.cast(self._positions.ctypes.data, int32_p)
        batch.n_seq_id = ctypes.cast(self._n_seqs.ctypes.data, int32_p)
        batch.seq_id = ctypes.cast(self._seq_pointers.ctypes.data, ctypes.POINTER(int32_p))
        batch.logits = ctypes.cast(self._flags.ctypes.data, ctypes.POINTER(ctypes.c_int8))

    # -- evaluation ----------------------------------------------------------------------------------------------

    def decode(
        self, inputs: Int32s | Float32s, positions: Int32s, seqs: Int32s, outputs: npt.NDArray[np.bool_]
    ) -> None:
        """Evaluate one batch: token ids [n], or hidden states [n, n_embd] float32, at `positions` of `seqs`, all [n].

        Each sequence's tokens must continue it in order. Logits are kept where `outputs` [n] is true.
        Raises BadRequestError for what llama.cpp would refuse or abort on, Cancelled after `abort`, HostMemoryError,
        EngineError otherwise. After any of them the batch's sequences are as before it, or empty where a sliding window
        has moved on: ask `n_tokens`.
        """
        n = len(positions)
        starts = self._check(n, inputs, positions, seqs, outputs)
        batch = self._batch
        if inputs.ndim == 1:
            rows = np.ascontiguousarray(inputs, np.int32)
            batch.token = ctypes.cast(rows.ctypes.data, ctypes.POINTER(ctypes.c_int32))
            batch.embd = None
        else:
            rows = np.ascontiguousarray(inputs, np.float32)
            batch.token = None
            batch.embd = ctypes.cast(rows.ctypes.data, ctypes.POINTER(ctypes.c_float))
        self._positions[:n] = positions
        self._seqs[:n] = seqs
        self._flags[:n] = outputs
        batch.n_tokens = n
        self._outputs = np.flatnonzero(outputs)
        log = LogMark()
        code, thrown = self._call_decode()
        if code == 0:
            self._copies_settled()
            return
        self._outputs = self._outputs[:0]
        for seq, start in starts.items():
            if self.n_tokens(seq) > start:
                self.trim(seq, start)
        if code == 2:
            self.withdraw_abort()
            raise Cancelled("The evaluation was interrupted.")
        if code == 1:
            raise BadRequestError(f"The KV cache has no room for {n} more tokens (context {self.n_ctx}).")
        if code == NO_MEMORY:
            raise HostMemoryError(
                f"The machine has no more memory to evaluate {n} tokens with; use a smaller batch (-b) or context (-c)."
            )
        raise log.error("evaluate the batch", thrown)

    def _call_decode(self) -> tuple[int, str]:
        """What `llama_decode` returns of the batch, and what it threw instead."""
        try:
            return _native.decode(decode_address(), self.context, ctypes.addressof(self._batch)), ""
        except MemoryError:
            return NO_MEMORY, ""
        except RuntimeError as error:
            return THROWN, str(error)

    def _check(self, n: int, inputs: Any, positions: Any, seqs: Any, outputs: Any) -> dict[int, int]:
        """What llama.cpp would abort on, refuse, or silently cut. Returns where each sequence of the batch begins."""
        if not 1 <= n <= self.n_batch:
            raise BadRequestError(f"A batch holds 1 to {self.n_batch} tokens, not {n}.")
        if len(inputs) != n or len(seqs) != n or len(outputs) != n:
            raise BadRequestError(
                f"A batch's arrays differ in length: {len(inputs)}, {n}, {len(seqs)} and {len(outputs)}."
            )
        if inputs.ndim == 1:
            if inputs.dtype.kind not in "iu" or inputs.min() < 0 or inputs.max() >= self.n_vocab:
                raise BadRequestError(f"Token ids must be whole numbers from 0 to {self.n_vocab - 1}.")
        elif inputs.shape != (n, self.n_embd):
            raise BadRequestError(f"Hidden states must be [{n}, {self.n_embd}], not {list(inputs.shape)}.")
        n_outputs = int(np.count_nonzero(outputs))
        if n_outputs > self.n_outputs_max:
            raise BadRequestError(
                f"{n_outputs} outputs are wanted at once, but there is room for {self.n_outputs_max}."
            )
        starts: dict[int, int] = {}
        for seq in dict.fromkeys(seqs.tolist()):
            self._check_seq(seq)
            own = positions if n == 1 else positions[seqs == seq]
            starts[seq] = start = self.n_tokens(seq)
            if int(own[0]) != start or (n > 1 and not np.array_equal(own, np.arange(start, start + len(own)))):
                raise BadRequestError(f"Sequence {seq} holds {start} tokens; a batch must continue it in order.")
        return starts

    def abort(self) -> None:
        """From any thread: stop the evaluation that runs or is about to, within milliseconds. It raises Cancelled.

        Withdrawn when a sequence is next trimmed, so that it cannot hit a later request.
        """
        self._interrupt.set()

    def withdraw_abort(self) -> None:
        """Forget an `abort` that no evaluation has seen yet."""
        self._interrupt.set(False)

    def logits(self, i: int = -1) -> Float32s:
        """Logits [n_vocab] of the last batch's token `i`, or, if negative, of its outputs counted from the end.

        A view of llama.cpp's memory, valid until the next `decode`.
        """
        row = i + len(self._outputs) if i < 0 else int(np.searchsorted(self._outputs, i))
        if not 0 <= row < len(self._outputs) or (i >= 0 and self._outputs[row] != i):
            raise BadRequestError(f"Token {i} of the last batch has no logits: it was not marked as an output.")
        return self.logits_block()[row]  # type: ignore[no-any-return]

    def logits_block(self) -> Float32s:
        """Logits of all outputs of the last batch in its order, [n_outputs, n_vocab]; a view like `logits`."""
        n = len(self._outputs)
        if n == 0:
            raise BadRequestError("There are no logits: nothing was marked as an output.")
        return np.ctypeslib.as_array(lib().llama_get_logits(self.context), (n, self.n_vocab))

    def set_threads(self, n_threads: int, n_threads_batch: int) -> None:
        """Threads for single tokens and for batches from now on."""
        self._check_open()
        lib().llama_set_n_threads(self.context, n_threads, n_threads_batch)

    def trim(self, seq: int, n: int) -> int:
        """As `Sequences.trim`; also withdraws an `abort`."""
        self.withdraw_abort()
        return super().trim(seq, n)

    def _settle_copies(self, seq: int) -> None:
        held = self.n_tokens(seq)
        with suppress(BadRequestError):  # no room for the token: the copy was made nevertheless
            one = np.ones(1, np.int32)
            self.decode(0 * one, held * one, seq * one, np.zeros(1, np.bool_))
            self.trim(seq, held)

    def close(self) -> None:
        """Free the context. Harmless when repeated."""
        handle, self.context = self.context, 0
        self._outputs = np.zeros(0, np.int64)
        if handle:
            lib().llama_free(handle)
