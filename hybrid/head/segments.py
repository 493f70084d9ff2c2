"""One step of decode cut into segments: what the device does, to be recorded and replayed, and what the host does in
between at every step (the CPU's attention, the cache's bookkeeping).

A segment goes as far as the device can without the host: through all layers that attend on the device, copies of what
they see included, and otherwise from the attention of one layer to that of the next. Where the tokens are, it reads
from the device's memory alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from hybrid.head.decoder import Block, Stream
from hybrid.head.kv.base import QKV
from hybrid.head.kv.cache import LayeredKVCache, Recorded
from hybrid.head.kv.device import OnDevice
from hybrid.head.kv.layer import LayerKV, Stretch, locations
from hybrid.head.kv.tiered import TieredLayer
from hybrid.head.norm import Norm, same
from hybrid.head.rope import Rotation
from hybrid.model.spec import RopeSpec

Stretches = Sequence[Stretch]


@dataclass
class State(Stream):
    """What a part of a step leaves to the next."""

    qkv: QKV | None = None
    """Of a layer whose attention is the host's affair."""
    out: Tensor | None = None
    """What attention made of them."""


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

    def __init__(self, shape: Sequence[Recorded], n_embd: int, device: torch.device) -> None:
        """`shape`: what the part of each stretch is recorded for."""
        self.h = torch.zeros(sum(part.n for part in shape), n_embd, device=device)
        self.near = all(part.near for part in shape)
        self.rotations: dict[RopeSpec, Rotation] = {}
        self._where = torch.zeros(len(shape), 2, dtype=torch.int32, device=device)
        ends = accumulate(part.n for part in shape)
        self.stretches = [
            Stretch(part.seq, part.last, slice(end - part.n, end), where, recorded=True)
            for part, end, where in zip(shape, ends, self._where, strict=True)
        ]
        """As far as the host may know them."""

    def write(self, h: Tensor, rotations: Mapping[RopeSpec, Rotation], stretches: Stretches) -> Stretches:
        """Of a step: embeddings [n_tokens, n_embd], and where its tokens are, which the stretches that it returns know
        on the device too. `rotations` lie on the host."""
        self.h.copy_(h)
        self._where.copy_(locations(stretches), non_blocking=True)  # out of ordinary memory: read when this returns
        for spec, now in rotations.items():
            if spec not in self.rotations:
                self.rotations[spec] = now.map(lambda part: torch.empty_like(part, device=self.h.device))
            for held, part in zip(self.rotations[spec].parts, now.parts, strict=True):
                held.copy_(part, non_blocking=True)
        return [replace(stretch, where=where) for stretch, where in zip(stretches, self._where, strict=True)]


def cut(blocks: Sequence[Block], cache: LayeredKVCache, inputs: Inputs) -> list[Segment | Host]:
    """A step through all blocks, from the state whose residual stream is `inputs.h`."""
    n = inputs.h.shape[0]
    step: list[Segment | Host] = [lambda state, stretches: cache.enter(stretches)]
    parts: list[Part] = [lambda state: cache.begin(), _fetch(cache, 0, inputs), _opening(blocks[0])]
    for layer, (block, kv) in enumerate(zip(blocks, cache.layers, strict=True)):
        last = layer + 1 == len(blocks)
        if not last:
            parts.append(_fetch(cache, layer + 1, inputs))
        if isinstance(kv, OnDevice) or (isinstance(kv, TieredLayer) and inputs.near):
            parts.append(_attend(block, kv, inputs))
        else:
            if isinstance(kv, TieredLayer) and kv.asks:
                before, between, *after = _ask(block, kv, inputs)
            else:
                before, between, *after = _follow(block, kv, inputs)
            step += [Segment([*parts, before]), between]
            parts = list(after)
        parts.append(_behind(block, same if last else blocks[layer + 1].attn_norm))
    parts.append(lambda state: cache.end(n))
    return [*step, Segment(parts), lambda state, stretches: cache.leave(stretches)]


def _opening(block: Block) -> Part:
    def part(state: State) -> None:
        state.x = block.attn_norm(state.h)

    return part


def _fetch(cache: LayeredKVCache, layer: int, inputs: Inputs) -> Part:
    return lambda state: cache.fetch(layer, inputs.stretches)


def _attend(block: Block, kv: OnDevice | TieredLayer, inputs: Inputs) -> Part:
    def part(state: State) -> None:
        state.out = kv.attend(inputs.stretches, block.attention.project(state.x, inputs.rotations))

    return part


def _ask(block: Block, kv: TieredLayer, inputs: Inputs) -> tuple[Part, Host, Part]:
    def ask(state: State) -> None:
        kv.ask(kv.prepare(block.attention.project(state.x, inputs.rotations)))

    def answer(state: State, stretches: Stretches) -> None:
        kv.answer(stretches, block.attention.sinks)

    def receive(state: State) -> None:
        state.out = kv.receive(inputs.h.shape[0])

    return ask, answer, receive


def _follow(block: Block, kv: LayerKV, inputs: Inputs) -> tuple[Part, Host]:
    def prepare(state: State) -> None:
        state.qkv = kv.prepare(block.attention.project(state.x, inputs.rotations))

    def follow(state: State, stretches: Stretches) -> None:
        assert state.qkv is not None
        out = kv.follow(stretches, state.qkv)
        state.out = out if state.out is None else state.out.copy_(out)

    return prepare, follow


def _behind(block: Block, following: Norm) -> Part:
    def part(state: State) -> None:
        assert state.out is not None
        out, state.out = block.attention.output(state.out.flatten(1)), None
        block.finish(state, out, following)

    return part
