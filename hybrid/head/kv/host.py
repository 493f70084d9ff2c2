"""The host's side of `attend` and `tiered`: the CPU attends there, and long chunks get their rows in blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybrid.head.attention import Block, block_tokens
from hybrid.head.kv.base import QKV
from hybrid.head.kv.bus import Bus, Mark
from hybrid.head.kv.cpu_attention import Run, attend_on_cpu
from hybrid.head.kv.layer import Stretch
from hybrid.head.kv.ring import carved
from hybrid.head.kv.rows import RowFormat
from hybrid.model.spec import LayerSpec
from hybrid.schedule.kv_tiers import SHORT_TOKENS
from hybrid.schedule.placement import Placement

if TYPE_CHECKING:
    from hybrid.head.kv.tiered import TieredLayer

Part = tuple[Tensor, Tensor]
"""Attention's output [n, n_heads, head_dim_v] and the log-sum-exp [n, n_heads] of its scores, float32."""


class HostSide:
    """What the layers of one cache share: buffers on either side of the bus, sized once, and the thread."""

    def __init__(self, layers: Sequence[tuple[LayerSpec, int]], placement: Placement, bus: Bus) -> None:
        """`layers`: each with the tokens of a sequence it keeps in host memory."""
        self.bus, self.placement = bus, placement
        self.alone = True
        """Whether nobody else computes on the CPU now; otherwise attention keeps to the head's threads."""
        specs = [spec for spec, _ in layers]
        n = placement.n_sequences * SHORT_TOKENS
        self._q = bus.host((n * max(s.n_heads * s.head_dim_k for s in specs),), torch.float32)
        self._out = bus.host((n * max(s.n_heads * (s.head_dim_v + 1) for s in specs),), torch.float32)
        rows = RowFormat(placement.kv_dtype)
        self._rows = bus.host((n * max(_row_bytes(s, rows) for s in specs),), torch.uint8)
        size = max(min(room, block_tokens(s.n_embd_k + s.n_embd_v)) * _row_bytes(s, rows) for s, room in layers)
        self._stages = [_Stage(self.on_device((size,), torch.uint8)) for _ in range(2)]
        self._sinks: dict[int, Tensor] = {}
        self._thread = ThreadPoolExecutor(1, "hybrid-attend")

    def on_device(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros on the device."""
        return torch.zeros(shape, dtype=dtype, device=self.bus.device)

    def computed(self, rows: RowFormat) -> torch.dtype:
        """What the device multiplies such rows in."""
        return torch.float32 if self.bus.device.type == "cpu" else rows.computed

    # -- attention on the CPU ------------------------------------------------------------------------------------

    def takes(self, stretches: Sequence[Stretch]) -> bool:
        """Whether a batch is the CPU's: decode and short chunks are."""
        n = sum(s.end - s.p0 for s in stretches)
        return n <= self.placement.n_sequences * SHORT_TOKENS and all(s.end - s.p0 <= SHORT_TOKENS for s in stretches)

    def ask(self, layer: TieredLayer, qkv: QKV) -> None:
        """Queue the copies of a batch's queries, and of its rows as they are stored, to host memory."""
        n = qkv.q.shape[0]
        k, v = self._rows_of(layer, n)
        for target, source in ((self._queries(qkv.q.shape), qkv.q), (k, qkv.k), (v, qkv.v)):
            self.bus.to_host(target, source, self.bus.compute)

    def asked(self, layer: TieredLayer, n: int) -> Part:
        """Those rows of n tokens, once they are there."""
        self.bus.compute.mark().synchronize()
        return self._rows_of(layer, n)

    def answer(self, layer: TieredLayer, stretches: Sequence[Stretch], sinks: Tensor | None) -> None:
        """Attend, on the caller's thread, for the queries that have come."""
        if sinks is not None and layer.spec.index not in self._sinks:
            held = self.bus.host(tuple(sinks.shape), torch.float32)
            self.bus.to_host(held, sinks, self.bus.compute)
            self.bus.compute.mark().synchronize()
            self._sinks[layer.spec.index] = held
        spec = layer.spec
        queries = self._queries((stretches[-1].rows.stop, spec.n_heads, spec.head_dim_k))
        out, _ = self._job(layer, stretches, queries, None if sinks is None else self._sinks[spec.index])()
        self._out[: out.numel()].view(out.shape).copy_(out)

    def receive(self, layer: TieredLayer, n: int) -> Tensor:
        """Queue the copy of what n tokens got to the device."""
        shape = n, layer.spec.n_heads, layer.spec.head_dim_v
        there = torch.empty(shape, device=self.bus.device)
        self.bus.to_device(there, self._out[: there.numel()].view(shape), self.bus.compute)
        return there

    def begin(self, layer: TieredLayer, stretches: Sequence[Stretch], q: Tensor) -> Future[Part]:
        """The same on the other thread, for `finish`."""
        queries = self._queries(q.shape)
        self.bus.to_host(queries, q, self.bus.compute)
        ready = self.bus.compute.mark()  # the rows this batch sent to the host have then arrived too

        attend = self._job(layer, stretches, queries, None)

        def job() -> Part:
            ready.synchronize()
            with torch.inference_mode():
                return attend()

        return self._thread.submit(job)

    def finish(self, job: Future[Part]) -> Part:
        """The output and the log-sum-exp of what `begin` began, on the device."""
        out, lse = job.result()
        n = out.numel()
        return self._to_device(out, self._out[:n]), self._to_device(lse, self._out[n : n + lse.numel()])

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What the caller computes amid `begin` and `finish`: an emulated device leaves that job its cores, and has all
        of its own again afterwards."""
        before = torch.get_num_threads()
        share = min(before, self.placement.n_threads_attend)
        if share < before:
            torch.set_num_threads(share)
        try:
            yield
        finally:
            if share < before:
                torch.set_num_threads(before)

    def abandon(self, job: Future[Part]) -> None:
        """Wait until it is over, however it ends: it reads what the caller will change."""
        job.exception()

    def _job(
        self, layer: TieredLayer, stretches: Sequence[Stretch], queries: Tensor, sinks: Tensor | None
    ) -> Callable[[], Part]:
        spec, placement = layer.spec, self.placement
        runs = [
            Run(s.rows.start, s.end - s.p0, s.p0, layer.far.k[s.seq], layer.far.v[s.seq],
                min(layer.first[s.seq], layer.split[s.seq]), layer.split[s.seq])
            for s in stretches
        ]  # fmt: skip
        return partial(
            attend_on_cpu,
            queries,
            runs,
            scale=spec.attn_scale,
            window=spec.window,
            softcap=spec.attn_softcap,
            sinks=sinks,
            n_threads=placement.n_threads_attend if self.alone else placement.n_threads_head,
        )

    def _queries(self, shape: tuple[int, ...]) -> Tensor:
        """Room for them in host memory."""
        return self._q[: math.prod(shape)].view(shape)

    def _rows_of(self, layer: TieredLayer, n: int) -> Part:
        """Room there for the K and V of n tokens, as they are stored."""
        carve = carved(self._rows)
        k, v = (carve((n, *rows.shape[2:]), rows.dtype) for rows in (layer.far.k, layer.far.v))
        return k, v

    def _to_device(self, found: Tensor, buffer: Tensor) -> Tensor:
        """The buffer's last copy is over: whatever this layer computed from came behind it, in the same lane."""
        buffer.view(found.shape).copy_(found)
        there = torch.empty(found.shape, device=self.bus.device)
        self.bus.to_device(there, buffer.view(found.shape), self.bus.compute)
        return there

    # -- rows for the device -------------------------------------------------------------------------------------

    def blocks(self, layer: TieredLayer, seq: int, lo: int, hi: int, n: int, dtype: torch.dtype) -> Iterator[Block]:
        """Positions lo … hi - 1 out of host memory, n at a time: while one block is used, the next one arrives."""
        bus = self.bus
        bus.side.wait(bus.compute.mark())  # behind the rows that this batch sent
        spans = [(at, min(hi, at + n)) for at in range(lo, hi, n)]
        self._stages[0].fetch(bus, layer, seq, *spans[0])
        for i, (start, end) in enumerate(spans):
            if i + 1 < len(spans):
                self._stages[(i + 1) % 2].fetch(bus, layer, seq, *spans[i + 1])
            stage = self._stages[i % 2]
            k, v = stage.take(bus)
            try:
                yield start, end, layer.format.decode(k, dtype), layer.format.decode(v, dtype)
            finally:
                stage.free = bus.compute.mark()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True)

    @property
    def nbytes(self) -> int:
        """Of the two blocks on the device."""
        return sum(stage.buffer.nbytes for stage in self._stages)

    @property
    def host_nbytes(self) -> int:
        """Of the buffers in host memory."""
        return self._q.nbytes + self._out.nbytes + self._rows.nbytes


class _Stage:
    """Room for one block on the device."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.free: Mark | None = None
        self._arrived: Mark | None = None
        self._rows: tuple[Tensor, Tensor]

    def fetch(self, bus: Bus, layer: TieredLayer, seq: int, lo: int, hi: int) -> None:
        """Start copying positions lo … hi - 1 here, behind whoever reads what is here now."""
        if self.free is not None:
            bus.side.wait(self.free)
        ring, carve = layer.far, carved(self.buffer)
        views = [carve((hi - lo, *rows.shape[2:]), rows.dtype) for rows in (ring.k, ring.v)]
        for at, part in ring.slices(lo, hi):
            bus.to_device(views[0][part], ring.k[seq, at], bus.side)
            bus.to_device(views[1][part], ring.v[seq, at], bus.side)
        self._rows, self._arrived = (views[0], views[1]), bus.side.mark()

    def take(self, bus: Bus) -> tuple[Tensor, Tensor]:
        """K and V of the block, for the compute lane."""
        assert self._arrived is not None
        bus.compute.wait(self._arrived)
        return self._rows


def _row_bytes(spec: LayerSpec, rows: RowFormat) -> int:
    width = rows.width(spec.head_dim_k) + rows.width(spec.head_dim_v)
    return spec.n_kv_heads * width * rows.dtype.itemsize
