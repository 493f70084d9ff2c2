"""The command line: one module a command. Each parses, calls down, prints and exits; nothing is computed here."""

from __future__ import annotations

from hybrid.cli.app import main

__all__ = ["main"]
