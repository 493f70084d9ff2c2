"""How many tokens to draft: what they cost by the batch curve against what will probably be accepted, by counts.

Nothing here looks at a clock: the same text, curve and limits give the same drafts, so a run can be repeated. Every
prediction is compared with what was drawn, whether it was part of a batch or not; so it costs nothing to learn that
drafts are worth while, and nothing to learn that they are not.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from hybrid.runtime.curve import BatchCurve
from hybrid.runtime.lookup import Lookup

LEVELS = (2, 3, 4, 6, 9, 14)
"""Matched tokens from which on a prediction is trusted more."""
PRIOR = (0.2, 0.35, 0.5, 0.65, 0.75, 0.85)
PRIOR_WEIGHT = 4.0
"""How often a prediction is right at each level until the text has shown more than this many."""
MARGIN = 1.05
"""Drafts must promise at least this much more speed."""


class Speculation:
    """Drafts for one text. `push` it every drawn token."""

    def __init__(self, prompt: Sequence[int], curve: BatchCurve, n_max: int) -> None:
        """At most `n_max` tokens are drafted at a time."""
        self._lookup = Lookup(prompt)
        self._curve, self._n_max = curve, n_max
        self._tried = [0] * len(LEVELS)
        self._right = [0] * len(LEVELS)
        self.n_drafted = self.n_accepted = 0

    def draft(self, n_live: int, limit: int) -> list[int]:
        """The tokens to verify with the next one, `limit` at most, in a step of `n_live` sequences. Often none."""
        if self._lookup.predicted is None:
            return []
        best, n_best = MARGIN * n_live / self._curve.cost(n_live), 0
        sure, expected = 1.0, 0.0
        for n in range(1, min(self._n_max, limit) + 1):
            sure *= self._chance(self._lookup.matched + n - 1)
            expected += sure
            speed = (n_live + expected) / self._cost(n_live, n)
            if speed > best:
                best, n_best = speed, n
        return self._lookup.draft(n_best)

    def push(self, token: int) -> None:
        """A drawn token: count whether it was predicted."""
        predicted = self._lookup.predicted
        if predicted is not None:
            level = _level(self._lookup.matched)
            self._tried[level] += 1
            self._right[level] += predicted == token
        self._lookup.push(token)

    def verified(self, n_drafted: int, n_accepted: int) -> None:
        """Note what became of a draft."""
        self.n_drafted += n_drafted
        self.n_accepted += n_accepted

    def _chance(self, matched: int) -> float:
        level = _level(matched)
        return (self._right[level] + PRIOR_WEIGHT * PRIOR[level]) / (self._tried[level] + PRIOR_WEIGHT)

    def _cost(self, n_live: int, n: int) -> float:
        """Of a step in which one sequence has n drafted tokens. llama.cpp computes what one sequence has more than the
        others by itself."""
        return self._curve.cost(1 + n) if n_live == 1 else self._curve.cost(n_live) + self._curve.cost(n)


def _level(matched: int) -> int:
    return max(0, bisect_right(LEVELS, matched) - 1)
