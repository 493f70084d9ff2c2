"""The `device` strategy: K and V of a layer lie on the head's device, next to its weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from hybrid.head.attention import Keys, attend, first_key
from hybrid.head.kv.layer import LayerKV, RingLayer, Stretch
from hybrid.head.kv.ring import Ring
from hybrid.head.rope import Rotation
from hybrid.model.spec import LayerSpec
from hybrid.schedule.placement import Placement


class DeviceLayer(RingLayer):
    """Everything is allocated at the start; nothing grows later."""

    def __init__(self, spec: LayerSpec, placement: Placement, device: torch.device) -> None:
        empty = partial(torch.zeros, device=device)
        super().__init__(spec, placement, lambda shape, dtype: empty(shape, dtype=dtype))

    def step(
        self,
        stretches: Sequence[Stretch],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        rotation: Rotation | None,
    ) -> Tensor:
        """See `LayerKV.step`."""
        out = []
        for stretch in stretches:
            self.append(stretch)
            turned = store_in(self.ring, self, stretch, q, k, v, rotation)
            out.append(attend_in(self.ring, self, stretch, turned, sinks))
        return out[0] if len(out) == 1 else torch.cat(out)

    @property
    def nbytes(self) -> int:
        """All K and V."""
        return self.ring.nbytes


def store_in(
    ring: Ring, layer: LayerKV, stretch: Stretch, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None
) -> Tensor:
    """Turn the queries and keys of a stretch and store its keys and values in `ring` on the device. q, k and v are the
    whole batch's. Returns the stretch's queries."""
    rows = stretch.rows
    q, k, v = q[rows], k[rows], v[rows]
    rotation = None if rotation is None else rotation.of(rows)
    if layer.kernels is not None:
        turned = layer.kernels.turn_and_store(q, k, v, rotation, ring.k[stretch.seq], ring.v[stretch.seq], stretch.p0)
        if turned is not None:
            return turned
    if rotation is not None:
        q, k = rotation(q, k)
    ring.write(stretch.seq, stretch.p0, layer.format.encode(k), layer.format.encode(v))
    return q


def attend_in(ring: Ring, layer: LayerKV, stretch: Stretch, q: Tensor, sinks: Tensor | None) -> Tensor:
    """Attention of a stretch whose own rows, and all it sees, lie in `ring` on the device."""
    spec, rows = layer.spec, layer.format
    found = attend_by_kernel(ring, layer, stretch, q, first_key(stretch.p0, spec.window), sinks)
    if found is not None:
        return found[0]
    n_values = spec.n_embd_k + spec.n_embd_v
    keys = Keys(partial(ring.read, stretch.seq), rows.computed, n_values, packed=rows.packed)
    return attend(
        q, stretch.p0, keys, window=spec.window, scale=spec.attn_scale, softcap=spec.attn_softcap, sinks=sinks
    )


def attend_by_kernel(
    ring: Ring, layer: LayerKV, stretch: Stretch, q: Tensor, first: int, sinks: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Attention of a short stretch to positions `first` and later in `ring`, and its log-sum-exp; None where torch has
    to do it."""
    if layer.kernels is None:
        return None
    k, v = ring.k[stretch.seq], ring.v[stretch.seq]
    return layer.kernels.attend(layer.spec, q, k, v, stretch.p0, first, sinks)
