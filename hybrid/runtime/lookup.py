"""Prompt lookup: what comes next if the text goes on as it did where its last tokens stood before.

(Saxena 2023, "Prompt lookup decoding": drafts without a draft model, from n-grams of the prompt and the text so far.)
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 16
"""A match is not followed back further than this."""


class Lookup:
    """The tokens of a text, prompt and all; knows where its end occurred before. Linear in time and memory."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        """Two or three tokens to the place after their latest occurrence that is not the end of the text."""
        self._source: int | None = None
        self.matched = 0
        """How many tokens at the end of the text stood, in this order, before the place that `draft` copies from."""
        for token in tokens:
            self._append(token)
        self._search()

    @property
    def predicted(self) -> int | None:
        """The token that comes next if the text repeats itself; None where its end is new."""
        return None if self._source is None else self._tokens[self._source]

    def draft(self, n: int) -> list[int]:
        """The `n` tokens that come next if the text repeats itself; none where its end is new."""
        if self._source is None:
            return []
        period = len(self._tokens) - self._source  # what is copied may reach the copy itself: text that goes in circles
        return [self._tokens[self._source + i % period] for i in range(n)]

    def push(self, token: int) -> None:
        """The text goes on with `token`."""
        hit = self.predicted == token
        self._append(token)
        if hit and self._source is not None:
            self._source += 1
            self.matched = min(self.matched + 1, LONGEST)
        else:
            self._search()

    def _append(self, token: int) -> None:
        tokens, end = self._tokens, len(self._tokens)
        for n in (2, 3):
            if end >= n:
                self._after[tuple(tokens[end - n :])] = end
        tokens.append(token)

    def _search(self) -> None:
        tokens, end = self._tokens, len(self._tokens)
        self._source, self.matched = None, 0
        for n in (3, 2):
            source = self._after.get(tuple(tokens[end - n :])) if end >= n else None
            if source is not None:
                while n < min(LONGEST, source) and tokens[source - n - 1] == tokens[end - n - 1]:
                    n += 1
                self._source, self.matched = source, n
                return
