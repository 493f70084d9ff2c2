"""The command line: one module a command. Each parses, calls down, prints and exits; nothing is computed here."""

from __future__ import annotations

import select
import signal
import sys
from typing import NoReturn, TextIO

__all__ = ["main"]

INTERRUPTED = 130
ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Told to end, and the terminal that was closed: the exit code is 128 + the signal, as a shell has it."""


def takes_more(stream: TextIO) -> bool:
    """Whether it can be written to without waiting for who reads it, who may never go on (`hybrid … | less`)."""
    try:
        return bool(select.select([], [stream], [], 0)[1])
    except (OSError, ValueError):  # no file behind it
        return True


def main() -> NoReturn:
    """Entry point of the console script; Ctrl-C while the command line itself is being imported is an interrupt too."""
    try:
        from hybrid.cli.app import main as run
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    run()
