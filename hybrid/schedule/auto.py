"""What `-ngl auto` chooses: the quickest that was measured and fits now, or as many layers as the Ledger says fit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hybrid.model.spec import ModelSpec
from hybrid.model.splits import find_splits
from hybrid.schedule import facts
from hybrid.schedule.budget import Budget, mib, ram_budget
from hybrid.schedule.devices import vram_of
from hybrid.schedule.ledger import ledger_of
from hybrid.schedule.own_offload import own_candidates
from hybrid.schedule.placement import Placement
from hybrid.schedule.request import Request
from hybrid.schedule.shares import with_batch, with_threads

if TYPE_CHECKING:
    from hybrid.schedule.estimate import Estimate
    from hybrid.schedule.profile import Profile


def auto_placement(
    spec: ModelSpec,
    base: Placement,
    device: str | None,
    request: Request,
    cores: int,
    profile: Profile | None,
    notes: list[str],
) -> Placement:
    """What was measured to be quickest, of what fits both memories now, or else as many layers as the Ledger says fit;
    and one line why. Only its layers, and whose they are, are chosen here."""
    if base.kv == "tiered" and base.kv_budget is None:
        base = replace(base, kv_budget=0)  # layers first; what they leave is the cache's
    free = total = None
    if device not in (None, "cpu"):
        free, total = vram_of(device)
    budget = Budget(vram_bytes=None if free is None else free - request.vram_reserve, ram_bytes=ram_budget())
    records = () if profile is None else profile.records
    splits = sorted(find_splits(spec).allowed, reverse=True)
    if device is None or (device == "cpu" and not records):
        splits = [0]
    fitting: list[Placement] = []
    for k in splits:
        placement = _at(spec, base, k, request, cores)
        if k == 0 or budget.shortfall(ledger_of(spec, placement)) is None:
            fitting.append(placement)
            if not records:
                break
    chosen, measured = fitting[-1] if device == "cpu" else fitting[0], ""
    if profile is not None and records:
        if request.engine == "auto" and request.device is None and base.kv == "device":
            fitting += _measured_own(spec, _at(spec, base, 0, request, cores), request, profile)
        chosen, measured = _by_measurement(spec, fitting, chosen, profile)
    notes.append(_why(spec, chosen, device, request.vram_reserve, free, total, measured))
    return chosen


def _at(spec: ModelSpec, base: Placement, k: int, request: Request, cores: int) -> Placement:
    """The placement with k layers in the head, and the chunks and threads that go with them."""
    return with_threads(with_batch(replace(base, n_gpu_layers=k), spec, request.n_batch, request.n_ubatch), spec, cores)


def _measured_own(spec: ModelSpec, alone: Placement, request: Request, profile: Profile) -> list[Placement]:
    """What llama.cpp may keep on its own GPU now, where that was ever measured."""
    gpus = facts.gpus()
    if not gpus or not any(record.placement.llama_gpu_layers for record in profile.records):
        return []
    budget = Budget(vram_bytes=max(0, gpus[0].free_bytes - request.vram_reserve), ram_bytes=ram_budget())
    return [p for p in own_candidates(spec, alone, budget) if request.offload_kqv or not p.offload_kqv]


def _why(
    spec: ModelSpec,
    chosen: Placement,
    device: str | None,
    reserve: int,
    free: int | None,
    total: int | None,
    measured: str,
) -> str:
    """One line on what `auto` chose."""
    if chosen.llama_gpu_layers:
        n = min(chosen.llama_gpu_layers, spec.n_layers)
        return f"{n} of {spec.n_layers} layers on llama.cpp's own GPU (--engine llama.cpp): {measured}."
    if device is None:
        return "No GPU that PyTorch can use: all layers run on the CPU in llama.cpp."
    k = chosen.n_gpu_layers
    if free is None or total is None:
        why = measured or "an emulated GPU is never faster than llama.cpp (-ngl sets another k)"
        return f"{k} of {spec.n_layers} layers on the emulated GPU: {why}."
    used, kept = ledger_of(spec, chosen).vram_bytes, f"{mib(reserve)} of it kept for the desktop"
    why = f"; {measured}" if measured else ""
    return (
        f"{k} of {spec.n_layers} layers on {device}: {used / 2**30:.1f} of {free / 2**30:.1f} GiB free ({kept}, "
        f"{total / 2**30:.1f} GiB in all){why}."
    )


def _by_measurement(
    spec: ModelSpec, fitting: list[Placement], analytic: Placement, profile: Profile
) -> tuple[Placement, str]:
    """The quickest of those that were measured and the analytic choice, and when it was measured (if it was).

    What was not measured has only a prediction, corrected by the others' measurements: it must beat them by more than
    that may be off.
    """
    from hybrid.schedule.estimate import last_measured

    estimate = estimate_of(spec, fitting, profile, depth=analytic.n_ctx // 2)
    belief = estimate.belief
    pool = [i for i, p in enumerate(fitting) if belief.counts[i] or p is analytic]
    best = min(pool, key=lambda i: belief.mean[i] + belief.sd[i])
    return fitting[best], last_measured(estimate.records_of(best))


def estimate_of(spec: ModelSpec, placements: list[Placement], profile: Profile, depth: int) -> Estimate:
    """What is believed of placements that differ in their layers, by the profile's records and this machine's rates."""
    from hybrid.schedule.cost import CostModel
    from hybrid.schedule.cost_prior import assumed_rates
    from hybrid.schedule.estimate import Estimate
    from hybrid.schedule.machine_store import this_machine, unmeasured_machine

    machine = this_machine() or unmeasured_machine()
    kind = placements[0].device.partition(":")[0]
    rates = profile.rates.get(kind) or assumed_rates(machine, placements[0].device)
    return Estimate(CostModel(spec, machine, rates), placements, profile.records, depth)
