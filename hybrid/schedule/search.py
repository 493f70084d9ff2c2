"""Which placement to measure next, and when to stop: a function of what was measured, and of nothing else.

What is believed of a placement is how much longer it takes than predicted, as a logarithm e. Over placements e is a
Gaussian process (Rasmussen and Williams 2006, chapters 2 and 5): predictions of each half are off by a factor, those of
a strategy by another; beyond that e wanders with the number of layers, smoothly and more or less roughly, or it has a
step, as where memory spills. Which of these is weighed by what was measured. Measurements add noise; repeats tell it.

After a few first ones the next to be measured is whatever is likeliest to beat the leader by enough to matter, or the
leader itself if less is known of it. It ends when none is likely to.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

import numpy as np
import numpy.typing as npt

STRATEGY, SMOOTH, OWN = 0.25, 0.2, 0.005
"""Standard deviations of e: between strategies, smoothly along the layers, and of each placement alone."""
ROUGH, ROUGH_WEIGHTS = (0.1, 0.3, 0.8), (0.4, 0.2, 0.1)
"""Roughly (an Ornstein-Uhlenbeck process): the values that are tried, and their probabilities before."""
CLIFF, CLIFF_WEIGHT, CLIFFS = 0.6, 0.3, 24
"""A single step somewhere: its standard deviation, its probability before, and at how many places it is looked for."""
COMMON = 0.5
"""The share of the roughness' variance that every strategy has at the same layers."""
REACH = 0.5
"""The share of the layers over which e is much the same."""
NOISE, NOISE_WEIGHT = 0.05, 6
"""Of one measurement, relative, before repeats have shown it; and how many repeats that guess is worth."""
LEAST_NOISE = 0.005
MATTERS = 0.03
"""A placement that is this much quicker, relative, is worth finding."""
DOUBT = 0.05
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
    spread: float = 0.0
    """How far it may be off by its own stretches, which differed so much: a standard deviation, relative."""


@dataclass(frozen=True)
class Part:
    """What is believed if e is of one kind; `weight` is the probability of that."""

    weight: float
    mean: npt.NDArray[np.float64]
    """[n] logarithms of seconds."""
    covariance: npt.NDArray[np.float64]
    """[n, n]"""

    def apart(self, a: int, b: int) -> tuple[float, float]:
        """Mean and standard deviation of how much more a takes than b, as a logarithm."""
        variance = self.covariance[a, a] + self.covariance[b, b] - 2 * self.covariance[a, b]
        return float(self.mean[a] - self.mean[b]), math.sqrt(max(float(variance), 1e-18))


@dataclass(frozen=True)
class Belief:
    """What is believed of every option's seconds, as logarithms."""

    parts: tuple[Part, ...]
    counts: npt.NDArray[np.int64]
    """[n] measurements of each."""
    noise: float
    """Relative, of one measurement (a standard deviation): by repeats, or by its own stretches where they tell more."""

    @cached_property
    def mean(self) -> npt.NDArray[np.float64]:
        """[n]"""
        return np.asarray(sum(part.weight * part.mean for part in self.parts))

    @cached_property
    def sd(self) -> npt.NDArray[np.float64]:
        """[n] standard deviations."""
        spread = (part.weight * (np.diag(part.covariance) + (part.mean - self.mean) ** 2) for part in self.parts)
        return np.sqrt(np.maximum(sum(spread), 0.0))

    def leader(self, among: Collection[int] | None = None) -> int | None:
        """The quickest by its mean, of those that were measured; None before there is one."""
        measured = [i for i in (range(len(self.mean)) if among is None else among) if self.counts[i]]
        return min(measured, key=lambda i: self.mean[i], default=None)

    def apart(self, a: int, b: int) -> tuple[float, float]:
        """Mean and standard deviation of how much more a takes than b, as a logarithm."""
        found = [(part.weight, *part.apart(a, b)) for part in self.parts]
        mean = sum(weight * m for weight, m, _ in found)
        return mean, math.sqrt(sum(weight * (sd**2 + (m - mean) ** 2) for weight, m, sd in found))


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
    variances: dict[int, list[float]] = {}
    for seen in observations:
        variances.setdefault(seen.option, []).append(max(noise, seen.spread) ** 2)
    at = list(errors)
    means = np.array([np.mean(errors[i]) for i in at])
    own = np.diag([sum(variances[i]) / len(variances[i]) ** 2 for i in at])
    noise = math.sqrt(fmean(itertools.chain(*variances.values()))) if variances else noise
    parts, likely = [], []
    for weight, prior in _priors(options, uncertainty):
        if not at:
            parts.append(Part(weight, base, prior))
            likely.append(math.log(weight))
            continue
        gram = prior[np.ix_(at, at)] + own
        gain = np.linalg.solve(gram, prior[at]).T  # [n, measured]
        fit = float(means @ np.linalg.solve(gram, means)) + float(np.linalg.slogdet(gram)[1])
        parts.append(Part(weight, base + gain @ means, prior - gain @ prior[at]))
        likely.append(math.log(weight) - fit / 2)
    weights = np.exp(np.array(likely) - max(likely))
    weights /= weights.sum()
    parts = [replace(part, weight=float(weight)) for part, weight in zip(parts, weights, strict=True)]
    return Belief(tuple(parts), counts, noise)


def next_option(options: Sequence[Option], belief: Belief, open_options: Collection[int]) -> int | None:
    """The option to measure next, of those that still can be; None when it is known well enough which is quickest."""
    first = _spread(options, belief, open_options)
    if first is not None:
        return first
    leader = belief.leader(open_options)
    if leader is None:
        return min(open_options, key=lambda i: belief.mean[i], default=None)
    chances = {i: chance(belief, i, leader) for i in open_options if i != leader}
    if max(chances.values(), default=0.0) < DOUBT:
        return None
    rival = max((i for i in chances if chances[i] >= DOUBT), key=lambda i: gain(belief, i, leader))
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
    total = 0.0
    for part in belief.parts:
        mean, sd = part.apart(option, than)
        total += part.weight * _below((math.log1p(-by) - mean) / sd)
    return total


def gain(belief: Belief, option: int, than: int) -> float:
    """How much quicker an option is expected to be than another, where it is at all (expected improvement)."""
    total = 0.0
    for part in belief.parts:
        mean, sd = part.apart(option, than)
        z = -mean / sd
        total += part.weight * sd * (z * _below(z) + math.exp(-z * z / 2) / math.sqrt(2 * math.pi))
    return total


def _below(z: float) -> float:
    """The standard normal distribution function."""
    return 0.5 * math.erfc(-z / math.sqrt(2))


def _priors(options: Sequence[Option], uncertainty: float) -> Iterator[tuple[float, npt.NDArray[np.float64]]]:
    """Probabilities and covariances of e before anything was measured, [n, n]: rough to some degree, or a cliff."""
    share = np.array([option.share for option in options])
    head = np.array([option.head_share for option in options])
    numbers = {strategy: i for i, strategy in enumerate(dict.fromkeys(option.strategy for option in options))}
    strategy = np.array([numbers[option.strategy] for option in options])
    alike = strategy[:, None] == strategy[None, :]
    heads, tails = head[:, None] * head[None, :], (1 - head)[:, None] * (1 - head)[None, :]
    apart = np.abs(share[:, None] - share[None, :]) / REACH
    smooth = uncertainty**2 * (heads + tails) + OWN**2 * np.eye(len(options))
    smooth += alike * (STRATEGY**2 * heads + SMOOTH**2 * (1 + apart) * np.exp(-apart))
    rough = (COMMON + (1 - COMMON) * alike) * np.exp(-apart)
    for sd, weight in zip(ROUGH, ROUGH_WEIGHTS, strict=True):
        yield weight, smooth + sd**2 * rough
    shares = np.unique(share)
    edges = (shares[:-1] + shares[1:]) / 2
    edges = edges[np.unique(np.linspace(0, len(edges) - 1, min(CLIFFS, len(edges))).round().astype(int))]
    for edge in edges:
        beyond = share > edge
        yield CLIFF_WEIGHT / len(edges), smooth + ROUGH[0] ** 2 * rough + CLIFF**2 * np.outer(beyond, beyond)


def _noise(repeats: Sequence[Sequence[float]]) -> float:
    """Standard deviation of one measurement, from those that were repeated and a guess."""
    squares = sum(float(np.var(found)) * len(found) for found in repeats)
    free = sum(len(found) - 1 for found in repeats)
    return max(LEAST_NOISE, math.sqrt((NOISE_WEIGHT * NOISE**2 + squares) / (NOISE_WEIGHT + free)))
