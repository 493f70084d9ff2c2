"""The batch curve: what a step costs by the number of tokens in it. Measured once for a model as it is placed, kept as
numbers in the user's cache directory, and read from there ever after."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybrid.files import replacing
from hybrid.runtime.engine import Engine
from hybrid.schedule import facts
from hybrid.schedule.kv_tiers import by_what_it_holds
from hybrid.schedule.machine_store import cache_dir

VERSION = 3
"""Of what its costs mean; one more whenever the same step may have become quicker."""
SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
N_BEFORE = 32
"""Tokens that the sequence holds before each measured step."""
ROUNDS, PATIENCE_S = 5, 6.0
"""Measured rounds; no further one begins after that many seconds."""


@dataclass(frozen=True)
class BatchCurve:
    """The cost of a step of `sizes` tokens, in steps of one token; between them and beyond, straight lines. `heads` is
    the head's part of each cost (empty: there is no head)."""

    sizes: tuple[int, ...]
    costs: tuple[float, ...]
    heads: tuple[float, ...] = ()

    def cost(self, n: int) -> float:
        """Of a step of n tokens (1 or more)."""
        return self._at(self.costs, n)

    def pays_in_groups(self, n: int) -> bool:
        """Whether n sequences are faster in two groups, each half at work on one of them, than in one batch: what one
        half saves by working beside the other must exceed what two smaller batches cost more than a large one."""
        if not self.heads or n < 2:
            return False
        half = n - n // 2
        head = self._at(self.heads, half)
        return 2 * max(head, self.cost(half) - head) < self.cost(n)

    def _at(self, costs: tuple[float, ...], n: int) -> float:
        sizes = self.sizes
        i = next((i for i, size in enumerate(sizes) if size >= n), len(sizes) - 1)
        if sizes[i] == n:
            return costs[i]
        if len(sizes) == 1:
            return costs[0] * n  # nothing is known: as if every token cost the same
        return costs[i - 1] + (costs[i] - costs[i - 1]) * (n - sizes[i - 1]) / (sizes[i] - sizes[i - 1])

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return {name: list(value) for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, stored: Any) -> BatchCurve:
        """What `to_dict` gave. Raises ValueError, TypeError or KeyError for anything else."""
        sizes = tuple(map(int, stored["sizes"]))
        costs, heads = tuple(map(float, stored["costs"])), tuple(map(float, stored["heads"]))
        if len(sizes) != len(costs) or sizes[:1] != (1,) or costs[:1] != (1.0,) or list(sizes) != sorted(set(sizes)):
            raise ValueError("not a batch curve")
        if not all(1 <= cost < float("inf") for cost in costs) or len(heads) not in (0, len(costs)):
            raise ValueError("not a batch curve")
        if not all(0 <= head <= cost for head, cost in zip(heads, costs, strict=False)):
            raise ValueError("not a batch curve")
        return cls(sizes, costs, heads)


def curve_of(engine: Engine, cache: Path | None = None) -> BatchCurve:
    """The curve of this engine: the one kept, or it is measured now (which empties sequence 0) and kept."""
    path = (cache or cache_dir()) / f"batch-{_key(engine)}.json"
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        return BatchCurve.from_dict(json.loads(path.read_text()))
    curve = measure(engine)
    _keep(path, curve)
    return curve


def measure(engine: Engine) -> BatchCurve:
    """Time steps of each size in sequence 0, interleaved; the fastest of each, which other programs disturb least.
    Sequence 0 is empty afterwards.

    A curve never falls: what a larger step seems to cost less than a smaller one is noise.
    """
    placement = engine.placement
    before = min(N_BEFORE, placement.n_ctx // 2)
    most = max(1, min(placement.n_outputs, placement.n_batch, placement.n_ctx - before))
    sizes = [size for size in SIZES if size <= most]
    token = max(0, engine.vocabulary.bos)
    alone = engine.head is None or placement.n_sequences == 1  # else with the threads of two groups
    found: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}  # seconds, and the head's of them
    began = time.perf_counter()
    engine.trim(0)
    if before:
        engine.evaluate([token] * before)
    for number in range(ROUNDS + 1):
        for size in sizes:
            start = time.perf_counter()
            try:
                step = engine.begin({0: [token] * size}, alone=alone)
                if step.front is not None:
                    step.front.wait()
                middle = time.perf_counter()
                engine.complete(step)
            except BaseException:
                engine.abandon()
                raise
            if number or time.perf_counter() - began > PATIENCE_S:  # the first round warms up
                found[size].append((time.perf_counter() - start, middle - start))
            engine.trim(before)
        if all(found.values()) and time.perf_counter() - began > PATIENCE_S:
            break
    engine.trim(0)
    one = min(found[1])[0]
    costs, heads = [1.0], []
    for size in sizes:
        whole, head = min(found[size])
        costs.append(max(costs[-1], round(whole / one, 3)))
        heads.append(round(costs[-1] * head / whole, 3))
    return BatchCurve(tuple(sizes), tuple(costs[1:]), tuple(heads) if engine.head is not None else ())


def _key(engine: Engine) -> str:
    """What a curve depends on."""
    shards = [
        (shard.path.name, shard.path.stat().st_size, shard.path.stat().st_mtime_ns) for shard in engine.file.shards
    ]
    cpu = facts.cpu()
    placement = {**by_what_it_holds(engine.spec, engine.placement).to_dict(), "n_ctx": 0}
    parts = [VERSION, SIZES, shards, placement, cpu.model, cpu.cores]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _keep(path: Path, curve: BatchCurve) -> None:
    """Write it whole or not at all; a cache that cannot be written costs only the next start."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            json.dump(curve.to_dict(), file)
