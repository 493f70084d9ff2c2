"""The command line: one module a command. Each parses, calls down, prints and exits; nothing is computed here."""

from __future__ import annotations

import sys
from typing import NoReturn

__all__ = ["main"]

INTERRUPTED = 130


def main() -> NoReturn:
    """Entry point of the console script; Ctrl-C while the command line itself is being imported is an interrupt too."""
    try:
        from hybrid.cli.app import main as run
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    run()
