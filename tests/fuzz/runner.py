"""Runs the program on one spoilt file after another, each in a fork of a process that has imported everything.

As a module it is that process: a JSON line in ({"args", "stdin", "output"}) for a run, a JSON line out ({"code",
"seconds", "rss_bytes"}), where code is that of the exit or minus the signal, and None for a run that took too long.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from hybrid.printable import printable

LIMIT_S = 10.0
LIMIT_BYTES = 1 << 30
HARD_BYTES = 6 << 30
"""What a run may allocate before the system says no: it would be over LIMIT_BYTES long before."""


@dataclass(frozen=True)
class Run:
    """How a run ended, and what is wrong with that (empty: nothing)."""

    code: int | None
    seconds: float
    rss_bytes: int
    words: str
    problem: str


class Runner:
    """The process. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        """Files are written in `folder`, and so are verdicts and profiles."""
        self.folder = folder
        environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.runner"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[2],
        )

    def run(self, args: list[str], stdin: str = "") -> Run:
        """Run the program and judge how it ended."""
        output = self.folder / "output"
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"args": args, "stdin": stdin, "output": str(output)}) + "\n")
        self._process.stdin.flush()
        result = json.loads(self._process.stdout.readline())
        words = output.read_bytes()[-4096:].decode(errors="replace").strip()
        return Run(**result, words=words, problem=problem_of(words=words, **result))

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def problem_of(code: int | None, seconds: float, rss_bytes: int, words: str) -> str:
    """What a run did that none may do."""
    if code is None:
        return f"it hung ({seconds:.0f} s)"
    if code < 0:
        return f"it died of {signal.Signals(-code).name}"
    if code not in (0, 2):
        return f"exit code {code}"
    if "Traceback (most recent call last)" in words:
        return "a traceback"
    lines = [line for line in words.splitlines() if line.startswith("hybrid: ")]
    if code == 2 and (len(lines) != 1 or not words.endswith(lines[0])):
        return "no sentence, or more than one"
    if any(printable(line) != line for line in lines):
        return "a sentence with control characters"
    if seconds > LIMIT_S:
        return f"it took {seconds:.1f} s"
    if rss_bytes > LIMIT_BYTES:
        return f"it held {rss_bytes >> 20} MiB"
    return ""


def main() -> None:
    """Import what runs need, and fork for each."""
    import torch  # noqa: F401

    import hybrid.cli.app
    import hybrid.cli.chat
    import hybrid.cli.generate
    import hybrid.head.head
    import hybrid.runtime.api
    from hybrid.tail.llama import lib

    lib()
    for line in sys.stdin:
        request = json.loads(line)
        start = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _run(hybrid.cli.app.main, request)
        result = _wait(pid, start)
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


def _run(program: Any, request: dict[str, Any]) -> None:
    """In the fork: the program from its entry point to its exit."""
    code = 1
    try:
        os.setsid()
        out = os.open(request["output"], os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        stdin = os.memfd_create("stdin")
        os.write(stdin, request["stdin"].encode())
        os.lseek(stdin, 0, os.SEEK_SET)
        for theirs, ours in ((stdin, 0), (out, 1), (out, 2)):
            os.dup2(theirs, ours)
        sys.stdin = open(0)  # noqa: SIM115 - for the rest of this process
        resource.setrlimit(resource.RLIMIT_DATA, (HARD_BYTES, HARD_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.argv = ["hybrid", *request["args"]]
        try:
            program()
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else 1
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _wait(pid: int, start: float) -> dict[str, Any]:
    pidfd = os.pidfd_open(pid)
    hung = not select.select([pidfd], [], [], 3 * LIMIT_S)[0]
    os.close(pidfd)
    if hung:
        os.killpg(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    return {
        "code": None if hung else os.waitstatus_to_exitcode(status),
        "seconds": time.monotonic() - start,
        "rss_bytes": usage.ru_maxrss << 10,
    }


if __name__ == "__main__":
    main()
