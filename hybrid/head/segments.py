"""One step of decode cut into segments: what the device does, to be recorded and replayed, and what the host does in
between at every step (the cache's bookkeeping, copies over the bus, the CPU's attention).

There is one segment a layer: the whole layer where it attends on the device, otherwise what lies between the attention
of one layer and that of the next. Where the tokens are, a segment reads from the device's memory alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid.head.decoder import Block, Rotations, Stream
from hybrid.head.kv.cache import LayeredKVCache
from hybrid.head.kv.device import OnDevice
from hybrid.head.kv.layer import LayerKV, Stretch
from hybrid.head.norm import Norm, same
from hybrid.head.rope import Rotation
from hybrid.model.spec import RopeSpec

Stretches = Sequence[Stretch]


@dataclass
class State(Stream):
    """What a part of a step leaves to the next."""

    rows: tuple[Tensor, Tensor, Tensor] | None = None
    """Queries, keys and values of a layer whose attention is the host's affair."""
    out: Tensor | None = None
    """What it made of them."""


Part = Callable[[State], None]
"""Of a segment. It reads the state and puts new tensors there; those that it has read stay as they are, so that it can
be done again."""


@dataclass(frozen=True)
class Segment:
    """What the device does without a word from the host."""

    parts: Sequence[Part]

    def __call__(self, state: State) -> None:
        """Launch it."""
        for part in self.parts:
            part(state)


Host = Callable[[State, Stretches], None]
"""What the host does for the stretches of this very step."""


class Inputs:
    """Memory on the device that the segments of steps of one shape read: what differs from step to step."""

    def __init__(self, shape: Sequence[int], n_ctx: int, n_embd: int, device: torch.device) -> None:
        """`shape`: the tokens of each stretch."""
        self.h = torch.zeros(sum(shape), n_embd, device=device)
        self.rotations: dict[RopeSpec, Rotation] = {}
        self._where = torch.zeros(len(shape), 2, dtype=torch.int32, device=device)
        starts = [sum(shape[:i]) for i in range(len(shape))]
        self.stretches = [
            Stretch(0, n_ctx - n, slice(start, start + n), where, recorded=True)
            for n, start, where in zip(shape, starts, self._where, strict=True)
        ]
        """As far as the host may know them."""

    def write(self, h: Tensor, rotations: Mapping[RopeSpec, Rotation], stretches: Stretches) -> None:
        """Of a step: embeddings [n_tokens, n_embd], and where its tokens are. `rotations` lie on the host."""
        self.h.copy_(h)
        where = torch.tensor([[stretch.p0, stretch.seq] for stretch in stretches], dtype=torch.int32)
        self._where.copy_(where, non_blocking=True)  # out of ordinary memory: it has been read when this returns
        for spec, now in rotations.items():
            if spec not in self.rotations:
                self.rotations[spec] = now.map(lambda part: torch.empty_like(part, device=self.h.device))
            for held, part in zip(self.rotations[spec].parts, now.parts, strict=True):
                held.copy_(part, non_blocking=True)


def cut(blocks: Sequence[Block], cache: LayeredKVCache, inputs: Inputs) -> list[Segment | Host]:
    """A step through all blocks, from the state whose residual stream is `inputs.h`."""
    step: list[Segment | Host] = [_fetch(cache, 0)]
    parts: list[Part] = [_opening(blocks[0])]
    for layer, (block, kv) in enumerate(zip(blocks, cache.layers, strict=True)):
        last = layer + 1 == len(blocks)
        following = same if last else blocks[layer + 1].attn_norm
        if not last:
            step.append(_fetch(cache, layer + 1))
        if isinstance(kv, OnDevice):
            step += [_enter(kv), Segment([*parts, _whole(block, kv, inputs, following)]), _leave(kv)]
            parts = []
        else:
            step += [Segment([*parts, _until(block, kv, inputs.rotations)]), _attend(block, kv)]
            parts = [_behind(block, following)]
    return [*step, Segment(parts)] if parts else step


def _opening(block: Block) -> Part:
    def part(state: State) -> None:
        state.x = block.attn_norm(state.h)

    return part


def _whole(block: Block, kv: OnDevice, inputs: Inputs, following: Norm) -> Part:
    attention = block.attention

    def part(state: State) -> None:
        rows = attention.project(state.x)
        out = kv.compute(inputs.stretches, *rows, attention.sinks, attention.rotation(inputs.rotations))
        block.finish(state, attention.output(out.flatten(1)), following)

    return part


def _until(block: Block, kv: LayerKV, rotations: Rotations) -> Part:
    attention = block.attention

    def part(state: State) -> None:
        state.rows = kv.prepare(*attention.project(state.x), attention.rotation(rotations))

    return part


def _behind(block: Block, following: Norm) -> Part:
    def part(state: State) -> None:
        assert state.out is not None
        out, state.out = block.attention.output(state.out.flatten(1)), None
        block.finish(state, out, following)

    return part


def _fetch(cache: LayeredKVCache, layer: int) -> Host:
    return lambda state, stretches: cache.fetch(layer, stretches)


def _enter(kv: OnDevice) -> Host:
    return lambda state, stretches: kv.enter(stretches)


def _leave(kv: OnDevice) -> Host:
    return lambda state, stretches: kv.leave(stretches)


def _attend(block: Block, kv: LayerKV) -> Host:
    def host(state: State, stretches: Stretches) -> None:
        assert state.rows is not None
        out = kv.follow(stretches, *state.rows, block.attention.sinks)
        state.out = out if state.out is None else state.out.copy_(out)

    return host
