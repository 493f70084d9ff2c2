"""Which placement to measure next, and when to stop: a function of what was measured, and of nothing else.

What is believed of a placement is how much longer it takes than predicted, as a logarithm e. Over placements e is a
Gaussian process (Rasmussen and Williams 2006, chapters 2 and 5): predictions of each half are off by a factor, those of
a strategy by another; beyond that e wanders with the number of layers, smoothly, and in jumps as at a cliff where
memory spills. How much it jumps is the likeliest of a few values. Measurements add noise, which repeats tell.

After a few first ones the next to be measured is whatever is likeliest to beat the leader by enough to matter, or the
leader itself if less is known of it. It ends when none is likely to.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

STRATEGY, SMOOTH, OWN = 0.25, 0.2, 0.005
"""Standard deviations of e: between strategies, smoothly along the layers, and of each placement alone."""
ROUGH, ROUGH_WEIGHTS = (0.1, 0.3, 0.8), (0.6, 0.3, 0.1)
"""In jumps (an Ornstein-Uhlenbeck process): the values that are tried, and what is thought of them before."""
COMMON = 0.5
"""The share of the jumps' variance that every strategy has at the same layers."""
REACH = 0.5
"""The share of the layers over which e is much the same."""
NOISE, NOISE_WEIGHT = 0.05, 6
"""Of one measurement, relative, before repeats have shown it; and how many repeats that guess is worth."""
LEAST_NOISE = 0.005
MATTERS = 0.03
"""A placement that is this much quicker, relative, is worth finding."""
DOUBT = 0.03
"""It ends when none is that much quicker with more than this probability."""
FIRST = 4
"""Measurements spread over the layers before anything is concluded, where there are many options of a strategy."""


@dataclass(frozen=True)
class Option:
    """A placement as the search sees it."""

    strategy: Hashable
    """Options of one strategy resemble each other: KV strategy and threads."""
    share: float
    """Its layers on the device, of all: 0 to 1."""
    head_share: float
    """The part of its predicted seconds that its layers on the device take."""
    predicted_s: float


@dataclass(frozen=True)
class Observation:
    """One measurement of an option."""

    option: int
    seconds: float
    predicted_s: float | None = None
    """What was predicted for the depth it was made at; None: the option's."""


@dataclass(frozen=True)
class Belief:
    """What is believed of every option's seconds, as logarithms."""

    mean: npt.NDArray[np.float64]
    """[n]"""
    covariance: npt.NDArray[np.float64]
    """[n, n]"""
    counts: npt.NDArray[np.int64]
    """[n] measurements of each."""
    noise: float
    """Relative, of one measurement."""

    @property
    def sd(self) -> npt.NDArray[np.float64]:
        """[n] standard deviations."""
        return np.sqrt(np.maximum(np.diag(self.covariance), 0.0))

    def leader(self, among: Collection[int] | None = None) -> int | None:
        """The quickest by its mean, of those that were measured; None before there is one."""
        measured = [i for i in (range(len(self.mean)) if among is None else among) if self.counts[i]]
        return min(measured, key=lambda i: self.mean[i], default=None)

    def apart(self, a: int, b: int) -> tuple[float, float]:
        """Mean and standard deviation of how much more a takes than b, as a logarithm."""
        variance = self.covariance[a, a] + self.covariance[b, b] - 2 * self.covariance[a, b]
        return float(self.mean[a] - self.mean[b]), math.sqrt(max(float(variance), 1e-18))


def believe(options: Sequence[Option], observations: Sequence[Observation], uncertainty: float) -> Belief:
    """The belief after the observations. `uncertainty` is of the predictions of each half, relative."""
    base = np.log([option.predicted_s for option in options])
    errors: dict[int, list[float]] = {}
    for seen in observations:
        predicted = seen.predicted_s or options[seen.option].predicted_s
        errors.setdefault(seen.option, []).append(math.log(seen.seconds / predicted))
    counts = np.zeros(len(options), np.int64)
    for i, found in errors.items():
        counts[i] = len(found)
    noise = _noise(list(errors.values()))
    if not errors:
        return Belief(base, _kernel(options, uncertainty, ROUGH[0]), counts, noise)
    at = list(errors)
    means = np.array([np.mean(errors[i]) for i in at])
    own = np.diag([noise**2 / len(errors[i]) for i in at])
    likeliest = -math.inf
    for rough, weight in zip(ROUGH, ROUGH_WEIGHTS, strict=True):
        prior = _kernel(options, uncertainty, rough)
        gram = prior[np.ix_(at, at)] + own
        solved = np.linalg.solve(gram, means)
        likely = math.log(weight) - 0.5 * float(means @ solved) - 0.5 * float(np.linalg.slogdet(gram)[1])
        if likely > likeliest:
            likeliest, chosen, chosen_gram, chosen_solved = likely, prior, gram, solved
    gain = np.linalg.solve(chosen_gram, chosen[at]).T  # [n, measured]
    return Belief(base + chosen[:, at] @ chosen_solved, chosen - gain @ chosen[at], counts, noise)


def next_option(options: Sequence[Option], belief: Belief, open_options: Collection[int]) -> int | None:
    """The option to measure next, of those that still can be; None when it is known well enough which is quickest."""
    first = _spread(options, belief, open_options)
    if first is not None:
        return first
    leader = belief.leader(open_options)
    if leader is None:
        return min(open_options, key=lambda i: belief.mean[i], default=None)
    rivals = [i for i in open_options if i != leader]
    gains = {i: chance(belief, i, leader) for i in rivals}
    rival = max(rivals, key=lambda i: gains[i], default=None)
    if rival is None or gains[rival] < DOUBT:
        return None
    known = belief.counts[leader] > belief.counts[rival] or belief.sd[leader] <= belief.sd[rival]
    return rival if known else leader


def _spread(options: Sequence[Option], belief: Belief, open_options: Collection[int]) -> int | None:
    """The next of the first few: both ends of the first strategy, and points between, the likeliest best first."""
    line = [
        i for i in sorted(open_options, key=lambda i: options[i].share) if options[i].strategy == options[0].strategy
    ]
    if len(line) < 3 * FIRST:
        return None
    wanted = {line[round(i * (len(line) - 1) / (FIRST - 1))] for i in range(FIRST)}
    return min((i for i in wanted if not belief.counts[i]), key=lambda i: belief.mean[i], default=None)


def chance(belief: Belief, option: int, than: int, by: float = MATTERS) -> float:
    """The probability that an option is quicker than another by more than `by`, relative."""
    mean, sd = belief.apart(option, than)
    return 0.5 * math.erfc((mean - math.log1p(-by)) / (sd * math.sqrt(2)))


def _kernel(options: Sequence[Option], uncertainty: float, rough: float) -> npt.NDArray[np.float64]:
    """Covariance of e before anything was measured, [n, n]."""
    share = np.array([option.share for option in options])
    head = np.array([option.head_share for option in options])
    numbers = {strategy: i for i, strategy in enumerate(dict.fromkeys(option.strategy for option in options))}
    strategy = np.array([numbers[option.strategy] for option in options])
    alike = strategy[:, None] == strategy[None, :]
    heads, tails = head[:, None] * head[None, :], (1 - head)[:, None] * (1 - head)[None, :]
    apart = np.abs(share[:, None] - share[None, :]) / REACH
    smooth, jumps = (1 + apart) * np.exp(-apart), np.exp(-apart)
    same = STRATEGY**2 * heads + SMOOTH**2 * smooth + (1 - COMMON) * rough**2 * jumps
    everywhere = uncertainty**2 * (heads + tails) + COMMON * rough**2 * jumps
    return np.asarray(everywhere + alike * same + OWN**2 * np.eye(len(options)))


def _noise(repeats: Sequence[Sequence[float]]) -> float:
    """Standard deviation of one measurement, from those that were repeated and a guess."""
    squares = sum(float(np.var(found)) * len(found) for found in repeats)
    free = sum(len(found) - 1 for found in repeats)
    return max(LEAST_NOISE, math.sqrt((NOISE_WEIGHT * NOISE**2 + squares) / (NOISE_WEIGHT + free)))
