"""Stand-ins for the bus's lanes on a machine without a GPU: copies that arrive as late as they may, and a witness that
knows who has read and written what.

A device runs its lanes beside each other and obeys nothing but the marks they wait for. Where copies happen at once, a
wait that is missing goes unnoticed; here a copy happens only when somebody waits for a mark behind it, its target
holds NaN until then, and everything that computation touches is checked against what it has waited for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybrid.head.kv.bus import Bus, Lane, Mark


@dataclass(frozen=True)
class At:
    """A mark: the lane, how many copies and computations had been queued there, and what they had waited for."""

    lane: LateLane
    time: int
    known: dict[LateLane, int]

    def synchronize(self) -> None:
        self.lane.run_to(self.time)
        for lane in (self.lane.witness.compute, self.lane.witness.side):  # whatever is queued from now on comes later
            lane.learn(self)


class LateLane:
    """A lane whose copies wait until they must happen. `known` is what it has waited for of every other lane."""

    def __init__(self, name: str, witness: Witness) -> None:
        self.name, self.witness = name, witness
        self.time, self.done = 0, 0
        self.known: dict[LateLane, int] = {}
        self.queue: list[tuple[int, Tensor, Tensor, dict[LateLane, int]]] = []

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.time += 1
        self.witness.touches(self, source, write=False)
        self.witness.touches(self, target, write=True)
        here = target.untyped_storage()._cdata
        readers = [time for time, _, read, _ in self.queue if read.untyped_storage()._cdata == here]
        self.run_to(max(readers, default=0))  # a lane is in order: those before this one have read
        with self.witness.aside():
            if self is self.witness.compute:  # in order with computation, which does not wait: so what it reads now
                source = source.clone()
            self.queue.append((self.time, target, source, dict(self.known)))
            target.view(torch.uint8).fill_(0xFF)  # NaN in every type of number, and in a q8_0 block's scale

    def mark(self) -> Mark:
        return At(self, self.time, dict(self.known))

    def learn(self, mark: At) -> None:
        for lane, time in {**mark.known, mark.lane: mark.time}.items():
            self.known[lane] = max(self.known.get(lane, 0), time)

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, At)
        self.learn(mark)
        if self is self.witness.compute:  # it goes on at once, so what it has waited for must be there
            mark.lane.run_to(mark.time)

    def run_to(self, time: int) -> None:
        """Let the copies up to `time` happen, and what they wait for before them."""
        while self.queue and self.queue[0][0] <= time:
            _, target, source, known = self.queue.pop(0)
            for lane, until in known.items():
                if lane is not self:
                    lane.run_to(until)
            with self.witness.aside():
                target.copy_(source)


class LateBus(Bus):
    """Copies to the device in the lane that computes come at once: computation there goes on behind them."""

    def to_device(self, target: Tensor, source: Tensor, lane: Lane) -> None:
        if lane is self.side:
            super().to_device(target, source, lane)
        else:
            self.moved.to_device += source.nbytes
            target.copy_(source)


class Witness(TorchDispatchMode):
    """Sees every tensor that is computed with, and objects where nobody has waited for its last reader or writer.

    Whatever torch computes belongs to the lane `compute`; only what `watch` was told of is looked at.
    """

    def __init__(self) -> None:
        super().__init__()
        self.compute, self.side = LateLane("compute", self), LateLane("side", self)
        self.bus = LateBus(torch.device("cpu"), self.compute, self.side)
        self.reads: dict[int, list[tuple[int, int, LateLane, int]]] = defaultdict(list)
        self.writes: dict[int, list[tuple[int, int, LateLane, int]]] = defaultdict(list)
        self.watched: dict[int, Tensor] = {}
        self.objections: list[str] = []
        self.checked = 0
        self._aside = False

    def watch(self, tensor: Tensor) -> None:
        """Object to what is wrongly done to its storage from now on."""
        self.watched[tensor.untyped_storage()._cdata] = tensor

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What happens meanwhile is the lanes' own work."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    def touches(self, lane: LateLane, tensor: Tensor, *, write: bool) -> None:
        """`lane` reads or writes the bytes of `tensor` at its present time."""
        key, lo = tensor.untyped_storage()._cdata, tensor.storage_offset() * tensor.itemsize
        hi = lo + tensor.itemsize * (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)))
        if key not in self.watched:
            return
        earlier = [*self.writes[key], *(self.reads[key] if write else [])]
        for start, end, other, time in earlier:
            if start < hi and lo < end and other is not lane:
                self.checked += 1
                if lane.known.get(other, 0) < time:
                    what = "writes over" if write else "reads"
                    self.objections.append(f"{lane.name} {what} {lo}-{hi} before {other.name} is done at {time}")
        book = (self.writes if write else self.reads)[key]
        book[:] = [entry for entry in book if entry[2] is not lane or not (lo <= entry[0] and entry[1] <= hi)]
        book.append((lo, hi, lane, lane.time))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._aside:
            self.compute.time += 1
            written = {i for i, a in enumerate(func._schema.arguments) if a.alias_info and a.alias_info.is_write}
            views = any(a.alias_info and not a.alias_info.is_write for a in func._schema.arguments)
            for i, arg in enumerate(args):
                for leaf in tree_leaves(arg):
                    known = isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata in self.watched
                    if known and leaf.numel() and not views:
                        self.touches(self.compute, leaf, write=i in written)
        return func(*args, **kwargs)
