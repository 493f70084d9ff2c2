"""The head's device: how it computes there, and torch's failures in words a user can act on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hybrid.errors import HostMemoryError, OutOfMemoryError, UnsupportedError
from hybrid.head.kernels.choice import Kernels
from hybrid.head.memory import LiveBytes
from hybrid.head.recorder import CudaRecorder, Recorder
from hybrid.schedule.ledger import CUDA_CONTEXT_BYTES

INSTEAD = "use --device cpu to run the head on the CPU, or -ngl 0 to leave everything to llama.cpp"


@dataclass(frozen=True)
class Compute:
    """How matrices are held and multiplied on a device. The residual stream, the norms, RoPE and the softmax are
    float32 everywhere; only the inputs of matrix products (weights and activations) are in `dtype`."""

    device: torch.device
    dtype: torch.dtype
    """float32 on the CPU; bfloat16 on an accelerator, float16 where it has no bfloat16."""
    expand: bool
    """Whether matrices are expanded to `dtype` once at load. Otherwise they stay in their GGUF quantisation and are
    dequantised tile by tile at every product."""
    tile_values: int
    """Weights dequantised at a time."""
    temporaries: bool = True
    """Whether torch's temporaries of a tile take memory beside it. Otherwise torch makes smaller tiles instead, and a
    tile of a kernel, which needs none, is the most memory that is used."""
    kernels: Kernels | None = None
    """The Triton kernels of the device, where it has any."""
    recorder: Recorder | None = None
    """What records decode, where there are kernels and the device has graphs."""

    @classmethod
    def on(cls, device: torch.device) -> Compute:
        """The policy for `device`: the CPU expands to float32, accelerators keep the quantisation.

        Tiles: the CPU wants its temporaries in cache, an accelerator wants few launches.
        """
        if device.type == "cpu":
            return cls(device, torch.float32, expand=True, tile_values=1 << 18)
        if device.type == "cuda":
            kernels = Kernels.on(device)
            recorder = None if kernels is None else CudaRecorder(device)
            return cls(device, _matmul_dtype(device), False, 1 << 25, False, kernels, recorder)
        return cls(device, _matmul_dtype(device), expand=False, tile_values=1 << 23)


def open_device(name: str) -> torch.device:
    """The torch device called `name`, known to work. Raises UnsupportedError with what to do instead, OutOfMemoryError
    where it is there but full."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UnsupportedError(f"PyTorch knows no device called {name!r}; {INSTEAD}.") from error
    try:
        torch.empty(1, device=device)
    except NotImplementedError as error:  # torch's own text lists every operator it looked for
        raise UnsupportedError(f"The device {name!r} is not available in this PyTorch; {INSTEAD}.") from error
    except (RuntimeError, AssertionError) as error:  # AssertionError: CUDA in a CPU-only build
        if _is_out_of_memory(error):
            raise OutOfMemoryError(
                f"The device {name!r} has no memory left for even the first byte; {INSTEAD}."
            ) from error
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise UnsupportedError(f"The device {name!r} is not available ({reason}); {INSTEAD}.") from error
    if device.type == "meta":
        raise UnsupportedError(f"The device {name!r} holds no data; {INSTEAD}.")
    return device


def limit_memory(device: torch.device, n_bytes: int) -> LiveBytes | None:
    """Let this process have n_bytes of the device's memory and no more, its CUDA context included. An emulated device
    gets something that counts, and fails, in an allocator's place."""
    if device.type == "cpu":
        return LiveBytes(budget=n_bytes)
    if device.type == "cuda":
        share = max(0, n_bytes - CUDA_CONTEXT_BYTES) / torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
    return None


@contextmanager
def allocating(what: str, n_bytes: int | None, device: torch.device) -> Iterator[None]:
    """Turn a failed allocation in the block into OutOfMemoryError: `what` needs `n_bytes` (if known) on `device`. It is
    a HostMemoryError where that is the CPU, or where the RAM failed on the way to it."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        if device.type != "cpu" and _is_of_host(error):
            raise HostMemoryError(
                f"{what} needs more RAM than is free; use a smaller batch (-b) or context (-c)."
            ) from error
        if n_bytes is None:
            need = f"{what} needs more memory than {device} has free"
        else:
            need = f"{what} needs {n_bytes:,} bytes ({n_bytes / 2**20:,.1f} MiB), more than {device} has free"
        kind = HostMemoryError if device.type == "cpu" else OutOfMemoryError
        raise kind(f"{need}; use fewer GPU layers (-ngl), a smaller context (-c) or a smaller batch (-b).") from error


def _is_out_of_memory(error: BaseException) -> bool:
    """torch has a class for it, but its CPU and MPS allocators raise a plain RuntimeError."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return any(
        s in text
        for s in ("can't allocate memory", "out of memory", "alloc_failed", "storage size calculation overflowed")
    )


def _is_of_host(error: BaseException) -> bool:
    """Whether it was the RAM that an allocation failed in: Python's own, or torch's allocator for the CPU."""
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def _matmul_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cuda":
        with torch.cuda.device(device):
            # Turing has no bfloat16 and emulates it, slowly.
            native = torch.cuda.is_bf16_supported(including_emulation=False)
            return torch.bfloat16 if native else torch.float16
    try:
        torch.zeros(1, 1, dtype=torch.bfloat16, device=device).matmul(
            torch.zeros(1, 1, dtype=torch.bfloat16, device=device)
        )
    except (RuntimeError, TypeError):
        return torch.float16
    return torch.bfloat16
