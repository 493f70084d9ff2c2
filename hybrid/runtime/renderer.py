"""Rendering Jinja templates in a process of its own.

A chat template is a program out of a downloaded file. Jinja's sandbox keeps it from reaching anything, but not from
taking all memory (`'%2000000000d' % 1`) or all time, nor could another thread stop it. So one process renders all
templates, within limits; where a template exceeds them, that process ends, and the next request begins another.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from hybrid.errors import EngineError

COMMAND = (sys.executable, "-P", "-m", "hybrid.runtime.renderer_child")
CPU_S = 3.0
"""Seconds that one rendering may compute: a thousand times what a long conversation takes."""
MEMORY_BYTES, MEMORY_FACTOR = 256 << 20, 64
"""What the process may allocate, and for each byte of a request."""
WALL_S = 120.0
"""Seconds to wait for an answer where other programs leave it no processor."""


class TemplateError(Exception):
    """A template does not compile, refuses what it is given, or exceeds the limits. Says why in words."""


@dataclass(frozen=True)
class SandboxedTemplate:
    """A Jinja template that is rendered elsewhere."""

    source: str

    def render(self, **variables: Any) -> str:
        """The text. Raises TemplateError, TypeError or ValueError for variables that are not JSON."""
        return renderer().ask({"source": self.source, "variables": variables})


def compiled(source: str) -> SandboxedTemplate:
    """The template. Raises TemplateError where it does not compile."""
    renderer().ask({"source": source})
    return SandboxedTemplate(source)


class Renderer:
    """The process, which begins with the first request and ends with `close` or this one."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any]) -> str:
        """Compile the request's `source`, and render it where there are `variables`."""
        line = json.dumps(request).encode() + b"\n"
        limits = {"cpu_s": CPU_S, "memory_bytes": MEMORY_BYTES + MEMORY_FACTOR * len(line)}
        with self._lock:
            try:
                answer = self._exchange(json.dumps(limits).encode() + b"\n" + line)
            except BaseException:  # Ctrl-C too: what it answers later would be taken for the next answer
                self._end()
                raise
        if "failed" in answer:
            raise TemplateError(answer["failed"])
        return str(answer["text"])

    def close(self) -> None:
        """End the process. Harmless when repeated."""
        with self._lock:
            self._end()

    def _exchange(self, lines: bytes) -> dict[str, Any]:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(lines)
            process.stdin.flush()
        except BrokenPipeError:
            raise self._death(process) from None
        return self._answer(process, process.stdout)

    def _answer(self, process: subprocess.Popen[bytes], stdout: IO[bytes]) -> dict[str, Any]:
        if not _readable(stdout):
            raise TemplateError(f"it was not done after {WALL_S:.0f} s")
        line = stdout.readline()
        if not line.endswith(b"\n"):
            raise self._death(process)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is not meant for it
        )
        return self._process

    def _death(self, process: subprocess.Popen[bytes]) -> Exception:
        code = process.wait(WALL_S)
        if code == -signal.SIGPROF:
            return TemplateError(f"it takes more than {CPU_S:g} s")
        if code < 0:
            return TemplateError(f"the process that renders it ended with {signal.Signals(-code).name}")
        return EngineError(f"The process that renders chat templates could not run (exit code {code}).")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(OSError):  # what it never read
                pipe.close()


def _readable(pipe: IO[bytes]) -> bool:
    """Wait for something to read; False where nothing comes."""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        return bool(selector.select(WALL_S))


_renderer: Renderer | None = None


def renderer() -> Renderer:
    """This process's own: a forked one shares no pipe with its parent."""
    global _renderer
    if _renderer is None or _renderer.pid != os.getpid():
        _renderer = Renderer()
    return _renderer


@atexit.register
def _close() -> None:
    if _renderer is not None and _renderer.pid == os.getpid():
        _renderer.close()
