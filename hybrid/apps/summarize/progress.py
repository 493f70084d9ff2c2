"""How far a summary is, and how long it will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybrid.apps.summarize.work import Job

DECODE_COST = 6
"""What a generated token costs in prompt tokens: only for guessing the time left."""


@dataclass(frozen=True)
class Progress:
    """One moment of a run."""

    name: str
    phase: str
    done_tokens: int
    """Of the document, read so far."""
    total_tokens: int
    jobs_done: int
    jobs: int
    """In this phase and level."""
    left_s: float | None
    """None until something was measured."""


class Meter:
    """Counts work done against work to come, and tells `report`."""

    def __init__(self, name: str, total_tokens: int, report: Callable[[Progress], None]) -> None:
        self._name, self._total, self._report = name, total_tokens, report
        self._read = 0
        self._todo = self._done = self._later = 0.0
        self._started: float | None = None
        self._phase, self._jobs, self._jobs_done = "", 0, 0

    def begin(self, jobs: Sequence[Job], later: float) -> None:
        """A level begins: its jobs, and the work that will come after it (see `work_of`)."""
        self._phase, self._jobs, self._jobs_done = jobs[0].phase if jobs else "", len(jobs), 0
        self._todo, self._later = sum(map(work_of, jobs)), later
        self.tick()

    def done(self, job: Job, *, saved: bool, reads: bool) -> None:
        """A job is finished; `saved`: by an earlier run. `reads`: its text is the document's."""
        self._jobs_done += 1
        self._todo -= work_of(job)
        if not saved:
            self._done += work_of(job)
        if reads:
            self._read += job.n_new
        self.tick()

    def start_clock(self) -> None:
        """The model begins to work (answers from a checkpoint take no time and do not count)."""
        if self._started is None:
            self._started = time.monotonic()

    def tick(self) -> None:
        """Report again."""
        left = None
        if self._started is not None and self._done:
            left = (time.monotonic() - self._started) / self._done * (self._todo + self._later)
        self._report(Progress(self._name, self._phase, self._read, self._total, self._jobs_done, self._jobs, left))


def work_of(job: Job) -> float:
    """A job's work in prompt tokens."""
    return len(job.prompt) - job.n_prefix + DECODE_COST * job.max_tokens
