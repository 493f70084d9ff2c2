"""Placement: everything that decides what runs where. Every mode of the program is one of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

KVStrategy = Literal["device", "stream", "attend", "tiered"]
KVDtype = Literal["f32", "f16", "bf16", "q8_0"]

ENGINES = ("auto", "hybrid", "llama.cpp")
"""Who keeps layers on a GPU: our head, or llama.cpp itself."""
KV_STRATEGIES: tuple[KVStrategy, ...] = ("device", "stream", "attend", "tiered")
KV_DTYPES: tuple[KVDtype, ...] = ("f32", "f16", "bf16", "q8_0")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One way of running a model on one machine. Nothing else in the program branches on a "mode".

    `n_gpu_layers` counts blocks from the first: 0 (llama.cpp alone) to L (all, with the output head).
    `n_ctx` is tokens *per sequence*; the caches hold `n_ctx * n_sequences`.
    """

    device: str
    """The head's torch device, e.g. `cuda:0`; `cpu` emulates one. Unused (but recorded) when k = 0."""
    n_gpu_layers: int
    n_ctx: int
    n_batch: int = 512
    """Tokens in one prefill chunk: what the head hands to the tail at a time."""
    n_ubatch: int = 512
    """Tokens llama.cpp computes at a time within a chunk (its micro-batch)."""
    n_sequences: int = 1
    n_draft: int = 0
    """Drafted tokens that a batch may carry beside one token a sequence (speculation)."""
    kv: KVStrategy = "device"
    kv_dtype: KVDtype = "f16"
    kv_budget: int | None = None
    """Device bytes that K and V may take under `tiered`, windowed layers that stay not counted; None: no limit."""
    kv_keep_sliding: bool = True
    swa_full: bool = False
    kv_unified: bool = False
    n_threads_head: int = 1
    """Host threads of the head (torch) while it computes beside the tail."""
    n_threads_tail: int = 1
    """llama.cpp threads for single-token decode, when the head waits."""
    n_threads_tail_batch: int = 1
    """llama.cpp threads during prefill, when the head computes at the same time."""
    n_threads_attend: int = 1
    """Threads of attention on the CPU while the tail waits; beside the tail it has the head's. Where an emulated device
    attends at the same time, that has no more."""
    llama_gpu_layers: int = 0
    """llama.cpp's own `n_gpu_layers`, counted from the last layer; only with k = 0."""
    offload_kqv: bool = False
    """Whether llama.cpp keeps the KV cache of those layers on its GPU too."""

    @property
    def where(self) -> str:
        """What runs where, in a few words."""
        if self.llama_gpu_layers:
            return f"the last {self.llama_gpu_layers} layers on llama.cpp's GPU"
        return f"{self.n_gpu_layers} layers on {self.device}" if self.n_gpu_layers else "all layers on the CPU"

    @property
    def n_offloaded(self) -> int:
        """Layers on a GPU, be it the head's or llama.cpp's own (whose output head counts as one more)."""
        return self.llama_gpu_layers or self.n_gpu_layers

    @property
    def strategy(self) -> str:
        """Where the KV cache of those layers lies, and whose they are."""
        if self.llama_gpu_layers:
            return "llama.cpp" if self.offload_kqv else "llama.cpp -nkvo"
        return self.kv if self.n_gpu_layers else "device"

    @property
    def n_outputs(self) -> int:
        """Rows of logits a batch may ask for."""
        return self.n_sequences + self.n_draft

    def to_dict(self) -> dict[str, Any]:
        """The whole placement as JSON-ready values; every record of a run carries it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Placement:
        """The inverse, of values that anybody may have written. Raises TypeError or ValueError for what is none."""
        found = cls(**values)
        for name, value in found.to_dict().items():
            if not _sound(name, value):
                raise ValueError(f"{name} cannot be {value!r}")
        return found


WORDS: Mapping[str, tuple[str, ...]] = {"kv": KV_STRATEGIES, "kv_dtype": KV_DTYPES}
FLAGS = ("kv_keep_sliding", "swa_full", "kv_unified", "offload_kqv")
AT_LEAST_NONE = ("n_gpu_layers", "n_draft", "kv_budget", "llama_gpu_layers")
"""Numbers that may be 0."""


def _sound(name: str, value: object) -> bool:
    if name == "device":
        return isinstance(value, str)
    if name in WORDS:
        return value in WORDS[name]
    if name in FLAGS:
        return isinstance(value, bool)
    if name == "kv_budget" and value is None:
        return True
    return type(value) is int and (0 if name in AT_LEAST_NONE else 1) <= value < 1 << 62
