"""The `stream` strategy: K and V live in host memory and come to the device one layer ahead of the computation.

Two staging buffers take turns: while a layer attends in one, the next layer's rows arrive in the other on the bus's
side lane (FlexGen's double buffering, arXiv:2303.06865). Attention itself is the `device` strategy's, in the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid.head.attention import first_key
from hybrid.head.kv.bus import Bus, Mark
from hybrid.head.kv.device import OnDevice
from hybrid.head.kv.layer import LayerKV, Stretch
from hybrid.head.kv.ring import Ring
from hybrid.model.spec import LayerSpec
from hybrid.schedule.placement import Placement


class Slot:
    """One staging buffer on the device, for every other streamed layer."""

    def __init__(self, n_bytes: int, device: torch.device) -> None:
        self.buffer = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
        self.owner: LayerKV | None = None
        """The layer whose rows are in it or on their way, until it has attended."""
        self.arrived: Mark | None = None
        """Its rows are there."""
        self.free: Mark | None = None
        """The last owner has read and written all it had to."""

    def ring(self, spec: LayerSpec, like: Ring) -> Ring:
        """A ring as `like`, in this buffer."""
        used = 0

        def carve(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            nonlocal used
            n_bytes = dtype.itemsize * torch.Size(shape).numel()
            part = self.buffer[used : used + n_bytes].view(dtype).view(shape)
            used += n_bytes
            return part

        return Ring(spec, like.format, like.k.shape[0], like.capacity, carve)


class StreamedLayer(OnDevice):
    """K and V in host memory, in a ring laid out as `DeviceLayer`'s."""

    def __init__(self, spec: LayerSpec, placement: Placement, bus: Bus) -> None:
        super().__init__(spec, placement, bus.host)
        self.bus = bus
        self.slot: Slot
        self._here: Ring
        self._staged: dict[int, tuple[int, int]] = {}

    def use(self, slot: Slot) -> None:
        """Say through which buffer this layer's rows pass."""
        self.slot, self._here = slot, slot.ring(self.spec, self.ring)

    def prefetch(self, stretches: Sequence[Stretch]) -> None:
        """Start copying what these tokens see, unless it is on its way or the buffer is not free yet."""
        if self.slot.owner is None:
            self._fetch(self._seen(stretches))

    @property
    def here(self) -> Ring:
        """See `OnDevice.here`: in the buffer."""
        return self._here

    def enter(self, stretches: Sequence[Stretch]) -> None:
        """See `OnDevice.enter`."""
        slot, seen = self.slot, self._seen(stretches)
        super().enter(stretches)
        if slot.owner is not self or self._staged != seen:
            self._fetch(seen)
        assert slot.arrived is not None
        self.bus.compute.wait(slot.arrived)

    def trim(self, seq: int, n: int) -> None:
        """See `LayerKV.trim`; what was fetched for a batch that never came is forgotten too."""
        super().trim(seq, n)
        if self.slot.owner is self:
            self.slot.owner = None

    @property
    def nbytes(self) -> int:
        """Nothing of its own; the buffers are counted where they are made."""
        return 0

    @property
    def host_nbytes(self) -> int:
        """All K and V."""
        return self.ring.nbytes

    def _seen(self, stretches: Sequence[Stretch]) -> dict[int, tuple[int, int]]:
        """For each sequence of a batch the cached positions that its tokens see: (first, one after the last)."""
        seen: dict[int, tuple[int, int]] = {}
        for stretch in stretches:
            lo = max(self.first[stretch.seq], first_key(stretch.p0, self.window))
            seen.setdefault(stretch.seq, (lo, self.end[stretch.seq]))
        return seen

    def send(self, stretch: Stretch) -> None:
        """See `OnDevice.send`: to the host."""
        bus, seq = self.bus, stretch.seq
        bus.side.wait(bus.compute.mark())
        for at, _ in self.ring.slices(stretch.p0, stretch.end):
            bus.to_host(self.ring.k[seq, at], self._here.k[seq, at], bus.side)
            bus.to_host(self.ring.v[seq, at], self._here.v[seq, at], bus.side)

    def free(self) -> None:
        """See `OnDevice.free`: another layer may have the buffer."""
        self.slot.owner, self.slot.free = None, self.bus.compute.mark()

    def _fetch(self, seen: dict[int, tuple[int, int]]) -> None:
        slot, bus = self.slot, self.bus
        if slot.free is not None:
            bus.side.wait(slot.free)
        for seq, (lo, hi) in seen.items():
            for at, _ in self.ring.slices(lo, hi):
                bus.to_device(self._here.k[seq, at], self.ring.k[seq, at], bus.side)
                bus.to_device(self._here.v[seq, at], self.ring.v[seq, at], bus.side)
        slot.owner, slot.arrived, self._staged = self, bus.side.mark(), seen


def stage(layers: Sequence[StreamedLayer], device: torch.device) -> list[Slot]:
    """The buffers of these layers, in the order in which they attend: each as large as its largest user."""
    turns = [group for group in (layers[0::2], layers[1::2]) if group]
    slots = [Slot(max(layer.ring.nbytes for layer in group), device) for group in turns]
    for i, layer in enumerate(layers):
        layer.use(slots[i % 2])
    return slots
