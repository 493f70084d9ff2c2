"""The KV of a llama_context, sequence by sequence: roll back, copy, save, restore."""

from __future__ import annotations

import ctypes
import struct
import zlib

import numpy as np

from hybrid.errors import BadRequestError, EngineError
from hybrid.tail.llama import lib

STATE = struct.Struct("<8sQII")
"""Header of a saved sequence: magic, payload bytes, CRC-32 of the payload, tokens."""
STATE_MAGIC = b"HYBSEQ1\0"


class Sequences:
    """The sequences 0..n_sequences-1 of an open `context` (its handle).

    `window` is the model's sliding window (0: none); `separate` says that each sequence has a cache of its own.
    """

    context: int = 0
    """The llama_context's address; 0 when there is none."""

    def __init__(self, context: int, n_sequences: int, window: int, separate: bool) -> None:
        self.context = context
        self.n_sequences = n_sequences
        self._window = window
        self._separate = separate
        self._memory = lib().llama_get_memory(context)
        self._copied: set[int] = set()

    def n_tokens(self, seq: int = 0) -> int:
        """Tokens that `seq` holds (windowed layers may hold fewer)."""
        self._check_seq(seq)
        return int(lib().llama_memory_seq_pos_max(self._memory, seq)) + 1

    def trim(self, seq: int, n: int) -> int:
        """Forget every position >= n of `seq`.

        Returns how many tokens remain usable: n (or fewer, if there were fewer), or 0 where a windowed layer no longer
        holds what precedes n; the sequence is then empty.
        """
        held = self.n_tokens(seq)
        if n >= held:
            return held
        oldest = int(lib().llama_memory_seq_pos_min(self._memory, seq))
        # The token at n sees n - window + 1 .. n. A recurrent state cannot go back: seq_rm then returns false.
        reachable = n > 0 and (not self._window or oldest <= max(0, n - self._window + 1))
        if reachable and lib().llama_memory_seq_rm(self._memory, seq, n, -1):
            return n
        self._clear(seq)
        return 0

    def copy(self, src: int, dst: int, n: int) -> int:
        """Make the first n positions of `dst` equal to those of `src`; what `dst` held is gone. Returns as `trim`."""
        self._check_seq(dst)
        if src != dst:
            self._clear(dst)
            if self.n_tokens(src):
                lib().llama_memory_seq_cp(self._memory, src, dst, -1, -1)
                if self._separate:
                    self._copied.add(dst)
        return self.trim(dst, n)

    def save(self, seq: int) -> bytes:
        """The sequence's KV, exactly; for `load` of a context of the same layers and KV dtype."""
        n_tokens = self.n_tokens(seq)
        self._settle()
        size = int(lib().llama_state_seq_get_size(self.context, seq))
        state = bytearray(STATE.size + size)
        payload = (ctypes.c_uint8 * size).from_buffer(state, STATE.size)
        if int(lib().llama_state_seq_get_data(self.context, payload, size, seq)) != size:
            raise EngineError(f"llama.cpp could not save sequence {seq}.")
        STATE.pack_into(state, 0, STATE_MAGIC, size, zlib.crc32(payload), n_tokens)
        return bytes(state)

    def load(self, seq: int, state: bytes) -> int:
        """Replace `seq` by a saved state; returns its number of tokens.

        Raises BadRequestError if it is damaged or of another shape; the sequence is then empty.
        """
        self._check_seq(seq)
        self._settle()
        self._clear(seq)
        magic, size, crc, n_tokens = STATE.unpack_from(state) if len(state) >= STATE.size else (b"", 0, 0, 0)
        whole = magic == STATE_MAGIC and len(state) == STATE.size + size
        if not whole or zlib.crc32(memoryview(state)[STATE.size :]) != crc:
            raise BadRequestError("The saved sequence is damaged.")
        payload = np.frombuffer(state, np.uint8, size, STATE.size)
        pointer = ctypes.cast(payload.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
        read = int(lib().llama_state_seq_set_data(self.context, pointer, size, seq))
        if read != size or self.n_tokens(seq) != n_tokens:
            self._clear(seq)
            raise BadRequestError("The saved sequence belongs to another model, split or KV type, or is too long.")
        return int(n_tokens)

    def _clear(self, seq: int) -> None:
        lib().llama_memory_seq_rm(self._memory, seq, -1, -1)

    def _check_open(self) -> None:
        if not self.context:
            raise EngineError("The llama.cpp context is closed.")

    def _check_seq(self, seq: int) -> None:
        self._check_open()
        if not 0 <= seq < self.n_sequences:
            raise BadRequestError(f"There is no sequence {seq}: the context has {self.n_sequences}.")

    def _settle(self) -> None:
        """llama.cpp copies between separate caches only when it next decodes; until then their memory is stale."""
        if self._copied:
            self._settle_copies(min(self._copied))
            self._copied.clear()

    def _settle_copies(self, seq: int) -> None:
        """Make llama.cpp decode something in `seq` and forget it."""
        raise NotImplementedError

    def _copies_settled(self) -> None:
        """To be called after every decode."""
        self._copied.clear()
