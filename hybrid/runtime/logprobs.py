"""Log-probabilities of tokens, in the shape llama-cpp-python and OpenAI's completions give them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hybrid.tail.vocab import Vocabulary

Logits = npt.NDArray[np.float32]


class Logprobs:
    """Collects what was likely at each token. `add` fits `Options.on_token`.

    A token's probability is the model's own: before penalties, grammar, temperature and truncation.
    """

    def __init__(self, vocabulary: Vocabulary, n_top: int, offset: int) -> None:
        """`n_top` likeliest tokens are listed beside the chosen one; `offset` is where the text begins."""
        self._vocabulary, self._n_top, self._offset = vocabulary, n_top, offset
        self._entries: list[tuple[str, int, float | None, dict[str, float] | None]] = []

    def add(self, token: int, logits: Logits | None) -> None:
        """`token` was drawn from `logits` [n_vocab]; None: it stands at the beginning, where nothing was predicted."""
        text = self._spelled(token)
        if logits is None:
            self._entries.append((text, self._offset, None, None))
        else:
            values = log_softmax(logits)
            top = {self._spelled(int(i)): float(values[i]) for i in largest(values, self._n_top)}
            top[text] = float(values[token])
            self._entries.append((text, self._offset, float(values[token]), top))
        self._offset += len(text)

    def take(self) -> dict[str, Any]:
        """The entries since the last call, as lists of equal length."""
        entries, self._entries = self._entries, []
        return {
            "tokens": [text for text, _, _, _ in entries],
            "text_offset": [offset for _, offset, _, _ in entries],
            "token_logprobs": [value for _, _, value, _ in entries],
            "top_logprobs": [top for _, _, _, top in entries],
        }

    def _spelled(self, token: int) -> str:
        return self._vocabulary.piece(token).decode("utf-8", "ignore")


def log_softmax(logits: Logits) -> Logits:
    """Natural logarithms of the softmax of `logits` [n_vocab]."""
    shifted = logits - logits.max()
    values: Logits = shifted - np.log(np.exp(shifted).sum())
    return values


def largest(values: Logits, n: int) -> npt.NDArray[np.int64]:
    """Indices of the `n` largest, in falling order."""
    n = min(n, len(values))
    if n <= 0:
        return np.zeros(0, np.int64)
    found = np.argpartition(values, -n)[-n:].astype(np.int64)
    ordered: npt.NDArray[np.int64] = found[np.argsort(-values[found], kind="stable")]
    return ordered
