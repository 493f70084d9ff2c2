"""Trial: the record of one measured run. Printed and saved as JSON; never averaged away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from hybrid.prefix import common_prefix
from hybrid.schedule.placement import Placement

FailureKind = Literal[
    "out of memory", "out of RAM", "killed", "refused", "bad file", "failed to load", "failed", "crashed", "lost",
    "too slow",
]  # fmt: skip
"""The device's memory was full; the host's was; the system killed the process, most likely for its RAM; the condition
cannot be (here); the model file is no good; llama.cpp or torch could not load it; they failed later; the process died
of a bug; it ended without a word or never began; it was not done in time."""


LEAST_DECODED = 6
"""Tokens of a repeat: of fewer, one that was disturbed would be most of the figure."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What is run: one Placement and how much work. Two conditions that are compared differ in one thing only."""

    model: str
    """The file's path (of several shards the first)."""
    placement: Placement
    prompt: tuple[int, ...]
    """Token ids evaluated before anything is decoded: decoding begins at this depth, in every sequence."""
    n_decode: int = 32
    """Tokens of each sequence in one repeat."""
    warmup: int = 4
    """Tokens decoded before the first repeat, untimed."""
    repeats: int = 3
    """Stretches of n_decode tokens, one behind the other; 0: only the prompt."""
    repeat_s: float | None = None
    """Seconds that a repeat may take: where n_decode tokens would take longer, by the warm-up, fewer are decoded (but
    `LEAST_DECODED`). None: always n_decode, however slow the machine is."""
    prefills: int = 1
    """How often the prompt is evaluated from an empty context and timed; 0: it is only the warm-up."""
    vram_budget: int | None = None
    """Bytes of the device that the run may have; an emulated device counts them itself."""

    @property
    def depth(self) -> int:
        """Tokens in the context where decoding begins."""
        return len(self.prompt)

    def n_in_time(self, step_s: float) -> int:
        """Tokens of a repeat on a machine on which one takes `step_s`."""
        if self.repeat_s is None:
            return self.n_decode
        return min(self.n_decode, max(LEAST_DECODED, int(self.repeat_s / step_s)))

    @property
    def n_needed(self) -> int:
        """Tokens of context it takes."""
        return self.depth + 1 + (self.warmup + self.repeats * self.n_decode if self.repeats else 0)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Condition:
        """The inverse. Raises TypeError or KeyError for what is none."""
        parts = {"placement": Placement(**values["placement"]), "prompt": tuple(values["prompt"])}
        return cls(**{**values, **parts})


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a condition has no speed."""

    kind: FailureKind
    message: str
    """A sentence."""
    stage: str = ""
    """Where: "load", "prompt" or "decode"; empty where nobody knows."""


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """The most bytes held at any time, of both sides. None: there is no such figure here."""

    device_bytes: int | None = None
    """Of the head's device as the framework counts: live storages of an emulated device, torch's allocator on a GPU."""
    device_reserved_bytes: int | None = None
    """What torch's allocator took from the GPU."""
    device_tool_bytes: int | None = None
    """What the driver says that the process held, its CUDA context included, at the end of the run."""
    host_bytes: int
    """Resident set of the process; an emulated device's bytes and mapped files are contained."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One condition, run once in a process of its own. A failed one has no speed."""

    condition: Condition
    failure: Failure | None = None
    load_s: float | None = None
    """From the start of loading to a model ready to run; the process's own start is not in it."""
    warmup_s: float | None = None
    ttft_s: tuple[float, ...] = ()
    """Seconds until the prompt of every sequence is evaluated and its first token drawn, one a prefill."""
    decode_s: tuple[float, ...] = ()
    """Seconds a step (a token of every sequence), one a repeat."""
    launch_s: float | None = None
    """Of a step, the seconds in which the device waits for its host to launch work. None: nothing here
    measures it in a run; what a launch costs by itself, `hybrid machine` measures."""
    moved_bytes: float | None = None
    """K and V, queries and results that a step of decode moved between the device and host memory, both ways, as the
    copies counted them; None where there is no head. What is moved is not what is saved."""
    tokens: tuple[int, ...] = ()
    """What the first sequence really made, greedily, warm-up included."""
    memory: PeakMemory | None = None
    wall_s: float | None = None
    """The whole process, as its parent saw it."""
    at: str = ""
    """ISO date and time when it ended."""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def emulated(self) -> bool:
        """Whether its GPU was the CPU."""
        placement = self.condition.placement
        return placement.device == "cpu" and placement.n_gpu_layers > 0

    @property
    def tpot(self) -> Spread | None:
        """Seconds a step of decode."""
        return Spread.of(self.decode_s)

    @property
    def ttft(self) -> Spread | None:
        """Seconds to the first token."""
        return Spread.of(self.ttft_s)

    @property
    def decode_tok_per_s(self) -> float | None:
        """Of all sequences together."""
        return self.condition.placement.n_sequences / self.tpot.median if self.tpot else None

    @property
    def prefill_tok_per_s(self) -> float | None:
        """Prompt tokens a second, of all sequences together."""
        n = self.condition.depth * self.condition.placement.n_sequences
        return n / self.ttft.median if self.ttft else None

    def difference(self, baseline: Trial) -> int | None:
        """The first token that differs from the baseline's, by number; None where all that both made are equal."""
        return first_difference(self.tokens, baseline.tokens)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        facts = asdict(self)
        speeds = {"decode_tok_per_s": self.decode_tok_per_s, "prefill_tok_per_s": self.prefill_tok_per_s}
        return facts | speeds | {"emulated": self.emulated}

    def to_short_dict(self) -> dict[str, Any]:
        """The same, with the prompt's length in place of the prompt."""
        facts = self.to_dict()
        return {**facts, "condition": {**facts["condition"], "prompt": self.condition.depth}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Trial:
        """The inverse. Raises TypeError or KeyError for what is none."""
        plain = {k: v for k, v in values.items() if k not in ("decode_tok_per_s", "prefill_tok_per_s", "emulated")}
        parts = {
            "condition": Condition.from_dict(values["condition"]),
            "failure": Failure(**values["failure"]) if values["failure"] else None,
            "memory": PeakMemory(**values["memory"]) if values["memory"] else None,
            **{name: tuple(values[name]) for name in ("ttft_s", "decode_s", "tokens")},
        }
        return cls(**{**plain, **parts})


@dataclass(frozen=True)
class Spread:
    """Repeats of one figure."""

    median: float
    least: float
    most: float
    n: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread | None:
        """None where there are none."""
        return cls(median(samples), min(samples), max(samples), len(samples)) if samples else None

    @property
    def relative(self) -> float:
        """Half the range, relative to the median; 0 for a single sample, of which nobody knows the spread."""
        return (self.most - self.least) / 2 / self.median if self.median else 0.0


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token that differs in what both made; None where there is none."""
    n = common_prefix(ours, theirs)
    return n if n < min(len(ours), len(theirs)) else None
