"""What tuning and comparing have in common: the tokens they evaluate, and words about a machine that is not idle."""

from __future__ import annotations

import os
import time

import psutil

from hybrid.schedule.limits import busy_load, usable_cores

WARMUP = 4
"""Tokens decoded before any is timed."""
DISTURBED = 0.1
"""Where other programs took more than this share of the processors, that is worth a word."""

NOT_USED = ("idle", "iowait", "guest", "guest_nice")
"""Of psutil's times: nobody's, and those that are in others too."""


def prompt_tokens(n: int, n_vocab: int) -> tuple[int, ...]:
    """n ordinary tokens, not all the same; the same ones every time."""
    span = max(1, min(n_vocab, 4096) - 100)
    return tuple(min(100, n_vocab - 1) + (7919 * i) % span if n_vocab > 200 else i % n_vocab for i in range(n))


def busy() -> list[str]:
    """A sentence where other programs' work will show in every figure."""
    if (load := busy_load()) is None:
        return []
    return [
        f"Other programs keep the processors busy (a load of {load:.1f} on {usable_cores()} cores): "
        "what is measured now may not hold when they are done."
    ]


class Others:
    """What other programs take of the processors, from now on."""

    def __init__(self) -> None:
        self._start, self._before = time.perf_counter(), _all_s() - _own_s()

    def note(self) -> list[str]:
        """A sentence where it was enough to show in what this process and its children have measured until now; they
        are counted once they have ended."""
        elapsed, cpus = time.perf_counter() - self._start, os.cpu_count() or 1
        taken = (_all_s() - _own_s() - self._before) / max(elapsed, 1e-9)
        if taken <= DISTURBED * cpus:
            return []
        return [
            f"While this was measured other programs took {taken:.1f} of the {cpus} processors: on a quiet machine it "
            "is quicker, and not by the same factor everywhere."
        ]


def _all_s() -> float:
    """Processor seconds that anything on this machine has used since it was started."""
    times = psutil.cpu_times()._asdict()
    return float(sum(seconds for name, seconds in times.items() if name not in NOT_USED))


def _own_s() -> float:
    """This process's, and its children's that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
