"""The `device` strategy: K and V of a layer lie on the head's device, next to its weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from hybrid.head.attention import Keys, attend, first_key
from hybrid.head.kv.base import QKV
from hybrid.head.kv.layer import LayerKV, RingLayer, Stretch, UnrecordableError
from hybrid.head.kv.ring import Ring
from hybrid.model.spec import LayerSpec
from hybrid.schedule.placement import Placement


class OnDevice(RingLayer):
    """A layer that attends in a ring on the device, where it has all its rows, or gets them in time."""

    @property
    def here(self) -> Ring:
        """The ring on the device."""
        return self.ring

    def step(self, stretches: Sequence[Stretch], qkv: QKV) -> Tensor:
        """See `LayerKV.step`."""
        self.enter(stretches)
        return self.attend(stretches, qkv)

    def attend(self, stretches: Sequence[Stretch], qkv: QKV) -> Tensor:
        """What the device does in a step: store k and v and attend. It can be recorded."""
        self.arrive(stretches)
        out = []
        try:
            for stretch in stretches:
                q = store_in(self.here, self, stretch, qkv)
                self.send(stretch)
                out.append(attend_in(self.here, self, stretch, q, qkv.sinks))
        finally:
            self.free()
        return out[0] if len(out) == 1 else torch.cat(out)

    def arrive(self, stretches: Sequence[Stretch]) -> None:
        """Wait for what these tokens see."""

    def send(self, stretch: Stretch) -> None:
        """The new rows have been stored in `here`; those that belong elsewhere are sent there."""

    def free(self) -> None:
        """The batch needs `here` no more."""


class DeviceLayer(OnDevice):
    """Everything is allocated at the start; nothing grows later."""

    def __init__(self, spec: LayerSpec, placement: Placement, device: torch.device) -> None:
        empty = partial(torch.zeros, device=device)
        super().__init__(spec, placement, lambda shape, dtype: empty(shape, dtype=dtype))

    @property
    def nbytes(self) -> int:
        """All K and V."""
        return self.ring.nbytes


def store_in(ring: Ring, layer: LayerKV, stretch: Stretch, qkv: QKV) -> Tensor:
    """Turn the queries and keys of a stretch and store its keys and values in `ring` on the device. `qkv` is the whole
    batch's. Returns the stretch's queries."""
    own = qkv.of(stretch.rows)
    q, k, v, rotation = own.q, own.k, own.v, own.rotation
    if layer.kernels is not None and stretch.where is not None:
        turned = layer.kernels.turn_and_store(q, k, v, rotation, ring.k, ring.v, stretch.where)
        if turned is not None:
            return turned
    if stretch.recorded:
        raise UnrecordableError("PyTorch's RoPE has to know the positions")
    if rotation is not None:
        q, k = rotation(q, k)
    ring.write(stretch.seq, stretch.p0, layer.format.encode(k), layer.format.encode(v))
    return q


def attend_in(ring: Ring, layer: LayerKV, stretch: Stretch, q: Tensor, sinks: Tensor | None) -> Tensor:
    """Attention of a stretch whose own rows, and all it sees, lie in `ring` on the device."""
    spec, rows = layer.spec, layer.format
    found = attend_by_kernel(ring, layer, stretch, q, 0, sinks)
    if found is not None:
        return found[0]
    if stretch.recorded:
        raise UnrecordableError("PyTorch's attention has to know the positions")
    n_values = spec.n_embd_k + spec.n_embd_v
    keys = Keys(partial(ring.read, stretch.seq), rows.computed, n_values, packed=rows.packed)
    return attend(
        q, stretch.p0, keys, window=spec.window, scale=spec.attn_scale, softcap=spec.attn_softcap, sinks=sinks
    )


def attend_by_kernel(
    ring: Ring, layer: LayerKV, stretch: Stretch, q: Tensor, least: int, sinks: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Attention of a short stretch to what it sees from position `least` on, all in `ring`, and its log-sum-exp; None
    where torch has to do it."""
    if layer.kernels is None or stretch.where is None:
        return None
    n_keys = stretch.end - max(least, first_key(stretch.p0, layer.spec.window))
    return layer.kernels.attend(layer.spec, q, ring.k, ring.v, stretch.where, least, n_keys, sinks)
