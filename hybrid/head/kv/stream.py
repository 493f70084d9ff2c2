"""The `stream` strategy: K and V live in host memory and come to the device one layer ahead of the computation.

Two staging buffers take turns: while a layer attends in one, the next layer's rows arrive in the other on the bus's
side lane (FlexGen's double buffering, arXiv:2303.06865). Attention itself is the `device` strategy's, in the buffer.

A recorded step does the same, copies included. They are recorded for a number of rows: a graph serves all steps of one
bucket (`bucket_tokens`), and copies all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid.head.attention import first_key
from hybrid.head.kv.base import QKV
from hybrid.head.kv.bus import Bus, Mark
from hybrid.head.kv.device import OnDevice, store_in
from hybrid.head.kv.layer import LayerKV, Stretch
from hybrid.head.kv.ring import Ring, carved
from hybrid.model.spec import LayerSpec
from hybrid.schedule.kv_tiers import RECORDED_TOKENS
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

    def begin(self) -> None:
        """Behind all that has been launched, nobody has it."""
        self.owner = self.arrived = self.free = None

    def ring(self, spec: LayerSpec, like: Ring) -> Ring:
        """A ring as `like`, in this buffer."""
        return Ring(spec, like.format, like.k.shape[0], like.capacity, carved(self.buffer))


class Mail:
    """The new rows of recorded steps on their way to host memory. A recorded copy ends where it ended when it was
    recorded, and every step's rows belong elsewhere: so the rows of all layers go to one place, in one copy, and the
    host puts them into its rings when the next batch comes, or before it looks at them."""

    def __init__(self, layers: Sequence[StreamedLayer], bus: Bus) -> None:
        self._layers, self._bus = layers, bus
        for layer in layers:
            layer.mail = self
        self._row_bytes = sum(layer.ring.nbytes // (layer.ring.k.shape[0] * layer.capacity) for layer in layers)
        n_bytes = RECORDED_TOKENS * self._row_bytes
        self._device = torch.zeros(n_bytes, dtype=torch.uint8, device=bus.device)
        self._host = bus.host((n_bytes,), torch.uint8)
        self._first = torch.zeros(2, dtype=torch.int32, device=bus.device)
        self._rings: dict[tuple[int, bool], list[Ring]] = {}
        self._sent: tuple[Mark, Sequence[Stretch]] | None = None

    def post(self, layer: StreamedLayer, qkv: QKV) -> None:
        """Of a batch in a layer: turned and stored on the device once more, token by token."""
        n = qkv.q.shape[0]
        whole = Stretch(0, 0, slice(0, n), self._first, recorded=True)
        store_in(self._of(n)[self._layers.index(layer)], layer, whole, qkv)

    def send(self, n: int) -> None:
        """Queue the copy of what all layers have posted of n tokens."""
        n_bytes = n * self._row_bytes
        self._bus.to_host(self._host[:n_bytes], self._device[:n_bytes], self._bus.compute)

    def sent(self, stretches: Sequence[Stretch]) -> None:
        """That copy has been queued, as a part of a replay or not, for these."""
        self._sent = self._bus.compute.mark(), stretches

    def deliver(self) -> None:
        """Wait for what was sent and put it where it belongs."""
        if self._sent is None:
            return
        (mark, stretches), self._sent = self._sent, None
        mark.synchronize()
        for layer, ring in zip(self._layers, self._of(stretches[-1].rows.stop, on_host=True), strict=True):
            for stretch in stretches:
                layer.ring.write(stretch.seq, stretch.p0, ring.k[0, stretch.rows], ring.v[0, stretch.rows])

    def _of(self, n: int, on_host: bool = False) -> list[Ring]:
        """Of n tokens, the rows of each layer as a ring of one sequence."""
        if (n, on_host) not in self._rings:
            carve = carved(self._host if on_host else self._device)
            self._rings[n, on_host] = [Ring(layer.spec, layer.format, 1, n, carve) for layer in self._layers]
        return self._rings[n, on_host]

    @property
    def nbytes(self) -> int:
        """On the device, and as many in host memory."""
        return self._device.nbytes


class StreamedLayer(OnDevice):
    """K and V in host memory, in a ring laid out as `DeviceLayer`'s."""

    def __init__(self, spec: LayerSpec, placement: Placement, bus: Bus) -> None:
        super().__init__(spec, placement, bus.host)
        self.bus = bus
        self.slot: Slot
        self.mail: Mail
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

    def arrive(self, stretches: Sequence[Stretch]) -> None:
        """See `OnDevice.arrive`."""
        slot, seen = self.slot, self._seen(stretches)
        if slot.owner is not self or self._staged != seen:
            self._fetch(seen)
        assert slot.arrived is not None
        self.bus.compute.wait(slot.arrived)

    def attend(self, stretches: Sequence[Stretch], qkv: QKV) -> Tensor:
        """See `OnDevice.attend`."""
        if stretches[0].recorded:
            self.mail.post(self, qkv)
        return super().attend(stretches, qkv)

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
        """For each sequence of a batch the cached positions that its tokens see: (first, one after the last). Where
        others will take their place, those that any may see: all of the ring, as far as it will be filled."""
        seen: dict[int, tuple[int, int]] = {}
        for stretch in stretches:
            if stretch.recorded:
                span = 0, min(stretch.p0, self.capacity)
            else:
                span = max(self.first[stretch.seq], first_key(stretch.p0, self.window)), stretch.p0
            seen.setdefault(stretch.seq, span)
        return seen

    def send(self, stretch: Stretch) -> None:
        """See `OnDevice.send`: to the host, or by mail."""
        if stretch.recorded:
            return
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
