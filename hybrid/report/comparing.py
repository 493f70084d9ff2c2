"""What a comparison was asked, and what came of it: data for the table, the verdict, the JSON and the plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from hybrid.report.trial import Failure, Spread, Trial
from hybrid.schedule.budget import VRAM_RESERVE
from hybrid.schedule.placement import KVDtype, Placement

SHARED_OUT = ("n_threads_head", "n_threads_tail", "n_threads_tail_batch", "n_threads_attend")
"""Fields that follow from where the work is: the same cores, shared out."""
LEAST_APART, LEAST_APART_ONCE = 0.03, 0.10
"""What two speeds must differ by to be told apart, relative; more where one of them was measured only once."""


@dataclass(frozen=True, kw_only=True)
class CompareRequest:
    """What a person wants compared. None: chosen for the model and the machine."""

    modes: tuple[str, ...] | None = None
    depths: tuple[int, ...] | None = None
    prompt: str | None = None
    """Text to evaluate, instead of `depths`."""
    n_sequences: tuple[int, ...] = (1,)
    kv_dtypes: tuple[KVDtype, ...] = ("f16",)
    n_decode: int = 32
    repeats: int = 3
    """Processes a condition, each of which is a Trial."""
    n_batch: int = 512
    device: str | None = None
    vram_bytes: int | None = None
    """What the device may hold, counted there; None: what is free, less the reserve."""
    vram_reserve: int = VRAM_RESERVE
    time_limit_s: float = 1800.0
    """Seconds after which a run, its loading included, is ended and recorded as too slow."""


@dataclass(frozen=True, order=True)
class Setting:
    """What all modes of one group have in common."""

    kv_dtype: KVDtype
    n_sequences: int
    depth: int


@dataclass(frozen=True, kw_only=True)
class CompareRow:
    """One mode in one setting: its placement and every run of it."""

    mode: str
    setting: Setting
    placement: Placement
    trials: tuple[Trial, ...] = ()
    vram_needed: int = 0
    """By the Ledger; 0 too for llama.cpp's own GPU, of which it knows nothing."""
    host_needed: int = 0
    """By the Ledger, without an emulated device's bytes."""
    vram_saved: int | None = None
    """VRAM that it needs less than with all layers and their KV cache on the device, by the Ledger."""
    host_cost: int | None = None
    """Host memory that it needs more."""
    difference: int | None = None
    """The first token that differs from the baseline's, by number; None: equal, or not comparable."""
    comparable: bool = False
    """Whether both it and the baseline finished."""

    @property
    def failure(self) -> Failure | None:
        """How it failed, if any run did: it has no speed then."""
        return next((trial.failure for trial in self.trials if trial.failure), None)

    @property
    def finished(self) -> bool:
        """Whether it ran, and every run ended well."""
        return bool(self.trials) and self.failure is None

    @property
    def decode(self) -> Spread | None:
        """Seconds a step, over all runs."""
        return Spread.of([s for trial in self.trials for s in trial.decode_s]) if self.finished else None

    @property
    def ttft(self) -> Spread | None:
        """Seconds to the first token, over all runs."""
        return Spread.of([s for trial in self.trials for s in trial.ttft_s]) if self.finished else None

    @property
    def tok_per_s(self) -> float | None:
        """Tokens a second of all sequences together."""
        return self.setting.n_sequences / self.decode.median if self.decode else None

    @property
    def prefill_tok_per_s(self) -> float | None:
        """Prompt tokens a second of all sequences together."""
        return self.setting.depth * self.setting.n_sequences / self.ttft.median if self.ttft else None

    @property
    def load_s(self) -> float | None:
        """Seconds of loading, the median."""
        found = [trial.load_s for trial in self.trials if trial.load_s is not None]
        return median(found) if self.finished and found else None

    @property
    def moved_bytes(self) -> float | None:
        """Bytes a step moved over the bus, the median."""
        found = [trial.moved_bytes for trial in self.trials if trial.moved_bytes is not None]
        return median(found) if self.finished and found else None

    @property
    def launch_s(self) -> float | None:
        """Launch overhead of a step, the median."""
        found = [trial.launch_s for trial in self.trials if trial.launch_s is not None]
        return median(found) if self.finished and found else None

    @property
    def n_made(self) -> int:
        """Tokens that the first sequence really made in each run after the warm-up; the fewest."""
        return max(0, min((len(trial.tokens) - trial.condition.warmup for trial in self.trials), default=0))

    def most(self, figure: str) -> int | None:
        """The most that was seen of one of PeakMemory's figures."""
        seen = [getattr(trial.memory, figure) for trial in self.trials if trial.memory is not None]
        return max((n for n in seen if n is not None), default=None)

    @property
    def output(self) -> str:
        """How what it made compares to the baseline."""
        if not self.comparable:
            return "-"
        return "equal" if self.difference is None else f"differs at token {self.difference}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values; prompts are given by their lengths."""
        failure = self.failure
        return {
            "mode": self.mode,
            **asdict(self.setting),
            "placement": self.placement.to_dict(),
            "finished": self.finished,
            "failure": asdict(failure) if failure else None,
            "n_runs": len(self.trials),
            "n_made": self.n_made,
            "decode_tok_per_s": self.tok_per_s,
            "decode_s": asdict(self.decode) if self.decode else None,
            "prefill_tok_per_s": self.prefill_tok_per_s,
            "ttft_s": asdict(self.ttft) if self.ttft else None,
            "load_s": self.load_s,
            "launch_s": self.launch_s,
            "peak_device_bytes": self.most("device_bytes"),
            "peak_device_reserved_bytes": self.most("device_reserved_bytes"),
            "peak_device_tool_bytes": self.most("device_tool_bytes"),
            "peak_host_bytes": self.most("host_bytes"),
            "ledger_device_bytes": self.vram_needed,
            "ledger_host_bytes": self.host_needed,
            "vram_saved_bytes": self.vram_saved,
            "host_cost_bytes": self.host_cost,
            "moved_bytes_per_step": self.moved_bytes,
            "output": self.output,
            "first_difference": self.difference,
            "trials": [trial.to_short_dict() for trial in self.trials],
        }


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The longest context whose KV cache fits the device beside all layers, by the Ledger."""

    kv_dtype: KVDtype
    n_sequences: int
    n_ctx: int


@dataclass(frozen=True, kw_only=True)
class CompareReport:
    """The answer."""

    request: CompareRequest
    model: str
    device: str
    vram_bytes: int | None
    """What the device may hold; None: nobody limits it."""
    n_ctx_train: int
    baseline: str
    """The mode whose output the others' are compared with."""
    reference: str
    """The mode from which the others' placements differ in one thing."""
    rows: tuple[CompareRow, ...]
    limits: tuple[Limit, ...] = ()
    notes: tuple[str, ...] = ()
    verdict: tuple[str, ...] = field(default=())
    saved: str | None = None
    """The folder that has every run as a file."""
    interrupted: bool = False
    elapsed_s: float = 0.0

    @property
    def emulated(self) -> bool:
        """Whether the GPU was the CPU."""
        return self.device == "cpu" and any(row.placement.n_gpu_layers for row in self.rows)

    @property
    def trouble(self) -> str:
        """One sentence where nothing finished; empty where something did."""
        if any(row.finished for row in self.rows):
            return ""
        failures = [row.failure.message for row in self.rows if row.failure is not None]
        return f"Nothing was measured; the first failure: {failures[0]}" if failures else "Nothing was measured."

    @property
    def modes(self) -> tuple[str, ...]:
        """In the order in which they were asked for."""
        return tuple(dict.fromkeys(row.mode for row in self.rows))

    @property
    def groups(self) -> list[tuple[Setting, list[CompareRow]]]:
        """The rows by setting."""
        settings = dict.fromkeys(row.setting for row in self.rows)
        return [(setting, [row for row in self.rows if row.setting == setting]) for setting in settings]

    def differences(self, mode: str) -> list[str]:
        """What sets a mode apart from the reference, in the settings both have: "kv: stream instead of device"."""
        ours = next(row for row in self.rows if row.mode == mode)
        theirs = next((r for r in self.rows if r.mode == self.reference and r.setting == ours.setting), ours)
        return placement_differences(ours.placement, theirs.placement)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "model": self.model,
            "device": self.device,
            "emulated": self.emulated,
            "vram_budget_bytes": self.vram_bytes,
            "n_batch": self.request.n_batch,
            "n_decode": self.request.n_decode,
            "repeats": self.request.repeats,
            "baseline": self.baseline,
            "reference": self.reference,
            "differs": {mode: self.differences(mode) for mode in self.modes},
            "rows": [row.to_dict() for row in self.rows],
            "limits": [asdict(limit) for limit in self.limits],
            "verdict": list(self.verdict),
            "notes": list(self.notes),
            "saved": self.saved,
            "interrupted": self.interrupted,
            "elapsed_s": self.elapsed_s,
        }


def placement_differences(ours: Placement, theirs: Placement) -> list[str]:
    """Fields in which two placements differ, threads apart; a field that means nothing in ours is left out."""
    a, b = ours.to_dict(), theirs.to_dict()
    idle = set() if ours.n_gpu_layers else {"kv", "kv_budget", "device", "kv_keep_sliding"}
    if ours.kv != "tiered":
        idle.add("kv_budget")
    names = [name for name in a if name not in idle and name not in SHARED_OUT and a[name] != b[name]]

    def shown(name: str, value: Any) -> str:
        return f"{value / 2**20:.1f} MiB" if name == "kv_budget" and value is not None else str(value)

    return [
        f"{name}: {shown(name, a[name])}" + ("" if b[name] is None else f" instead of {shown(name, b[name])}")
        for name in names
    ]


def told_apart(quick: Spread, slow: Spread) -> bool:
    """Whether the measurements say that one is quicker than the other: the runs do not overlap, and the medians are
    further apart than one may be by chance."""
    least = LEAST_APART if min(quick.n, slow.n) > 1 else LEAST_APART_ONCE
    return quick.most < slow.least and slow.median > quick.median * (1 + least)


def compared(rows: Sequence[CompareRow], baseline: CompareRow) -> list[tuple[bool, int | None]]:
    """For each row of the baseline's setting: whether both finished, and the first token that differs in any run."""
    found: list[tuple[bool, int | None]] = []
    for row in rows:
        if not (row.finished and baseline.finished) or row is baseline:
            found.append((row is baseline and row.finished, None))
            continue
        differ = [trial.difference(baseline.trials[0]) for trial in row.trials]
        found.append((True, min((d for d in differ if d is not None), default=None)))
    return found
