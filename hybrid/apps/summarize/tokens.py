"""Tokens of text that stands in the middle of a prompt."""

from __future__ import annotations

from typing import Protocol


class Vocabulary(Protocol):
    """What is needed of `hybrid.tail.vocab.Vocabulary`."""

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of `text`."""

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token."""


class Tokenizer:
    """Tokens of a text that continues another; control-token text stays text.

    SentencePiece vocabularies put a space before every text they are given. Where this one does, a line end is
    tokenized in front and its tokens taken away again. `n_unspelled` counts texts whose bytes the tokens do not spell.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._bytes: dict[int, bytes] = {}
        self._before: list[int] = []
        self.n_unspelled = 0
        first = vocabulary.tokenize("a", add_special=False)[:1]
        if first and vocabulary.piece(first[0]).startswith(b" "):
            self._before = vocabulary.tokenize("\n", add_special=False)

    def __call__(self, text: str) -> list[int]:
        """Ids of `text`."""
        ids = self._tokens(text)
        if self.spelled(ids) != text.encode():
            self.n_unspelled += 1
        return ids

    def spelled(self, ids: list[int]) -> bytes:
        """What `ids` spell."""
        known = self._bytes
        for token in ids:
            if token not in known:
                known[token] = self._vocabulary.piece(token)
        return b"".join([known[token] for token in ids])

    def _tokens(self, text: str) -> list[int]:
        n = len(self._before)
        if n:
            ids = self._vocabulary.tokenize("\n" + text, add_special=False)
            if ids[:n] == self._before:
                return ids[n:]
        return self._vocabulary.tokenize(text, add_special=False)
