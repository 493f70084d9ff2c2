"""One layer fewer: the plan after one that did not fit, though the Ledger said that it would."""

from __future__ import annotations

from dataclasses import replace

from hybrid.model.spec import ModelSpec
from hybrid.model.splits import find_splits
from hybrid.schedule.limits import usable_cores
from hybrid.schedule.scheduler import Plan, Request, check_memory
from hybrid.schedule.shares import with_batch, with_threads


def one_layer_fewer(spec: ModelSpec, chosen: Plan, request: Request) -> Plan | None:
    """The plan with the next smaller k that the model allows; None where there is none.

    All else stays as chosen. The free VRAM is not asked again: what failed may hold some of it still, and what a layer
    leaves must not go to the KV cache or to more sequences, or the next try would fail like this one. Raises
    OutOfMemoryError where the RAM does not suffice for what moves there.
    """
    fewer = [k for k in find_splits(spec).allowed if k < chosen.placement.n_gpu_layers]
    if not fewer:
        return None
    smaller = replace(chosen.placement, n_gpu_layers=max(fewer))
    smaller = with_batch(smaller, spec, request.n_batch, request.n_ubatch)
    notes: list[str] = []
    placement = with_threads(smaller, spec, request.n_threads or usable_cores())
    check_memory(spec, placement, notes)
    return Plan(placement, tuple(notes))
