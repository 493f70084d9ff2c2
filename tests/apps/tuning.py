"""What the tests of tuning share: processes that are made up, and a small model."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybrid.apps.tune import TuneReport, TuneRequest, tune
from hybrid.report.trial import Condition, Failure, PeakMemory, Trial
from hybrid.schedule.placement import Placement
from tests.tiny import write_tiny

MIB = 1 << 20
Speed = Callable[[Placement], float]


class Fake:
    """Stands in for the processes: seconds a token by a function of the placement; notes what was run."""

    def __init__(self, seconds: Speed, fails: Callable[[Placement], str | None] = lambda p: None) -> None:
        self.seconds, self.fails = seconds, fails
        self.ran: list[Condition] = []
        self.interrupt_after = 1000
        self.slowed = 1.0
        """How much longer one of three stretches takes, because the machine is busy."""

    def run_trial(self, condition: Condition, **_: Any) -> Trial:
        if len(self.ran) >= self.interrupt_after:
            raise KeyboardInterrupt
        self.ran.append(condition)
        kind: Any = self.fails(condition.placement)
        if kind is not None:
            return Trial(condition=condition, failure=Failure(kind=kind, message="It was bad."), wall_s=0.1)
        jitter = 1 + 0.01 * math.sin(7 * len(self.ran))
        seconds = self.seconds(condition.placement) * jitter
        return Trial(
            condition=condition,
            load_s=0.1,
            ttft_s=(100 * seconds,) * condition.prefills,
            decode_s=(seconds, 1.01 * seconds, 0.99 * self.slowed * seconds) if condition.repeats else (),
            memory=PeakMemory(device_bytes=MIB, host_bytes=2 * MIB),
            wall_s=0.1,
        )


def small_model(folder: Path) -> Path:
    """Twelve small layers, for contexts up to 512."""
    return write_tiny(folder / "m.gguf", n_layers=12, n_embd=64, n_heads=1, n_kv_heads=1, n_ff=64, n_ctx=512)


def inner(p: Placement) -> float:
    """Quickest with 5 layers on the device."""
    return 0.01 + 0.002 * abs(p.n_gpu_layers - 5)


def run(model: Path, **request: Any) -> TuneReport:
    return tune(model, TuneRequest(**{"n_ctx": 256, "device": "cpu", **request}))
