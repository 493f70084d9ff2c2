"""Runs a condition in a process of its own, so that whatever happens to it is a record and not the end of the rest."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from hybrid.report.trial import Condition, Failure, FailureKind, PeakMemory, Trial
from hybrid.schedule.cost_fit import Measurement
from hybrid.schedule.placement import Placement
from hybrid.schedule.profile import now

WORKER = (sys.executable, "-P", "-m", "hybrid.apps.worker")
OnStage = Callable[[str, int], None]
"""Called with the stage that begins ("load", "prompt", "decode") and the process's id."""


@dataclass(frozen=True)
class Outcome:
    """What a process said at its end, or how it failed."""

    result: dict[str, Any] | None
    failure: Failure | None
    wall_s: float


def run_trial(condition: Condition, *, timeout_s: float | None = None, on_stage: OnStage | None = None) -> Trial:
    """Run the condition once. Never raises for what happens to it; Ctrl-C ends the process and is raised."""
    outcome = run_task({"task": "run", **condition.to_dict()}, timeout_s=timeout_s, on_stage=on_stage)
    if outcome.result is None:
        return Trial(condition=condition, failure=outcome.failure, wall_s=outcome.wall_s, at=now())
    found = outcome.result
    return Trial(
        condition=condition,
        load_s=found["load_s"],
        warmup_s=found["warmup_s"],
        ttft_s=tuple(found["ttft_s"]),
        decode_s=tuple(found["decode_s"]),
        launch_s=found.get("launch_s"),
        moved_bytes=found["moved_bytes"],
        tokens=tuple(found["tokens"]),
        memory=PeakMemory(**found["memory"]),
        wall_s=outcome.wall_s,
        at=now(),
        versions=found["versions"],
    )


def run_calibration(
    model: str, placement: Placement, depth: int, *, vram_budget: int | None = None, timeout_s: float | None = None
) -> list[Measurement]:
    """The halves of a placement timed apart (`hybrid.apps.calibrate`), in a process of its own; empty if it failed."""
    task = {"task": "calibrate", "model": model, "placement": placement.to_dict(), "depth": depth}
    outcome = run_task({**task, "vram_budget": vram_budget}, timeout_s=timeout_s)
    found = outcome.result["measurements"] if outcome.result else []
    return [Measurement(**{**m, "placement": Placement(**m["placement"])}) for m in found]


def run_task(
    task: dict[str, Any],
    *,
    timeout_s: float | None = None,
    on_stage: OnStage | None = None,
    command: Sequence[str] = WORKER,
) -> Outcome:
    """Give `command` a task on stdin and read its lines until it ends. It is ended on the way out, whatever happens;
    Ctrl-C does not reach it by itself, for it has a process group of its own."""
    start = time.perf_counter()
    deadline = None if timeout_s is None else start + timeout_s
    stage = ""
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
            )
        except OSError as e:  # no memory to fork, no more processes allowed
            failure = Failure(kind="lost", message=f"Its process could not be started: {e.strerror or e}.")
            return Outcome(None, failure, time.perf_counter() - start)
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError):  # it died at once; its end says why
                process.stdin.write(json.dumps(task).encode() + b"\n")
                process.stdin.flush()
            for said in _lines(process.stdout, deadline):
                if said["event"] == "done":
                    return Outcome(said, None, time.perf_counter() - start)
                if said["event"] == "failed":
                    failure = Failure(kind=said["kind"], message=said["message"], stage=stage)
                    return Outcome(None, failure, time.perf_counter() - start)
                stage = said["event"]
                if on_stage is not None:
                    on_stage(stage, process.pid)
            if deadline is not None and time.perf_counter() >= deadline:
                failure = Failure(kind="too slow", message=f"It took longer than {timeout_s:.3g} s.", stage=stage)
            else:
                failure = _death(process.wait(), errors, stage)
            return Outcome(None, failure, time.perf_counter() - start)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]


def _lines(pipe: IO[bytes], deadline: float | None) -> Any:
    """The process's lines until it closes its stdout, or the deadline. Reading is a thread's business: a pipe has no
    timeout of its own that would work everywhere."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        with suppress(OSError, ValueError):  # closed under us
            while line := pipe.readline():
                lines.put(line)
        lines.put(b"")

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=None if deadline is None else max(0.0, deadline - time.perf_counter()))
        except queue.Empty:
            return
        if not line:
            return
        with suppress(ValueError):  # half a line: it died amid it
            yield json.loads(line)


def _death(code: int, errors: IO[bytes], stage: str) -> Failure:
    """What an exit code and the last words say."""
    if code == -signal.SIGKILL:
        return Failure(
            kind="killed", stage=stage, message="It was killed (SIGKILL): most likely the machine ran out of memory."
        )
    if code < 0:
        return Failure(kind="crashed", stage=stage, message=f"It crashed with {signal.Signals(-code).name}.")
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - 4096))
    words = errors.read().decode(errors="replace").strip().splitlines()
    last = words[-1].strip() if words else "it said nothing"
    kind: FailureKind = "lost" if code == 0 else "out of RAM" if last.startswith("MemoryError") else "crashed"
    return Failure(kind=kind, stage=stage, message=f"It ended with exit code {code}: {last}.")
