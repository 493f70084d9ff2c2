"""A few short measurements of a model, from which the CostModel's rates are fitted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from hybrid.model.file import ModelFile
from hybrid.model.spec import ModelSpec
from hybrid.runtime.engine import Engine
from hybrid.schedule.cost_fit import Measurement
from hybrid.schedule.placement import Placement

T = TypeVar("T")


@dataclass(frozen=True)
class Clock:
    """Seconds, for a half (read on the thread that runs it) and for the whole engine."""

    half: Callable[[], float]
    whole: Callable[[], float]


WALL = Clock(time.perf_counter, time.perf_counter)
CPU = Clock(time.thread_time, time.process_time)
"""Processor time: with one thread a half it tells what a step costs although other programs share the machine. Of
halves that overlap it gives the sum."""
N_TOKENS = 8
"""Tokens decoded for one figure; the quickest counts, because what disturbs a token only ever makes it slower."""


def calibrate(
    file: ModelFile,
    spec: ModelSpec,
    placements: Sequence[Placement],
    *,
    depth: int = 768,
    clock: Clock = WALL,
    progress: Callable[[float], None] | None = None,
) -> list[Measurement]:
    """Load each placement in turn and time its halves apart, and the engine as a whole, at depth 0 and `depth`.

    `progress` gets the share done. Raises what loading raises; what was measured until then is lost.
    """
    found: list[Measurement] = []
    for i, placement in enumerate(placements):
        with closing(Engine(file, spec, placement)) as engine:
            found += measure(engine, depth, clock)
        if progress is not None:
            progress((i + 1) / len(placements))
    return found


def measure(engine: Engine, depth: int, clock: Clock = WALL) -> list[Measurement]:
    """One engine's measurements: the halves' chunks up to `depth`, and tokens at its beginning and at its end."""
    depth = min(depth, engine.placement.n_ctx - 4 * N_TOKENS)
    with closing(_Halves(engine, clock)) as halves:
        halves.chunk(0, min(engine.placement.n_batch, depth))  # warms up
        halves.trim(0)
        tokens = [halves.decode(at) for at in range(1, N_TOKENS + 1)] if halves.token(0) else []
        found = [_quickest(tokens, engine.placement, 0)]
        halves.trim(0)
        found += halves.prompt(depth)
        found.append(_quickest([halves.decode(depth + i) for i in range(N_TOKENS)], engine.placement, depth))
        halves.trim(0)
    whole = measure_whole(engine, [0, depth], clock)
    totals = {m.depth: m.total_s for m in whole if m.kind == "decode"}
    return [replace(m, total_s=totals.get(m.depth)) if m.kind == "decode" else m for m in found] + [
        m for m in whole if m.kind == "prefill"
    ]


def measure_whole(engine: Engine, depths: Sequence[int], clock: Clock = WALL) -> list[Measurement]:
    """Tokens at `depths` (ascending), and the prompts in between, as the engine runs them."""
    found: list[Measurement] = []
    engine.trim(0)
    at = 0
    for depth in depths:
        if depth > at:
            found.append(
                Measurement(
                    placement=engine.placement,
                    kind="prefill",
                    depth=at,
                    n_tokens=depth - at,
                    total_s=_timed(clock.whole, lambda n=depth - at: engine.evaluate(_tokens(n)))[0],  # type: ignore[misc]
                )
            )
        times = [_timed(clock.whole, lambda: engine.evaluate(_tokens(1)))[0] for _ in range(N_TOKENS)]
        found.append(Measurement(placement=engine.placement, kind="decode", depth=depth, total_s=min(times)))
        at = engine.trim(depth)
    engine.trim(0)
    return found


class _Halves:
    """The two halves of an engine, run one after the other on threads with the placement's thread counts."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.engine, self.placement, self.clock = engine, engine.placement, clock
        self._pool = ThreadPoolExecutor(1, initializer=self._set_threads)

    def _set_threads(self) -> None:
        if self.engine.head is not None:
            import torch

            torch.set_num_threads(self.placement.n_threads_head)

    def close(self) -> None:
        self._pool.shutdown()

    def trim(self, n: int) -> None:
        """Forget everything from n on in both halves, behind the engine's back (which thinks it is empty)."""
        if self.engine.head is not None:
            self.engine.head.cache.trim(0, n)
        if self.engine.tail is not None:
            self.engine.tail.trim(0, n)

    def token(self, at: int) -> Measurement:
        """One token at a depth."""
        return replace(self.chunk(at, 1, output=True), kind="decode")

    decode = token

    def prompt(self, n: int) -> Iterator[Measurement]:
        """A prompt of n tokens in the placement's chunks; only whole chunks are reported."""
        step = self.placement.n_batch
        for at in range(0, n, step):
            m = self.chunk(at, min(step, n - at))
            if m.n_tokens == step:
                yield m

    def chunk(self, at: int, n: int, output: bool = False) -> Measurement:
        """n tokens at a depth, without logits unless `output`."""
        head, tail = self.engine.head, self.engine.tail
        tokens, positions = np.asarray(_tokens(n), np.int32), np.arange(at, at + n, dtype=np.int32)
        seqs, wanted = np.zeros(n, np.int32), np.zeros(n, np.bool_)
        wanted[-1] = output
        head_s = tail_s = None
        rows: Any = tokens

        def run_head() -> Any:
            assert head is not None
            hidden = head.forward(tokens, positions, seqs)
            if tail is None:
                return head.logits(hidden[-1:]).cpu() if output else hidden.cpu()
            return hidden.cpu().numpy()

        if head is not None:
            head_s, rows = self._pool.submit(_timed, self.clock.half, run_head).result()
        if tail is not None:
            tail_s, _ = self.engine.on_tail_thread(
                lambda: _timed(self.clock.half, lambda: tail.decode(rows, positions, seqs, wanted))
            )
        return Measurement(placement=self.placement, kind="prefill", depth=at, n_tokens=n, head_s=head_s, tail_s=tail_s)


def _quickest(tokens: Sequence[Measurement], placement: Placement, depth: int) -> Measurement:
    """The least time of each half over tokens at about the same depth."""
    return Measurement(
        placement=placement,
        kind="decode",
        depth=depth,
        head_s=min((m.head_s for m in tokens if m.head_s is not None), default=None),
        tail_s=min((m.tail_s for m in tokens if m.tail_s is not None), default=None),
    )


def _tokens(n: int) -> list[int]:
    """n ordinary tokens, not all the same."""
    return [100 + 7 * i % 200 for i in range(n)]


def _timed(clock: Callable[[], float], work: Callable[[], T]) -> tuple[float, T]:
    start = clock()
    result = work()
    return clock() - start, result
