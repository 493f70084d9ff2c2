"""Simulated machines for the search of `hybrid tune`: predictions, and hidden truths they do not know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybrid.schedule.search import Observation, Option, believe, next_option

NOISE = 0.05
KINDS = ("plain", "interior", "plateau", "cliff")
START_S, TOKENS = 2.0, 50
"""Of a measurement: a process, its loading, and the tokens it decodes."""


@dataclass(frozen=True)
class Simulated:
    """One machine: what is predicted, and what is true, in seconds a token."""

    kind: str
    options: tuple[Option, ...]
    truth: tuple[float, ...]
    uncertainty: float

    @property
    def best(self) -> int:
        """The option that is quickest in truth."""
        return int(np.argmin(self.truth))


def machine(seed: int) -> Simulated:
    """A machine with 16 to 80 layers, of which some fit with K and V beside them, and more with K and V elsewhere.

    True times add up over layers, and are distorted as the kind says: layers that get slower as the device fills up
    (an interior optimum), a resource that bounds everything (a plateau), a jump where memory spills (a cliff).
    """
    rng = np.random.default_rng(seed)
    kind = KINDS[seed % len(KINDS)]
    n = int(rng.integers(16, 81))
    off = 0.35
    tail_s = 2e-3 * rng.lognormal(0, 0.5)
    head_s = tail_s * rng.choice([rng.uniform(0.08, 0.5), rng.uniform(0.5, 1.6)], p=[0.7, 0.3])
    output_s, crossing_s = tail_s * rng.uniform(0.5, 4), tail_s * rng.uniform(0, 0.5)
    room = int(rng.integers(max(6, n // 5), n + 1))  # layers that fit with K and V
    wide = min(n, room + int(rng.integers(0, n)))  # and with K and V on the host
    strategies = {"device": room}
    if seed % 8 != 7:  # sometimes there is nothing but the split
        strategies |= {"stream": wide, "attend": wide, "tiered": wide}
    wrong = {half: rng.lognormal(0, off) for half in ("head", "tail", "all")}
    bend, steep = rng.uniform(0.3, 0.8), rng.uniform(1, 6)
    edge, jump = rng.uniform(0.3, 0.95), rng.uniform(1.2, 2.5)
    floor = rng.uniform(0.3, 0.8)
    options, truth = [], []
    for kv, most in strategies.items():
        extra = 0.0 if kv == "device" else tail_s * rng.uniform(0.0, 0.6) * rng.lognormal(0, 0.5)
        missed = rng.lognormal(0, 0.25)
        for k in range(0 if kv == "device" else room + 1, most + 1):
            share = k / n

            def seconds(head: float, tail: float, hidden: bool, k: int = k, extra: float = extra) -> float:
                layers = np.full(k, head + extra)
                if hidden and kind == "interior":
                    layers *= 1 + steep * np.maximum(0.0, np.arange(k) / n - bend)
                total = float(layers.sum()) + (n - k) * tail + output_s * (tail / tail_s) ** (k < n)
                return total + (crossing_s if 0 < k < n else 0.0)

            true = seconds(head_s * wrong["head"], tail_s * wrong["tail"], True)
            if kv != "device":
                true += k * extra * (missed - 1)
            if kind == "plateau":
                true = max(true, floor * n * tail_s * wrong["tail"])
            if kind == "cliff" and share > edge:
                true *= jump
            predicted = seconds(head_s, tail_s, False)
            options.append(Option(kv, share, k * (head_s + extra) / predicted, predicted))
            truth.append(true * wrong["all"] * rng.lognormal(0, 0.005))
    return Simulated(kind, tuple(options), tuple(truth), off)


def measuring_s(seconds: float) -> float:
    """What one measurement of a placement takes."""
    return START_S + TOKENS * seconds


@dataclass(frozen=True)
class Outcome:
    """How a search went."""

    chosen: int
    regret: float
    """How much slower what it chose is than the best, relative."""
    cost: float
    """Time spent measuring, as a share of measuring every option once."""
    n_measured: int


def search(simulated: Simulated, seed: int, noise: float = NOISE, most: int = 10_000) -> Outcome:
    """Run the search to its end."""
    rng = np.random.default_rng([seed, 1])
    seen: list[Observation] = []
    spent = 0.0
    while len(seen) < most:
        belief = believe(simulated.options, seen, simulated.uncertainty)
        option = next_option(simulated.options, belief, range(len(simulated.options)))
        if option is None:
            break
        seconds = simulated.truth[option] * math.exp(rng.normal(0, noise))
        seen.append(Observation(option, seconds))
        spent += measuring_s(seconds)
    chosen = believe(simulated.options, seen, simulated.uncertainty).leader()
    assert chosen is not None
    return Outcome(
        chosen=chosen,
        regret=simulated.truth[chosen] / simulated.truth[simulated.best] - 1,
        cost=spent / sum(measuring_s(seconds) for seconds in simulated.truth),
        n_measured=len(seen),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of them does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
