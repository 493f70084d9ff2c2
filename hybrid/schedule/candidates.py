"""Candidate placements of a model on a machine: what each needs, what it would cost, and whether it can be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybrid.model.spec import ModelSpec
from hybrid.model.splits import find_splits
from hybrid.schedule.budget import Budget, needed_vram
from hybrid.schedule.cost import CostModel, longest_context
from hybrid.schedule.kv_checks import kv_refusal
from hybrid.schedule.ledger import Ledger, ledger_of
from hybrid.schedule.placement import KVStrategy, Placement
from hybrid.schedule.request import KV_AVAILABLE
from hybrid.schedule.shares import with_batch, with_threads

OFFLOADED: tuple[KVStrategy, ...] = ("stream", "attend", "tiered")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One placement, judged. Seconds are predicted."""

    placement: Placement
    ledger: Ledger
    fits: bool
    available: bool
    """Whether this version can run it."""
    reason: str
    """Why it fits or not, in a phrase."""
    lacks: str
    """Which memory is too small, "VRAM" or "RAM"; empty where none is."""
    tpot_s: Mapping[int, float]
    """Seconds a token, by depth: empty, half and full context."""
    ttft_s: Mapping[int, float]
    """Seconds until the first token of a prompt of so many tokens (one at least)."""
    kv_transfer_s_per_token: float
    """At full context, of what crosses the bus, hidden behind computing or not."""
    per_layer_transfer_s: Mapping[str, float]
    """Reading one layer's K and V at full context from the device's memory, over the bus, and from the disk."""
    longest_context: int | None = None
    """Tokens up to which a token takes no longer than was asked for and memory suffices; None if nothing was asked."""

    @property
    def runnable(self) -> bool:
        """Fits, and this version has it."""
        return self.fits and self.available

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "placement": self.placement.to_dict(),
            "fits": self.fits,
            "available": self.available,
            "reason": self.reason,
            "vram_bytes": self.ledger.vram_bytes,
            "ram_bytes": self.ledger.ram_bytes,
            "kv_bytes": self.ledger.kv_bytes,
            "ledger": self.ledger.to_dict(),
            "tpot_s": {str(depth): seconds for depth, seconds in self.tpot_s.items()},
            "ttft_s": {str(depth): seconds for depth, seconds in self.ttft_s.items()},
            "kv_transfer_s_per_token": self.kv_transfer_s_per_token,
            "per_layer_transfer_s": dict(self.per_layer_transfer_s),
            "longest_context": self.longest_context,
            "emulated": self.ledger.emulated,
        }


def candidates(
    model: CostModel,
    base: Placement,
    budget: Budget,
    *,
    n_batch: int | None = None,
    tpot_s: float | None = None,
) -> list[Candidate]:
    """Every allowed split with K and V beside the weights, then the KV-only family: as many layers on the device as fit
    (all of them, where that is possible) with K and V elsewhere.

    `base` gives everything but the split, the strategy, the chunk (`n_batch`, or each split's default) and the
    threads. With `tpot_s` each is asked for its longest context too.
    """
    cores = model.machine.cpu.cores
    return [judge(model, p, budget, tpot_s) for p in _placements(model.spec, base, budget, n_batch, cores)]


def judge(model: CostModel, placement: Placement, budget: Budget, tpot_s: float | None = None) -> Candidate:
    """One placement's needs and costs."""
    ledger = ledger_of(model.spec, placement)
    shortfall = budget.shortfall(ledger)
    available = placement.n_gpu_layers == 0 or placement.kv in KV_AVAILABLE
    n_ctx = placement.n_ctx
    depths = sorted({0, n_ctx // 2, n_ctx})
    longest = None
    if tpot_s is not None:
        longest = _longest(model, placement, budget, tpot_s)
    return Candidate(
        placement=placement,
        ledger=ledger,
        fits=shortfall is None,
        available=available,
        lacks=budget.lacks(ledger),
        reason=shortfall or ("fits" if available else f"fits, but --kv {placement.kv} is not in this version"),
        tpot_s={depth: model.tpot_s(placement, depth) for depth in depths},
        ttft_s={depth: model.prefill_s(placement, max(1, depth)) for depth in depths},
        kv_transfer_s_per_token=model.kv_transfer_s(placement, n_ctx),
        per_layer_transfer_s=model.layer_transfer_s(placement, n_ctx),
        longest_context=longest,
    )


def best(found: list[Candidate]) -> Candidate | None:
    """The runnable one whose tokens are quickest at half the context; None where nothing can run.

    An emulated device only wins where nothing else can: it is right, not quick.
    """

    def rank(candidate: Candidate) -> tuple[bool, float]:
        depth = candidate.placement.n_ctx // 2
        return candidate.ledger.emulated, candidate.tpot_s[depth]

    return min((c for c in found if c.runnable), key=rank, default=None)


def smallest_vram(spec: ModelSpec, base: Placement, n_batch: int | None = None) -> int:
    """VRAM that one layer (the fewest that can be split off) needs; 0 for a model that cannot be split."""
    least = min((k for k in find_splits(spec).allowed if k > 0), default=0)
    if not least:
        return 0
    return needed_vram(ledger_of(spec, with_batch(replace(base, n_gpu_layers=least), spec, n_batch)))


def _placements(
    spec: ModelSpec, base: Placement, budget: Budget, n_batch: int | None, cores: int
) -> Iterator[Placement]:
    def at(k: int, kv: KVStrategy) -> Placement:
        chosen = with_batch(replace(base, n_gpu_layers=k, kv=kv), spec, n_batch)
        return with_threads(chosen, spec, cores)

    splits = find_splits(spec).allowed
    for k in splits:
        yield at(k, "device")
    heads = sorted((k for k in splits if k > 0), reverse=True)
    for kv in OFFLOADED if heads else ():
        tried = (with_kv_left(spec, at(k, kv), budget) for k in heads)
        yield next((placement for placement in tried if placement is not None), at(heads[0], kv))


def with_kv_left(spec: ModelSpec, placement: Placement, budget: Budget) -> Placement | None:
    """The placement, with what VRAM it leaves as the budget of `tiered`; None where it does not fit."""
    if budget.vram_bytes is None:
        return placement
    if placement.kv == "tiered":
        placement = replace(placement, kv_budget=0)
    left = budget.vram_bytes - needed_vram(ledger_of(spec, placement))
    if left < 0:
        return None
    return replace(placement, kv_budget=left * 99 // 100) if placement.kv == "tiered" else placement


def tunable(
    spec: ModelSpec, base: Placement, budget: Budget, *, n_batch: int | None = None, threads: Sequence[int]
) -> list[Placement]:
    """Every placement that fits, that this version can run, and that may pay: all splits with K and V beside the
    weights; K and V elsewhere only with more layers than that, for with as many it can only be slower."""
    found: list[Placement] = []
    for n_threads in threads:

        def at(k: int, kv: KVStrategy, n_threads: int = n_threads) -> Placement:
            chosen = with_batch(replace(base, n_gpu_layers=k, kv=kv), spec, n_batch)
            return with_threads(chosen, spec, n_threads)

        def fits(placement: Placement) -> bool:
            return kv_refusal(spec, placement) is None and budget.shortfall(ledger_of(spec, placement)) is None

        splits = find_splits(spec).allowed
        beside = [k for k in splits if fits(at(k, "device"))]
        found += [at(k, "device") for k in beside]
        for kv in OFFLOADED:
            if kv in KV_AVAILABLE:
                more = (with_kv_left(spec, at(k, kv), budget) for k in splits if k > max(beside, default=0))
                found += [placement for placement in more if placement is not None and fits(placement)]
    return found


def _longest(model: CostModel, placement: Placement, budget: Budget, tpot_s: float) -> int:
    """0 where not even the first token is quick enough, or nothing fits."""
    quick = longest_context(model, placement, tpot_s, max(placement.n_ctx, model.spec.n_ctx_train))

    def fits(n_ctx: int) -> bool:
        return budget.shortfall(ledger_of(model.spec, replace(placement, n_ctx=n_ctx))) is None

    if quick < 1 or fits(quick):
        return max(0, quick)
    low, high = 0, quick
    while high - low > max(1, low // 64):  # to 2 %: each step is a whole ledger
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
