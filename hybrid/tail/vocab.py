"""A model's vocabulary and tokenizer: llama.cpp's own."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType

import numpy as np

from hybrid.errors import BadRequestError, EngineError
from hybrid.tail.llama import lib
from hybrid.tail.model import Model, open_files

MAX_TEXT_BYTES = 2**31 - 1
ATTR_UNKNOWN, ATTR_CONTROL = 1 << 0, 1 << 3
"""Bits of `llama_token_attr`."""


class Vocabulary:
    """Tokens and text: of a loaded model, which `Vocabulary(model)` borrows, or of a file alone (`open`).

    Threads may share it; `close` waits until none of them is inside llama.cpp, whose memory may be freed then.
    """

    def __init__(self, model: Model, *, owned: bool = False) -> None:
        self._lib = lib()
        self._model: Model | None = model
        self._owned = owned
        self._vocab = self._lib.llama_model_get_vocab(model.handle)
        self.n_vocab: int = int(self._lib.llama_vocab_n_tokens(self._vocab))
        self.bos: int = int(self._lib.llama_vocab_bos(self._vocab))
        """-1 where the model has none; so for the other ids."""
        self.eos: int = int(self._lib.llama_vocab_eos(self._vocab))
        self.eot: int = int(self._lib.llama_vocab_eot(self._vocab))
        self.fim: tuple[int, int, int] = (
            int(self._lib.llama_vocab_fim_pre(self._vocab)),
            int(self._lib.llama_vocab_fim_suf(self._vocab)),
            int(self._lib.llama_vocab_fim_mid(self._vocab)),
        )
        """What stands before a prefix, a suffix, and the middle that is to be filled in."""
        self.newline: int = int(self._lib.llama_vocab_nl(self._vocab))
        self.add_bos: bool = bool(self._lib.llama_vocab_get_add_bos(self._vocab))
        """Whether a prompt begins with BOS (what `tokenize` does with `add_special`)."""
        self.add_eos: bool = bool(self._lib.llama_vocab_get_add_eos(self._vocab))
        template = self._lib.llama_model_chat_template(model.handle, None)
        self.chat_template: str | None = template.decode(errors="replace") if template else None
        """The file's Jinja template for chats; None where it has none."""
        self._piece = ctypes.create_string_buffer(128)
        self._guard = threading.RLock()

    @classmethod
    def open(cls, path: str | Path) -> Vocabulary:
        """The vocabulary of a GGUF file (the first shard of several); no weights are loaded. Errors as `open_files`."""
        return cls(open_files([Path(path)], vocab_only=True), owned=True)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`.

        `add_special` adds BOS or EOS where the model wants them. With `parse_special` the text of a control token
        becomes that token: for templates, never for what a user wrote. A lone surrogate becomes U+FFFD.
        """
        data = text.encode("utf-8", "replace") if text.isascii() else _utf8(text)
        if len(data) > MAX_TEXT_BYTES:
            raise BadRequestError(f"The text is {len(data)} bytes long; at most {MAX_TEXT_BYTES} can be tokenized.")
        room = len(data) + 16
        while True:
            out = np.empty(room, np.int32)
            pointer = ctypes.cast(out.ctypes.data, ctypes.POINTER(ctypes.c_int32))
            with self._guard:
                n = self._lib.llama_tokenize(self._handle, data, len(data), pointer, room, add_special, parse_special)
            if n >= 0:
                return out[:n].tolist()  # type: ignore[no-any-return]
            if -n <= room:
                raise EngineError("llama.cpp could not tokenize the text.")
            room = -n

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token, perhaps a part of a character. Control tokens are empty unless `special`."""
        self._check(token)
        with self._guard:
            n = self._lib.llama_token_to_piece(self._handle, token, self._piece, len(self._piece), 0, special)
            if n < 0:
                self._piece = ctypes.create_string_buffer(-n)
                n = self._lib.llama_token_to_piece(self._handle, token, self._piece, len(self._piece), 0, special)
            return self._piece.raw[:n]

    def detokenize(self, tokens: Sequence[int], *, special: bool = False, remove_special: bool = False) -> str:
        """The text of `tokens`, the inverse of `tokenize`. Bytes that are no UTF-8 become U+FFFD.

        `special` writes control tokens out; `remove_special` drops the BOS and EOS that `add_special` adds.
        """
        ids = np.ascontiguousarray(tokens, np.int32)
        if ids.size and (ids.min() < 0 or ids.max() >= self.n_vocab):
            self._check(int(ids.min() if ids.min() < 0 else ids.max()))
        pointer = ctypes.cast(ids.ctypes.data, ctypes.POINTER(ctypes.c_int32))
        room = 8 * ids.size + 16
        while True:
            out = ctypes.create_string_buffer(room)
            with self._guard:
                n = self._lib.llama_detokenize(self._handle, pointer, ids.size, out, room, remove_special, special)
            if n >= 0:
                return out.raw[:n].decode("utf-8", "replace")
            if -n <= room:
                raise EngineError("llama.cpp could not detokenize the tokens.")
            room = -n

    def is_eog(self, token: int) -> bool:
        """Whether the token ends a generation (EOS, EOT, …)."""
        self._check(token)
        with self._guard:
            return bool(self._lib.llama_vocab_is_eog(self._handle, token))

    def is_control(self, token: int) -> bool:
        """Whether the token steers the model and has no text of its own."""
        self._check(token)
        with self._guard:
            return bool(self._lib.llama_vocab_is_control(self._handle, token))

    def attributes(self, token: int) -> int:
        """The token's `llama_token_attr` bits."""
        self._check(token)
        with self._guard:
            return int(self._lib.llama_vocab_get_attr(self._handle, token))

    def text(self, token: int) -> str:
        """The token as the vocabulary spells it (`▁the`, `<|im_end|>`)."""
        self._check(token)
        with self._guard:
            raw: bytes | None = self._lib.llama_vocab_get_text(self._handle, token)
        return (raw or b"").decode("utf-8", "replace")

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """Text -> id of every token that only `parse_special` recognises. Made on first use."""
        attributes, wanted = self._lib.llama_vocab_get_attr, ATTR_CONTROL | ATTR_UNKNOWN
        with self._guard:
            handle = self._handle
            return {self.text(i): i for i in range(self.n_vocab) if attributes(handle, i) & wanted}

    @cached_property
    def eog_tokens(self) -> frozenset[int]:
        """Every token that ends a generation. Made on first use."""
        is_eog = self._lib.llama_vocab_is_eog
        with self._guard:
            handle = self._handle
            return frozenset(i for i in range(self.n_vocab) if is_eog(handle, i))

    def close(self) -> None:
        """Free the model if this vocabulary opened it. Harmless when repeated."""
        with self._guard:
            model, self._model = self._model, None
            if model is not None and self._owned:
                model.close()

    def __enter__(self) -> Vocabulary:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def handle(self) -> int:
        """The llama_vocab, for those functions of llama.cpp that take one; valid while the model is open."""
        return self._handle

    @property
    def _handle(self) -> int:
        if self._model is None or not self._model.handle:
            raise EngineError("The vocabulary is closed.")
        return self._vocab  # type: ignore[no-any-return]

    def _check(self, token: int) -> None:
        """llama.cpp ends the process over an id that is none."""
        if not 0 <= token < self.n_vocab:
            raise BadRequestError(f"{token} is not a token: the vocabulary has {self.n_vocab}.")


def _utf8(text: str) -> bytes:
    """UTF-8, with U+FFFD for lone surrogates (`replace` would write a question mark)."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode("utf-8")
