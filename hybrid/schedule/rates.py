"""The rates that the CostModel's equations multiply with, and how they change with threads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

THREAD_SCALING = 0.9
"""A pool of n threads does n ** 0.9 of one's work where memory does not limit it."""


def thread_factor(threads: int, than: int) -> float:
    """How much more `threads` threads do than `than`."""
    return math.pow(threads / than, THREAD_SCALING)


@dataclass(frozen=True, kw_only=True)
class HalfRates:
    """c, W, F, A and G of one half, on `threads` threads (on a GPU they do not depend on threads)."""

    layer_s: float
    weight_bytes_per_s: float
    flop_per_s: float
    kv_bytes_per_s: float
    attention_flop_per_s: float
    output_bytes_per_s: float | None = None
    """W of the output head, which is often of another type than the layers; None: as theirs."""
    chunk_layer_s: float = 0.0
    """c of a chunk's layer beyond `layer_s`."""
    threads: int = 0
    """0: the rates do not depend on threads."""

    def at(self, threads: int) -> HalfRates:
        """The rates on another number of threads."""
        return _at(self, threads) if self.threads and threads != self.threads else self

    def slower(self, factor: float) -> HalfRates:
        """Everything takes so many times as long."""
        return replace(
            self,
            layer_s=self.layer_s * factor,
            weight_bytes_per_s=self.weight_bytes_per_s / factor,
            flop_per_s=self.flop_per_s / factor,
            kv_bytes_per_s=self.kv_bytes_per_s / factor,
            attention_flop_per_s=self.attention_flop_per_s / factor,
            output_bytes_per_s=self.output_bytes_per_s and self.output_bytes_per_s / factor,
            chunk_layer_s=self.chunk_layer_s * factor,
        )


@lru_cache(maxsize=64)
def _at(rates: HalfRates, threads: int) -> HalfRates:
    factor = thread_factor(threads, rates.threads)
    return replace(
        rates,
        weight_bytes_per_s=rates.weight_bytes_per_s * factor,
        output_bytes_per_s=rates.output_bytes_per_s and rates.output_bytes_per_s * factor,
        flop_per_s=rates.flop_per_s * factor,
        kv_bytes_per_s=rates.kv_bytes_per_s * factor,
        attention_flop_per_s=rates.attention_flop_per_s * factor,
        threads=threads,
    )


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """Every rate the equations need, and how far they may be trusted."""

    head: HalfRates
    tail: HalfRates
    host_kv_bytes_per_s: float
    """A_host: attention of the head's layers on the CPU."""
    bus_bytes_per_s: float
    """B, host to device."""
    back_bytes_per_s: float
    """Device to host."""
    crossing_s: float
    """A synchronisation between the halves."""
    token_s: float
    """t_0."""
    uncertainty: float
    """Relative: true times are within this share of predicted ones, more often than not."""
    measured: bool
    """Fitted to measurements of this model on this machine, or assumed from the machine's figures."""

    def slower(self, factor: float, *, head: bool) -> Coefficients:
        """What the host does takes so many times as long; the head too, where the host is its device (`head`)."""
        return replace(
            self,
            head=self.head.slower(factor) if head else self.head,
            tail=self.tail.slower(factor),
            host_kv_bytes_per_s=self.host_kv_bytes_per_s / factor,
            token_s=self.token_s * factor,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Coefficients:
        """The inverse of `asdict`. Raises TypeError, KeyError or ValueError for what is none."""
        halves = {half: HalfRates(**values[half]) for half in ("head", "tail")}
        for part in (values, *(values[half] for half in halves)):
            if not all(_sound(key, value) for key, value in part.items() if key not in halves):
                raise ValueError("rates that cannot be")
        return cls(**{**values, **halves})


def _sound(name: str, value: object) -> bool:
    if value is None:
        return name == "output_bytes_per_s"
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return False
    return value > 0 if name.endswith("_per_s") else value >= 0
