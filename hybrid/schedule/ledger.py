"""Ledger: bytes a Placement needs, by pure arithmetic over a ModelSpec. No torch, no model load.

Two books a side: static (weights) and dynamic (everything that depends on how the model is run). Allocated bytes; what
is resident may be less, because pages that nobody touched are not there.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hybrid.model.spec import ModelSpec
from hybrid.model.splits import padding
from hybrid.schedule import head_size, llama_size
from hybrid.schedule.kv_size import (
    cached_tokens,
    kv_bytes,
    kv_bytes_per_token,
    llama_layer_kv_bytes,
)
from hybrid.schedule.kv_tiers import kv_staging, tiers
from hybrid.schedule.placement import Placement

__all__ = ["Books", "Dynamic", "Ledger", "Static", "cached_tokens", "kv_bytes", "kv_bytes_per_token", "ledger_of"]

CUDA_CONTEXT_BYTES = 512 << 20
"""VRAM of a CUDA context with torch's kernels and cuBLAS' workspace: assumed; 300 to 600 MiB, by card and driver."""
PYTHON_BYTES = 60 << 20
"""Resident memory of the interpreter, numpy and llama.cpp's library: 55 MiB measured."""
TORCH_BYTES = 220 << 20
"""Of torch on top, in its CPU build: 190 to 220 MiB measured. With CUDA it is more; that part is mapped code."""

TORCH_CPU_SCRATCH_BYTES = 10 << 20
"""MKL's packing buffers, what malloc keeps of loading, and small objects where the head runs on the CPU: 7 to 13 MiB
measured."""


@dataclass(frozen=True, kw_only=True)
class Static:
    """Weights, in bytes."""

    layers: tuple[int, ...] = ()
    """Each layer that lives here, in order."""
    output_head: int = 0
    """Output matrix and final norm (a tied token embedding counts here, where it is the output matrix)."""
    embedding: int = 0
    """Token embedding beside it."""
    padding: int = 0
    """Empty layers that the tail of some architectures keeps before its own (`hybrid.model.splits.padding`)."""

    @property
    def n_bytes(self) -> int:
        """All of it."""
        return sum(self.layers) + self.output_head + self.embedding + self.padding


@dataclass(frozen=True, kw_only=True)
class Dynamic:
    """What grows with the context, the batch and the number of sequences, in bytes."""

    kv: tuple[int, ...] = ()
    """K and V of each layer of which some lies here, in order."""
    activations: int = 0
    """Temporaries of one batch in torch."""
    workspace: int = 0
    """A tile of dequantised weights (torch); rounded activations and attention tiles (llama.cpp)."""
    graphs: int = 0
    """Decode, recorded (torch, on CUDA)."""
    compute: int = 0
    """llama.cpp's compute buffer."""
    output: int = 0
    """llama.cpp's buffer of logits."""
    staging: int = 0
    """Buffers between the sides: hidden states, and K and V where they are streamed."""
    bookkeeping: int = 0
    """llama.cpp's objects for its graphs, its copies of a batch, its list of tokens."""
    vocabulary: int = 0
    runtime: int = 0
    """The CUDA context; the interpreter and its libraries."""

    @property
    def n_bytes(self) -> int:
        """All of it."""
        rest = self.activations + self.workspace + self.graphs + self.compute + self.output + self.staging
        return sum(self.kv) + rest + self.bookkeeping + self.vocabulary + self.runtime


@dataclass(frozen=True)
class Books:
    """One side's two books."""

    static: Static
    dynamic: Dynamic

    @property
    def n_bytes(self) -> int:
        """Both books."""
        return self.static.n_bytes + self.dynamic.n_bytes


@dataclass(frozen=True)
class Ledger:
    """Where a placement's bytes are: on the device of the head, and on the host."""

    placement: Placement
    device: Books
    host: Books
    mapped_bytes: int
    """The part of the host's static book that is the mapped model file: page cache, which the kernel may drop."""

    @property
    def emulated(self) -> bool:
        """Whether the "device" is the CPU, and its bytes lie in RAM too."""
        return self.placement.device == "cpu" and self.placement.n_gpu_layers > 0

    @property
    def vram_bytes(self) -> int:
        """Bytes on the device, emulated or not."""
        return self.device.n_bytes

    @property
    def ram_bytes(self) -> int:
        """Bytes in RAM, those of an emulated device and the mapped file included."""
        return self.host.n_bytes + (self.device.n_bytes if self.emulated else 0)

    @property
    def kv_bytes(self) -> int:
        """K and V of every layer, wherever they lie."""
        return sum(self.device.dynamic.kv) + sum(self.host.dynamic.kv)

    def to_dict(self) -> dict[str, Any]:
        """Every entry as JSON-ready values."""
        return {
            "device": {"static": asdict(self.device.static), "dynamic": asdict(self.device.dynamic)},
            "host": {"static": asdict(self.host.static), "dynamic": asdict(self.host.dynamic)},
            "mapped_bytes": self.mapped_bytes,
            "vram_bytes": self.vram_bytes,
            "ram_bytes": self.ram_bytes,
            "kv_bytes": self.kv_bytes,
        }


def ledger_of(spec: ModelSpec, placement: Placement) -> Ledger:
    """The Ledger of a placement."""
    k, n_layers, device = placement.n_gpu_layers, spec.n_layers, placement.device
    head, tail = spec.layers[:k], spec.layers[k:]
    all_on_device = k == n_layers
    on_device, on_host = _head_kv(spec, placement)
    passing, waiting = kv_staging(spec.layers[:k], placement)
    gpu = k > 0 and device != "cpu"
    device_books = Books(
        Static(
            layers=tuple(head_size.layer_weight_bytes(layer, device) for layer in head),
            output_head=head_size.output_head_bytes(spec, device) if all_on_device else 0,
        ),
        Dynamic(
            kv=tuple(size for size in on_device if size),
            activations=head_size.activation_bytes(spec, placement),
            workspace=head_size.workspace_bytes(spec, placement),
            graphs=head_size.graph_bytes(spec, placement),
            staging=passing,
            runtime=CUDA_CONTEXT_BYTES if gpu and device.startswith("cuda") else 0,
        ),
    )
    static = Static()
    empty = spec.layers[k - padding(spec, k) : k]
    if not all_on_device:
        static = Static(
            layers=tuple(llama_size.layer_weight_bytes(layer) for layer in tail),
            output_head=llama_size.output_head_bytes(spec, k),
            embedding=llama_size.embedding_bytes(spec, k),
            padding=sum(llama_size.empty_layer_bytes(layer) for layer in empty),
        )
    host = Books(
        static,
        Dynamic(
            kv=tuple(size for size in on_host if size)
            + tuple(llama_layer_kv_bytes(layer, placement) for layer in (*empty, *tail)),
            workspace=llama_size.work_bytes(spec, placement)
            + (TORCH_CPU_SCRATCH_BYTES + head_size.kept_bytes(spec, placement) if k > 0 and device == "cpu" else 0),
            compute=llama_size.compute_bytes(spec, placement),
            output=llama_size.output_bytes(spec, placement),
            staging=waiting + (_host_staging(spec, placement) if gpu else 0),
            bookkeeping=llama_size.bookkeeping_bytes(spec, placement),
            vocabulary=llama_size.vocabulary_bytes(spec),
            runtime=PYTHON_BYTES + (TORCH_BYTES if k > 0 else 0),
        ),
    )
    mapped = static.n_bytes - llama_size.repacked_bytes(spec) if k == 0 else 0
    return Ledger(placement, device_books, host, mapped)


def _head_kv(spec: ModelSpec, placement: Placement) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """K and V of each of the head's layers: bytes on the device, and on the host."""
    head = spec.layers[: placement.n_gpu_layers]
    rows = [placement.n_sequences * kv_bytes_per_token(layer, placement.kv_dtype) for layer in head]
    found = tiers(head, placement)
    return (
        tuple(tier.device * size for tier, size in zip(found, rows, strict=True)),
        tuple(tier.host * size for tier, size in zip(found, rows, strict=True)),
    )


def _host_staging(spec: ModelSpec, placement: Placement) -> int:
    """Pinned host memory: embedded tokens on their way to a GPU, and two buffers of hidden states on theirs back."""
    rows = 4 * placement.n_batch * spec.n_embd
    between = 2 * rows if placement.n_gpu_layers < spec.n_layers else 0
    return rows + between
