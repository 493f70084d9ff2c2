"""The boundary: hidden states on their way from the head's device to the host memory that llama.cpp reads."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor


class Parcel:
    """One chunk's hidden state, perhaps still in flight. `open` waits for it; `release` gives its buffer back."""

    def __init__(self, rows: Tensor, buffer: Tensor, buffers: queue.SimpleQueue[Tensor], event: Any) -> None:
        self._rows, self._buffer, self._buffers, self._event = rows, buffer, buffers, event

    def open(self) -> npt.NDArray[np.float32]:
        """The hidden state in host memory, [n_tokens, n_embd]; valid until `release`."""
        if self._event is not None:
            self._event.synchronize()
        rows: npt.NDArray[np.float32] = self._rows.numpy()
        return rows

    def release(self) -> None:
        """Let another chunk use the buffer. Call it once."""
        self._buffers.put(self._buffer)


class Boundary:
    """`depth` buffers of [n_batch, n_embd] float32 between a GPU and the host, pinned where the system allows it (else
    `notes` says so); on `cpu` nothing is copied.

    `send` runs on the head's thread and blocks while all buffers are under way, which is what keeps the head
    at most `depth` chunks ahead of the tail.
    """

    def __init__(self, device: str, n_batch: int, n_embd: int, depth: int = 2) -> None:
        import torch

        from hybrid.head.pinned import pinned

        self._torch = torch
        self._on_host = torch.device(device).type == "cpu"
        self._cuda = torch.device(device).type == "cuda"
        size = (0,) if self._on_host else (n_batch, n_embd)
        self.notes: list[str] = []
        if self._cuda:
            self._all = [pinned(size, torch.float32, "hidden states", self.notes) for _ in range(depth)]
        else:
            self._all = [torch.empty(size, dtype=torch.float32) for _ in range(depth)]
        self.reset()
        self.nbytes = 0 if self._on_host else depth * n_batch * n_embd * 4

    def reset(self) -> None:
        """Take all buffers back, whoever has them: for when an evaluation ended amid one and both halves are idle."""
        self._buffers: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for buffer in self._all:
            self._buffers.put(buffer)

    def send(self, hidden: Tensor) -> Parcel:
        """Start moving `hidden` [n_tokens, n_embd] float32 to the host."""
        buffer = self._buffers.get()
        if self._on_host:
            return Parcel(hidden, buffer, self._buffers, None)
        rows = buffer[: hidden.shape[0]]
        rows.copy_(hidden, non_blocking=self._cuda)
        event = None
        if self._cuda:
            event = self._torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return Parcel(rows, buffer, self._buffers, event)
