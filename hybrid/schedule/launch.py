"""What a launch costs: seconds for kernels that have nothing to do, one by one and replayed as a graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

KERNELS = 20
"""Of the graph: about as many as a layer has in a step of decode (`hybrid.schedule.head_size.GRAPH_BYTES`)."""
LAUNCHES, REPLAYS, RUNS = 1000, 100, 3

Launch = Callable[[], object]


@dataclass(frozen=True)
class LaunchCost:
    """Seconds, where nothing else is queued on the device."""

    launch_s: float
    """Of one kernel launched by the host."""
    replay_s: float | None
    """Of one replay of a graph of KERNELS kernels; None where nothing can be recorded."""


def launch_cost(
    kernel: Launch,
    synchronize: Launch,
    record: Callable[[Launch], Launch] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> LaunchCost:
    """Time launches of `kernel`, a tiny one, which returns before the device is done; `synchronize` waits for all of
    them. `record` makes a replay of what a function launches; None where the device has no graphs.

    The best of some runs, after one that warms up. So far only a stand-in for a device has been timed: whoever has a
    GPU sees its figures with `hybrid machine`.
    """
    kernel()
    synchronize()
    launch_s = _best(kernel, LAUNCHES, synchronize, clock)
    if record is None:
        return LaunchCost(launch_s, None)

    def layer() -> None:
        for _ in range(KERNELS):
            kernel()

    replay = record(layer)
    replay()
    synchronize()
    return LaunchCost(launch_s, _best(replay, REPLAYS, synchronize, clock))


def _best(launch: Launch, n: int, synchronize: Launch, clock: Callable[[], float]) -> float:
    """Seconds a launch, from the quickest of some runs of n."""
    seconds = []
    for _ in range(RUNS):
        start = clock()
        for _ in range(n):
            launch()
        synchronize()
        seconds.append((clock() - start) / n)
    return min(seconds)
