"""Threads of our own end, whenever Ctrl-C comes."""

from __future__ import annotations

import threading

import pytest

from hybrid.errors import EngineError
from hybrid.runtime.worker import Worker


def test_a_thread_ends_although_ctrl_c_came_while_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt) as raised:
            Worker("short-lived")
    del raised  # its traceback keeps the worker
    started[0].join(60)
    assert not started[0].is_alive()


def test_a_closed_one_takes_no_work_that_nobody_would_do() -> None:
    worker = Worker("short-lived")
    assert worker.do(lambda: 7) == 7
    worker.close()
    with pytest.raises(EngineError, match="closed"):
        worker.submit(lambda: 7)
