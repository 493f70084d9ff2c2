"""The `device` strategy: K and V of a layer lie on the head's device, next to its weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from hybrid.head.attention import Keys, attend
from hybrid.head.kv.layer import LayerKV, RingLayer, Stretch
from hybrid.head.kv.ring import Ring
from hybrid.model.spec import LayerSpec
from hybrid.schedule.placement import Placement


class DeviceLayer(RingLayer):
    """Everything is allocated at the start; nothing grows later."""

    def __init__(self, spec: LayerSpec, placement: Placement, device: torch.device) -> None:
        empty = partial(torch.zeros, device=device)
        super().__init__(spec, placement, lambda shape, dtype: empty(shape, dtype=dtype))

    def step(self, stretches: Sequence[Stretch], q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """See `LayerKV.step`."""
        out = []
        for stretch in stretches:
            self.append(stretch)
            rows = stretch.rows
            self.ring.write(stretch.seq, stretch.p0, self.format.encode(k[rows]), self.format.encode(v[rows]))
            out.append(attend_in(self.ring, self, stretch, q[rows], sinks))
        return out[0] if len(out) == 1 else torch.cat(out)

    @property
    def nbytes(self) -> int:
        """All K and V."""
        return self.ring.nbytes


def attend_in(ring: Ring, layer: LayerKV, stretch: Stretch, q: Tensor, sinks: Tensor | None) -> Tensor:
    """Attention of a stretch whose own rows, and all it sees, lie in `ring` on the device."""
    spec, rows = layer.spec, layer.format
    n_values = spec.n_embd_k + spec.n_embd_v
    keys = Keys(partial(ring.read, stretch.seq), rows.computed, n_values, packed=rows.packed)
    return attend(
        q, stretch.p0, keys, window=spec.window, scale=spec.attn_scale, softcap=spec.attn_softcap, sinks=sinks
    )
