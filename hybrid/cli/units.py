"""Numbers on the command line, and amounts with units: bytes and times."""

from __future__ import annotations

import math
import re
from typing import Any

import click

BYTES = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}
MOST_BYTES, MOST_SECONDS = 1 << 60, 1_000_000.0
"""More is a slip of the hand, and what a clock cannot wait for."""


class Whole(click.IntRange):
    """A whole number between limits, and an error that says so."""

    name = "whole number"


class Number(click.FloatRange):
    """A number between limits; neither nan nor inf is one."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


class Bytes(click.ParamType[int]):
    """`128MiB`, `6g`, `1.5GB`, `4096`: as memory is sold, a GB here is 2**30 too."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", value.strip().lower())
        if not match or (amount := float(match[1]) * BYTES[match[2]]) > MOST_BYTES:
            self.fail(f"{value!r} is not an amount of memory such as 6GiB or 128MiB", param, ctx)
        return int(amount)


class Seconds(click.ParamType[float]):
    """`50ms`, `1.5s`, `2min`; a bare number is seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number of seconds."""
        if isinstance(value, (int, float)):
            return float(value)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s|min)?", value.strip().lower())
        if not match or not 0 < (seconds := float(match[1]) * SECONDS[match[2] or "s"]) <= MOST_SECONDS:
            self.fail(f"{value!r} is not a time such as 50ms or 2s", param, ctx)
        return seconds


def size(n_bytes: int) -> str:
    """Bytes in a table."""
    if n_bytes >= 1000 << 30:
        return f"{n_bytes / 2**40:.1f} TiB"
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 1 << 30 else f"{n_bytes / 2**20:.0f} MiB"
