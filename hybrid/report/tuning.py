"""What a tuning was asked, and what came of it: data for the table, the JSON and the plot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybrid.report.trial import Spread, Trial
from hybrid.schedule.budget import VRAM_RESERVE, Budget
from hybrid.schedule.estimate import Objective
from hybrid.schedule.placement import KVDtype, Placement


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """What a person wants to know."""

    n_ctx: int
    depth: int | None = None
    """Tokens in the context while speed is measured (for `ttft`: of the prompt); None: half the context."""
    n_sequences: int = 1
    objective: Objective = "latency"
    device: str | None = None
    engine: str = "auto"
    """Whose GPU layers are tried: "hybrid" (ours), "llama.cpp" (its own), or "auto" (both, where it has a GPU)."""
    vram_bytes: int | None = None
    """What the head may take; None: what is free, less the reserve."""
    vram_reserve: int = VRAM_RESERVE
    budget_s: float = 120.0
    threads: int | str | None = None
    """None: all usable cores; a number; "auto": a few numbers are tried."""
    n_batch: int | None = None
    kv_dtype: KVDtype = "f16"
    exhaustive: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """One placement and what is known of it. Seconds are of the objective."""

    placement: Placement
    vram_bytes: int
    """By the Ledger."""
    ram_bytes: int
    predicted_s: float | None
    """Before it was measured, by the CostModel and what was measured of others; None where nobody predicted it."""
    measured: Spread | None
    n_runs: int
    """Processes behind it, earlier sessions' too."""
    device_bytes: int | None
    host_bytes: int | None
    """The most that was seen."""
    verdict: str
    """"best", "tie", how much slower, how it failed, or "not measured"."""
    message: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        spread = self.measured
        return {
            "placement": self.placement.to_dict(),
            "vram_bytes": self.vram_bytes,
            "ram_bytes": self.ram_bytes,
            "predicted_s": self.predicted_s,
            "measured_s": None if spread is None else spread.median,
            "measured_least_s": None if spread is None else spread.least,
            "measured_most_s": None if spread is None else spread.most,
            "n_samples": 0 if spread is None else spread.n,
            "n_runs": self.n_runs,
            "peak_device_bytes": self.device_bytes,
            "peak_host_bytes": self.host_bytes,
            "verdict": self.verdict,
            "message": self.message,
        }


@dataclass(frozen=True, kw_only=True)
class TuneReport:
    """The answer."""

    request: TuneRequest
    model: str
    device: str
    depth: int
    budget: Budget
    rows: tuple[Row, ...]
    best: int | None
    """The winner's row."""
    command: str
    """What uses it; empty where there is none."""
    noise: float
    """Relative, of one measurement."""
    reused: int
    """Measurements of earlier sessions."""
    trials: tuple[Trial, ...]
    """This session's."""
    notes: tuple[str, ...]
    interrupted: bool
    elapsed_s: float

    @property
    def trouble(self) -> str:
        """One sentence on why there is no winner; empty where there is one."""
        if self.best is not None:
            return ""
        failures = [row.message for row in self.rows if row.message]
        if failures:
            return f"Nothing was measured; the first failure: {failures[0]}"
        why = "it was interrupted" if self.interrupted else "the time was up (--budget gives more)"
        return f"Nothing was measured: {why}."

    @property
    def emulated(self) -> bool:
        """Whether the GPU was the CPU."""
        return self.device == "cpu" and any(row.placement.n_gpu_layers for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values; prompts are given by their lengths."""
        return {
            "model": self.model,
            "device": self.device,
            "emulated": self.emulated,
            "objective": self.request.objective,
            "n_ctx": self.request.n_ctx,
            "n_sequences": self.request.n_sequences,
            "depth": self.depth,
            "vram_budget_bytes": self.budget.vram_bytes,
            "ram_budget_bytes": self.budget.ram_bytes,
            "candidates": [row.to_dict() for row in self.rows],
            "best": self.best,
            "command": self.command,
            "noise": self.noise,
            "reused": self.reused,
            "trials": [trial.to_short_dict() for trial in self.trials],
            "notes": list(self.notes),
            "interrupted": self.interrupted,
            "elapsed_s": self.elapsed_s,
        }
