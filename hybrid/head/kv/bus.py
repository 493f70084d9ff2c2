"""The bus: everything of the KV cache that crosses between host memory and the head's device, counted as it is copied.

On CUDA the host's side is pinned and copies run on a stream of their own; elsewhere (the emulated device) the same code
copies between two tensors in RAM, and a stand-in keeps the order that streams would.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hybrid.head.device import allocating
from hybrid.head.memory import host_memory
from hybrid.head.pinned import PINNED_FAILED


class Mark(Protocol):
    """A point in a lane: all that was queued there before it."""

    def synchronize(self) -> None:
        """Wait, on the host, until it is reached."""


class Lane(Protocol):
    """A queue of work on the device, in order; several lanes run beside each other."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy. Neither tensor may be touched before a mark behind it is reached."""

    def mark(self) -> Mark:
        """A mark behind everything queued so far."""

    def wait(self, mark: Mark) -> None:
        """Let all that is queued from now on wait for `mark`, of whichever lane."""


class AtOnce:
    """The emulated device's lane: a copy is done when it is queued, so every mark has been reached."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `Lane.copy`."""
        target.copy_(source)

    def mark(self) -> Mark:
        """See `Lane.mark`."""
        return self

    def wait(self, mark: Mark) -> None:
        """See `Lane.wait`."""

    def synchronize(self) -> None:
        """As a mark: reached."""


class CudaLane:
    """A CUDA stream; without one, whichever the caller computes on."""

    def __init__(self, device: torch.device, stream: Any = None) -> None:
        self._device, self._own = device, stream

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `Lane.copy`."""
        with torch.cuda.stream(self._stream()):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        """See `Lane.mark`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream())
        return event

    def wait(self, mark: Mark) -> None:
        """See `Lane.wait`."""
        self._stream().wait_event(mark)

    def _stream(self) -> Any:
        return self._own if self._own is not None else torch.cuda.current_stream(self._device)


@dataclass
class Moved:
    """Bytes that have crossed the bus, each way, since the cache was made."""

    to_device: int = 0
    to_host: int = 0

    def add(self, more: Moved) -> None:
        """Count what has crossed without being seen: copies that were recorded, at every replay."""
        self.to_device += more.to_device
        self.to_host += more.to_host


class Bus:
    """Host memory, and the two lanes between it and `device`: `compute`, where the head computes, and `side`."""

    def __init__(self, device: torch.device, compute: Lane | None = None, side: Lane | None = None) -> None:
        self.device = device
        self.moved = Moved()
        self.notes: list[str] = []
        cuda = device.type == "cuda"
        self.compute: Lane = compute or (CudaLane(device) if cuda else AtOnce())
        self.side: Lane = side or (CudaLane(device, _new_stream(device)) if cuda else AtOnce())
        self._cuda = cuda
        self._pinned: list[Tensor] = []
        self.close = weakref.finalize(self, _unpin, self._pinned)
        """Give pinned pages back. The memory must not be copied to or from afterwards."""

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros in host memory, pinned where the device is CUDA and the system allows it (else `notes` says so).

        Torch's own pinned memory comes in powers of two, up to twice what was asked for; registering ordinary memory
        does not. It is numpy's memory, so that whoever counts torch's bytes on an emulated device counts the device's.
        Raises OutOfMemoryError.
        """
        n_bytes = dtype.itemsize
        for n in shape:
            n_bytes *= n
        with host_memory(), allocating("The KV cache", n_bytes, torch.device("cpu")):
            memory = torch.zeros(shape, dtype=dtype)
        if self._cuda and n_bytes:
            self._pin(memory)
        return memory

    def to_device(self, target: Tensor, source: Tensor, lane: Lane) -> None:
        """Queue a copy of `source`, in host memory, to `target` on the device."""
        self.moved.to_device += source.nbytes
        lane.copy(target, source)

    def to_host(self, target: Tensor, source: Tensor, lane: Lane) -> None:
        """Queue a copy of `source`, on the device, to `target` in host memory."""
        self.moved.to_host += source.nbytes
        lane.copy(target, source)

    def settle(self) -> None:
        """Wait until every copy queued so far has arrived: before the host touches what they read or write."""
        for lane in (self.compute, self.side):
            lane.mark().synchronize()

    def _pin(self, memory: Tensor) -> None:
        why = register(memory)
        if why is None:
            self._pinned.append(memory)
        elif not self.notes:
            self.notes.append(PINNED_FAILED.format(what="the KV cache", why=why))


def _new_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def register(memory: Tensor) -> str | None:
    """Pin the pages of `memory`; why that failed, or None."""
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code == 0:
        return None
    with suppress(RuntimeError):  # CUDA remembers the failure, and torch would report it as the next kernel's
        torch.zeros(1, device="cuda")
    return f"CUDA error {code}"


def _unpin(pinned: list[Tensor]) -> None:
    """Once no copy is under way: unpin before the memory goes."""
    if pinned:
        torch.cuda.synchronize()
        cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for memory in pinned:
            cuda.cudaHostUnregister(memory.data_ptr())
        pinned.clear()
