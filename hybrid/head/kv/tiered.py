"""The `attend` and `tiered` strategies: K and V in host memory, where the CPU attends to them; of `tiered` the most
recent ones on the device, which attends to those at the same time.

The two results are merged by their log-sum-exps, exactly (HGCA, HybridGen; here nothing is dropped). As a sequence
grows, blocks of its oldest rows on the device move to the host; nothing is computed twice. Without room on the device
this is `attend`. Long chunks of a prompt are computed on the device, to which the rows in host memory come block by
block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from hybrid.head.attention import Block, Keys, attend_blocks, block_tokens, first_key
from hybrid.head.kv.base import QKV
from hybrid.head.kv.cpu_attention import merge
from hybrid.head.kv.device import attend_by_kernel, attend_in, store_in
from hybrid.head.kv.host import HostSide
from hybrid.head.kv.layer import LayerKV, Stretch
from hybrid.head.kv.ring import Ring, Rows
from hybrid.model.spec import LayerSpec
from hybrid.schedule.kv_tiers import Tiers
from hybrid.schedule.placement import Placement


class TieredLayer(LayerKV):
    """Positions first … split - 1 of a sequence lie in host memory, split … end - 1 on the device."""

    def __init__(self, spec: LayerSpec, placement: Placement, tier: Tiers, host: HostSide) -> None:
        super().__init__(spec, placement)
        self.tier, self.host, self.bus = tier, host, host.bus
        self.split = [0] * placement.n_sequences
        n = placement.n_sequences
        self.far = Ring(spec, self.format, n, tier.host, self.bus.host)
        self.near = Ring(spec, self.format, n, tier.device, host.on_device) if tier.device else None

    @property
    def asks(self) -> bool:
        """Whether all its rows lie in host memory, so that short batches are a matter of `ask`, `answer` and
        `receive`."""
        return self.near is None

    def step(self, stretches: Sequence[Stretch], qkv: QKV) -> Tensor:
        """See `LayerKV.step`."""
        self.enter(stretches)
        return self.follow(stretches, self.prepare(qkv))

    def prepare(self, qkv: QKV) -> QKV:
        """See `LayerKV.prepare`: queries turned, and rows as they are stored."""
        q, k = (qkv.q, qkv.k) if qkv.rotation is None else qkv.rotation(qkv.q, qkv.k)
        return QKV(q, self.format.encode(k), self.format.encode(qkv.v), qkv.sinks)

    def follow(self, stretches: Sequence[Stretch], qkv: QKV) -> Tensor:
        """See `LayerKV.follow`."""
        if self.asks and self.host.takes(stretches):
            self.ask(qkv)
            self.answer(stretches, qkv.sinks)
            return self.receive(qkv.q.shape[0])
        q, k, v, sinks = qkv.q, qkv.k, qkv.v, qkv.sinks
        for stretch in stretches:
            self._store(stretch, k[stretch.rows], v[stretch.rows])
        if all(self._all_near(stretch) for stretch in stretches):
            out = [self._near_only(stretch, q[stretch.rows], sinks) for stretch in stretches]
        elif self.host.takes(stretches):
            return self._both(stretches, q, sinks)
        else:
            out = [self._streamed(s, q[s.rows], k[s.rows], v[s.rows], sinks) for s in stretches]
        return out[0] if len(out) == 1 else torch.cat(out)

    # -- attention on the device alone ---------------------------------------------------------------------------

    def is_near(self, stretch: Stretch) -> bool:
        """Whether a stretch sees nothing but the device's rows, and leaves them where they are."""
        return stretch.end - self.split[stretch.seq] <= self.tier.device and self._all_near(stretch)

    def attend(self, stretches: Sequence[Stretch], qkv: QKV) -> Tensor:
        """Of stretches that are near, and have entered: store and attend. It can be recorded."""
        assert self.near is not None
        out = []
        for stretch in stretches:
            q = store_in(self.near, self, stretch, qkv)
            out.append(attend_in(self.near, self, stretch, q, qkv.sinks))
        return out[0] if len(out) == 1 else torch.cat(out)

    # -- attention on the CPU alone ------------------------------------------------------------------------------

    def ask(self, qkv: QKV) -> None:
        """Prepared queries and rows go to the host, which `answer`s. It can be recorded."""
        self.host.ask(self, qkv)

    def answer(self, stretches: Sequence[Stretch], sinks: Tensor | None) -> None:
        """Wait for what `ask` has sent, store it and attend."""
        k, v = self.host.asked(self, stretches[-1].rows.stop)
        for stretch in stretches:
            self.far.write(stretch.seq, stretch.p0, k[stretch.rows], v[stretch.rows])
            self.split[stretch.seq] = stretch.end
        self.host.answer(self, stretches, sinks)

    def receive(self, n: int) -> Tensor:
        """What `answer` found for n tokens comes to the device. It can be recorded."""
        return self.host.receive(self, n)

    def trim(self, seq: int, n: int) -> None:
        """See `LayerKV.trim`. What lies on the host stays there."""
        super().trim(seq, n)
        self.split[seq] = min(self.split[seq], self.end[seq])

    def held(self, seq: int) -> Rows:
        """See `LayerKV.held`."""
        k, v = self.far.stored(seq, self.first[seq], self.split[seq])
        if self.near is None:
            return k, v
        near_k, near_v = self.near.stored(seq, self.split[seq], self.end[seq])
        return torch.cat([k, near_k.cpu()]), torch.cat([v, near_v.cpu()])

    def put(self, seq: int, first: int, k: Tensor, v: Tensor) -> None:
        """See `LayerKV.put`."""
        end = first + k.shape[0]
        self.split[seq] = split = max(first, self.tier.split(end))
        self.far.write(seq, first, k[: split - first], v[: split - first])
        if self.near is not None:
            self.near.write(seq, split, k[split - first :], v[split - first :])

    def copy_rows(self, src: int, dst: int, n: int) -> None:
        """See `LayerKV.copy_rows`."""
        split = self.split[dst] = min(self.split[src], n)
        self.far.copy(src, dst, self.first[src], split)
        if self.near is not None:
            self.near.copy(src, dst, split, n)

    @property
    def nbytes(self) -> int:
        """The recent K and V."""
        return 0 if self.near is None else self.near.nbytes

    @property
    def host_nbytes(self) -> int:
        """The older ones."""
        return self.far.nbytes

    # -- storing -------------------------------------------------------------------------------------------------

    def _store(self, stretch: Stretch, k: Tensor, v: Tensor) -> None:
        """Store rows, moving the oldest on the device to the host where there is no room; what a window no longer
        sees is not moved."""
        seq, p0, end = stretch.seq, stretch.p0, stretch.end
        old = self.split[seq]
        new = self.split[seq] = old if end - old <= self.tier.device else max(old, self.tier.split(end))
        oldest = max(old, self.first[seq])
        if self.near is not None and oldest < min(new, p0):
            self._send(seq, oldest, *self.near.stored(seq, oldest, min(new, p0)))
        start = max(p0, new)
        oldest = max(p0, self.first[seq])
        if oldest < start:
            self._send(seq, oldest, k[oldest - p0 : start - p0], v[oldest - p0 : start - p0])
        if self.near is not None and start < end:
            self.near.write(seq, start, k[start - p0 :], v[start - p0 :])

    def _send(self, seq: int, p0: int, k: Tensor, v: Tensor) -> None:
        for at, rows in self.far.slices(p0, p0 + k.shape[0]):
            self.bus.to_host(self.far.k[seq, at], k[rows], self.bus.compute)
            self.bus.to_host(self.far.v[seq, at], v[rows], self.bus.compute)

    # -- attending -----------------------------------------------------------------------------------------------

    def _all_near(self, stretch: Stretch) -> bool:
        return self.split[stretch.seq] <= first_key(stretch.p0, self.window)

    def _near_only(self, stretch: Stretch, q: Tensor, sinks: Tensor | None) -> Tensor:
        assert self.near is not None
        return attend_in(self.near, self, stretch, q, sinks)

    def _both(self, stretches: Sequence[Stretch], q: Tensor, sinks: Tensor | None) -> Tensor:
        """The CPU attends to what is on the host while the device attends to the rest."""
        job = self.host.begin(self, stretches, q)
        try:
            with self.host.beside():
                parts = [self._near_part(stretch, q[stretch.rows], sinks) for stretch in stretches]
        except BaseException:
            self.host.abandon(job)
            raise
        far, far_lse = self.host.finish(job)
        near, near_lse = (x[0] if len(x) == 1 else torch.cat(x) for x in zip(*parts, strict=True))
        return merge(far, far_lse, near, near_lse)[0]

    def _near_part(self, stretch: Stretch, q: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        assert self.near is not None
        lo = max(self.split[stretch.seq], first_key(stretch.p0, self.window))
        found = attend_by_kernel(self.near, self, stretch, q, lo, sinks)
        if found is not None:
            return found
        return self._attend(q, stretch.p0, self._near_blocks(stretch, lo, stretch.end), sinks)

    def _streamed(self, stretch: Stretch, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """All of it on the device, block by block: from the host, from what is near, and the stretch's own rows."""
        lo, split = first_key(stretch.p0, self.window), min(self.split[stretch.seq], stretch.p0)
        dtype = self.host.computed(self.format)
        n = block_tokens(self.spec.n_embd_k + self.spec.n_embd_v)
        blocks: Iterator[Block] = iter(())
        if lo < split:
            blocks = chain(blocks, self.host.blocks(self, stretch.seq, lo, split, n, dtype))
        if max(lo, split) < stretch.p0:
            blocks = chain(blocks, self._near_blocks(stretch, max(lo, split), stretch.p0))
        decode, p0 = self.format.decode, stretch.p0

        def fresh(lo: int, hi: int, dtype: torch.dtype) -> Rows:
            return decode(k[lo - p0 : hi - p0], dtype), decode(v[lo - p0 : hi - p0], dtype)

        own = Keys(fresh, dtype, n).blocks(p0, stretch.end, n, dtype)
        return self._attend(q, p0, chain(blocks, own), sinks)[0]

    def _near_blocks(self, stretch: Stretch, lo: int, hi: int) -> Iterator[Block]:
        assert self.near is not None
        n_values = self.spec.n_embd_k + self.spec.n_embd_v
        dtype = self.host.computed(self.format)
        keys = Keys(partial(self.near.read, stretch.seq), dtype, n_values)
        return keys.blocks(lo, hi, block_tokens(n_values), dtype)

    def _attend(self, q: Tensor, p0: int, blocks: Iterator[Block], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        spec = self.spec
        return attend_blocks(
            q, p0, blocks, window=spec.window, scale=spec.attn_scale, softcap=spec.attn_softcap, sinks=sinks
        )
