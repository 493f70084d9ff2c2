"""A thread that does one job after another, and that Ctrl-C in the thread that waits for it cannot break.

`concurrent.futures` can be: its locks are taken in Python code, and an exception that a signal raises there leaves them
taken for ever. The locks and the queue used here are taken in one step.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from hybrid.errors import EngineError

T = TypeVar("T")


class Job(Generic[T]):
    """Work given to a Worker: `result` waits for it."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._value: T
        self.error: BaseException | None = None
        """What it raised; valid once it is over."""
        self._running = threading.Lock()
        self._running.acquire()

    def run(self) -> None:
        """Do the work; called once, by the worker."""
        assert self._work is not None
        try:
            self._value = self._work()
        except BaseException as error:
            self.error = error
        finally:
            self._work = None  # what it refers to may go
            self._running.release()

    def wait(self) -> None:
        """Until it is over."""
        with self._running:
            pass

    def result(self) -> T:
        """Wait; then what the work returned, or raise what it raised."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self._value


class Worker:
    """One thread. It ends with `close`, with the last reference to this object, or with the program."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Job[T]:
        """Do `work` after what was submitted before. Interrupted, it may have been submitted nevertheless. Raises
        EngineError once closed: nobody would ever do it."""
        if self._closed:
            raise EngineError("This model is closed.")
        job = Job(work)
        self._jobs.put(job)
        return job

    def do(self, work: Callable[[], T], stop: Callable[[], None] = lambda: None) -> T:
        """`submit`, and wait: what it returned or raised. Interrupted, the waiting ends once the work is over, which
        `stop` may hasten."""
        job = self.submit(work)
        try:
            return job.result()
        except BaseException:
            stop()
            raise
        finally:
            wait_all([job])

    def close(self, wait: bool = True) -> None:
        """Finish what was submitted and end the thread; without `wait`, some time. Calling it again does nothing."""
        self._closed = True
        self._jobs.put(None)
        if wait:
            _patiently(self._thread.join)

    def __del__(self) -> None:
        """Ctrl-C may come while the thread starts, or before whoever wanted to close it could."""
        self._jobs.put(None)


def wait_all(jobs: Iterable[Job[Any]]) -> None:
    """Until every job is over, whatever signals come meanwhile (Ctrl-C, SIGTERM); what the last of them raised is
    raised then."""
    jobs = list(jobs)

    def wait() -> None:
        for job in jobs:
            job.wait()

    _patiently(wait)


def _patiently(wait: Callable[[], None]) -> None:
    interruption: BaseException | None = None
    while True:
        try:
            wait()
            break
        except (KeyboardInterrupt, SystemExit) as e:
            interruption = e
    if interruption is not None:
        raise interruption


def _work(jobs: queue.SimpleQueue[Job[Any] | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job
