"""Counting the bytes of live torch storages, temporaries included, by watching every operator that torch dispatches.

That is what gives an emulated device a memory of its own size: with a budget, an operator whose result would exceed it
fails as a GPU's allocator fails. What a kernel allocates and frees inside itself is not seen (on the CPU: small
per-thread buffers); nor is memory that was there before.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from hybrid.errors import OutOfMemoryError


@contextmanager
def host_memory() -> Iterator[None]:
    """Within, new tensors lie in the host's memory, also where the device is emulated there: they do not count (nor
    does anybody watch the operators, which would cost a load more than its work)."""
    with _disable_current_modes():
        yield


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`with LiveBytes() as count: ...`; then `count.peak` is the most bytes alive at once, `count.now` those left.

    It can be entered again and again, by one thread at a time; tensors are counted until they die, also outside, and on
    whichever thread: the dead are put into a queue, which needs no lock, and taken off the count when it is next looked
    at. With a `budget`, OutOfMemoryError is raised at the operator whose result exceeds it.
    """

    def __init__(self, device: str = "cpu", budget: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = torch.device(device).type
        self.budget = budget
        self.peak = 0
        self._now = 0
        self._owners: dict[int, int] = {}
        self._dead: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._lock = threading.Lock()

    @property
    def now(self) -> int:
        """Bytes alive now."""
        with self._lock:
            self._bury()
            return self._now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # in inference mode composite operators arrive whole: look inside
            out = func.decompose(*args, **(kwargs or {}))
        if out is not NotImplemented:
            return out
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        with self._lock:
            self._bury()  # first: a new storage may lie where a dead one lay
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor) and tensor.device.type == self.device:
                    self._own(tensor, known)
            now = self._now
            self.peak = max(self.peak, now)
        if self.budget is not None and now > self.budget:
            raise OutOfMemoryError(
                f"The device's memory of {self.budget / 2**20:,.1f} MiB is full: {now / 2**20:,.1f} MiB are "
                "needed; use fewer GPU layers (-ngl), a smaller context (-c) or a smaller batch (-b)."
            )
        return out

    def _own(self, tensor: torch.Tensor, known: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._owners:
            if key in known:
                return  # a view of something older than this count, or of the host's
            self._owners[key] = 0
            self._now += storage.nbytes()
        self._owners[key] += 1
        # A garbage collection may end a tensor amid any line, on any thread: `put` may be interrupted by another `put`.
        weakref.finalize(tensor, self._dead.put, (key, storage.nbytes()))

    def _bury(self) -> None:
        while not self._dead.empty():
            key, n_bytes = self._dead.get()
            self._owners[key] -= 1
            if self._owners[key] == 0:
                del self._owners[key]
                self._now -= n_bytes
