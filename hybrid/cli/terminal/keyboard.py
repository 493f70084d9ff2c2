"""The keyboard while nobody reads it: what is typed waits, and Ctrl-C stops what is being done."""

from __future__ import annotations

import os
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

PASTE_ON, PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"
"""Bracketed paste: the terminal marks what is pasted, so that its lines stay one message."""


@contextmanager
def silent_keyboard() -> Iterator[None]:
    """Within, what is typed is not echoed into what is printed; it stays there for the next prompt, whole: a terminal
    that edits lines itself would drop what a line has beyond 4096 characters."""
    try:
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
    except (OSError, ValueError, termios.error):  # stdin is no terminal
        yield
        return
    silent = [*before[:3], before[3] & ~(termios.ECHO | termios.ICANON), *before[4:]]

    def silence(*_: object) -> None:
        termios.tcsetattr(fd, termios.TCSADRAIN, silent)
        _tell(PASTE_ON)

    def on_continue(*_: object) -> None:  # `fg` after Ctrl-Z: the shell had its own settings meanwhile
        with suppress(OSError, termios.error, RuntimeError):  # the last: amid another write
            if os.tcgetpgrp(fd) == os.getpgrp():
                silence()

    silence()
    previous = signal.signal(signal.SIGCONT, on_continue)
    try:
        yield
    finally:
        signal.signal(signal.SIGCONT, previous)
        _tell(PASTE_OFF)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextmanager
def interrupts(cancel: Callable[[], None]) -> Iterator[None]:
    """Within, Ctrl-C calls `cancel`, so that what is under way ends well; pressed again it is KeyboardInterrupt."""
    pressed = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        cancel()

    previous = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _tell(code: str) -> None:
    """Give the terminal a code that it does not show."""
    if os.environ.get("TERM", "dumb") == "dumb":
        return
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            stream.write(code)
            stream.flush()
            return
