"""How long a measurement takes on this machine as it is now, and how long one may take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median

from hybrid.schedule.placement import Placement

START_S, START_ALONE_S = 3.0, 1.0
"""A process's start and its loading, with PyTorch and without, before one was seen."""
LEAST_S = 1.0
SLOWEST, FIRST_SLOWEST = 20, 10
"""A measurement that takes so many times longer than those before it let expect is ended; the very first, of which only
assumptions say how long it takes, may do so beyond the budget, but not as long."""
HOPE = 0.5
"""The first of its kind is begun where this share is left of the time it is expected to take, which is rough."""


class Pace:
    """Expected are a process's start and the work that the CostModel predicts (`work_s`), both as much slower as the
    measurements were that have been made: those with layers on a device tell it for others with some, where there are
    any. No limit is a fixed time: all follow from what was seen of this machine."""

    def __init__(self, work_s: Callable[[Placement], float], budget_s: float) -> None:
        self.work_s, self.budget_s = work_s, budget_s
        self._seen: list[tuple[Placement, float]] = []

    def see(self, p: Placement, wall_s: float | None) -> None:
        """A measurement of `p` ended well after so many seconds."""
        if wall_s:
            self._seen.append((p, wall_s))

    def cost_s(self, p: Placement) -> float:
        """Seconds that measuring `p` is likely to take."""
        return max(LEAST_S, self.slowness(p) * self._expected(p, self.work_s(p)))

    def scaled(self, p: Placement, work_s: float) -> float:
        """Seconds for other work with `p` in a process of its own."""
        return max(LEAST_S, self.slowness(p) * self._expected(p, work_s))

    def slowness(self, p: Placement) -> float:
        """How many times longer than expected such measurements took."""
        alike = [pair for pair in self._seen if _alone(pair[0]) == _alone(p)]
        ratios = [wall / self._expected(q, self.work_s(q)) for q, wall in alike or self._seen]
        return median(ratios) if ratios else 1.0

    def limit_s(self, p: Placement, left_s: float | None, *, first: bool) -> float:
        """The longest that measuring `p` may take: no longer than the time that is left (None: as long as it takes);
        but the very first may take what it needs within reason, for one figure is more than none."""
        cost = self.cost_s(p)
        if left_s is None:
            return max(SLOWEST * cost, self.budget_s)
        return max(left_s, FIRST_SLOWEST * cost) if first else max(0.0, min(left_s, SLOWEST * cost))

    def affordable(self, p: Placement, left_s: float, *, untried: bool) -> bool:
        """Whether to begin measuring `p`; `untried`: nothing like it was measured, so it is worth a try."""
        return self.cost_s(p) * (HOPE if untried else 1.0) <= left_s

    def total_s(self, placements: Iterable[Placement]) -> float:
        """Seconds that measuring them all is likely to take."""
        return sum(self.cost_s(p) for p in placements)

    def _expected(self, p: Placement, work_s: float) -> float:
        return (START_ALONE_S if _alone(p) else START_S) + work_s


def _alone(p: Placement) -> bool:
    """Whether llama.cpp runs it without PyTorch."""
    return p.n_gpu_layers == 0
