"""Planning: which placements of a model fit a machine, what each would cost, and what to do where none is good."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hybrid.apps.commands import flags
from hybrid.errors import BadRequestError
from hybrid.model.records import TensorInfo
from hybrid.model.spec import ModelSpec
from hybrid.model.splits import find_splits
from hybrid.schedule.budget import VRAM_RESERVE, Budget, mib, ram_budget, ram_margin
from hybrid.schedule.candidates import Candidate, best, candidates, smallest_vram
from hybrid.schedule.cost import CostModel
from hybrid.schedule.cost_prior import assumed_rates
from hybrid.schedule.cost_runs import corrected
from hybrid.schedule.devices import known_device
from hybrid.schedule.machine import Machine
from hybrid.schedule.placement import KVDtype, Placement
from hybrid.schedule.profile import Profile
from hybrid.schedule.sentences import EMULATED, longer_than_trained

SMALLER_BITS = 4.5
"""Bits a weight of a common small quantisation (Q4_K_S)."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a person wants to know."""

    n_ctx: int
    """Tokens per sequence."""
    n_sequences: int = 1
    n_batch: int | None = None
    """Tokens in a prefill chunk; None: each split's default."""
    kv_dtype: KVDtype = "f16"
    device: str | None = None
    """The head's; None: the machine's GPU, or an emulated one where it has none."""
    vram_bytes: int | None = None
    """What the head may take, all told; None: what is free, less the reserve."""
    vram_reserve: int = VRAM_RESERVE
    tpot_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The answer."""

    request: PlanRequest
    machine: Machine
    budget: Budget
    candidates: tuple[Candidate, ...]
    best: Candidate | None
    flags: str
    """Options that give the best; empty where nothing can run."""
    uncertainty: float
    """Of predicted seconds, relative."""
    notes: tuple[str, ...]
    advice: tuple[str, ...]
    """What would help, where nothing fits or nothing is as quick as was asked."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "machine": self.machine.name,
            "assumed": self.machine.assumed,
            "emulated": self.machine.emulated,
            "n_ctx": self.request.n_ctx,
            "n_sequences": self.request.n_sequences,
            "vram_budget_bytes": self.budget.vram_bytes,
            "ram_budget_bytes": self.budget.ram_bytes,
            "tpot_target_s": self.request.tpot_s,
            "uncertainty": self.uncertainty,
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "best": None if self.best is None else self.candidates.index(self.best),
            "flags": self.flags,
            "notes": list(self.notes),
            "advice": list(self.advice),
        }


def make_plan(spec: ModelSpec, machine: Machine, request: PlanRequest, profile: Profile | None = None) -> PlanReport:
    """Judge every candidate; with the rates fitted for the head's device in `profile` where there are some, or what the
    machine's figures suggest, corrected by the runs remembered there. Raises BadRequestError for a senseless request.
    """
    if request.n_ctx < 1 or request.n_sequences < 1:
        raise BadRequestError("A plan needs a context and a number of sequences of 1 or more.")
    device = known_device(request.device or (machine.gpu.device if machine.gpu else "cpu"))
    base = _base(device, request)
    budget = _budget(machine, device, request)
    profile = profile or Profile()
    rates = profile.rates.get(device.partition(":")[0]) or assumed_rates(machine, device)
    model, runs = corrected(CostModel(spec, machine, rates), device, profile.records)
    found = candidates(model, base, budget, n_batch=request.n_batch, tpot_s=request.tpot_s)
    winner = best(found)
    return PlanReport(
        request=request,
        machine=machine,
        budget=budget,
        candidates=tuple(found),
        best=winner,
        flags=" ".join(flags(winner.placement, spec, machine.cpu.cores)) if winner else "",
        uncertainty=model.rates.uncertainty,
        notes=(*profile.notes, *_notes(model, runs, base, budget, request)),
        advice=tuple(_advice(model, base, budget, request, winner)),
    )


def meets(candidate: Candidate, tpot_s: float) -> bool:
    """Whether tokens are quick enough at full context."""
    return candidate.tpot_s[candidate.placement.n_ctx] <= tpot_s


def _base(device: str, request: PlanRequest) -> Placement:
    return Placement(
        device=device,
        n_gpu_layers=0,
        n_ctx=request.n_ctx,
        n_sequences=request.n_sequences,
        kv_dtype=request.kv_dtype,
    )


def _budget(machine: Machine, device: str, request: PlanRequest) -> Budget:
    ram = ram_budget()
    if machine.assumed:
        ram = max(0, machine.memory.available_bytes - ram_margin(machine.memory.total_bytes))
    vram = request.vram_bytes
    if vram is None and device != "cpu":
        free = machine.gpu.free_bytes if machine.gpu else 0
        vram = max(0, free - request.vram_reserve)
    return Budget(vram_bytes=vram, ram_bytes=ram)


def _notes(model: CostModel, runs: int, base: Placement, budget: Budget, request: PlanRequest) -> Iterator[str]:
    if model.rates.measured:
        yield "Speeds rest on measurements of this model here (hybrid tune)."
    else:
        yield from model.machine.notes
    if runs:
        yield f"Speeds are corrected by {runs} run{'s' * (runs > 1)} of this model here."
    if base.device == "cpu" and model.machine.gpu is not None:
        yield EMULATED
    if request.n_ctx > model.spec.n_ctx_train > 0:
        yield longer_than_trained(request.n_ctx, model.spec)
    for refused in find_splits(model.spec).refused:
        yield f"-ngl {refused.first} to {refused.last} cannot be: {refused.reason}."
    least = smallest_vram(model.spec, base, request.n_batch)
    if budget.vram_bytes is not None and least > budget.vram_bytes:
        yield (
            f"{mib(budget.vram_bytes)} of VRAM hold not even one layer with its context: the smallest budget is "
            f"{mib(least)}."
        )


# -- advice ------------------------------------------------------------------------------------------------------------


def _advice(
    model: CostModel, base: Placement, budget: Budget, request: PlanRequest, winner: Candidate | None
) -> Iterator[str]:
    """What would help, tried out one by one; nothing where all is well."""
    target = request.tpot_s
    if winner is not None and (target is None or meets(winner, target)):
        return
    if winner is None:
        yield "Nothing fits."
    else:
        quickest = _ms(winner.tpot_s[request.n_ctx])
        yield f"Nothing takes {_ms(target or 0)} a token or less at full context: the quickest takes {quickest}."
    tried = list(_tried(model, base, budget, request))
    good = [(what, reached) for what, reached in tried if target is None or reached <= target]
    shorter = _shorter(model, base, budget, request)
    fewer = _fewer(model, base, budget, request)
    for what, reached in good:
        yield f"With {what} it would be {_ms(reached)} a token."
    if shorter:
        yield f"A context of {shorter} tokens would do (-c {shorter})."
    if fewer:
        yield f"{fewer} sequence{'s' * (fewer > 1)} at a time would do (--sequences {fewer})."
    if not good and not shorter and not fewer:
        if tried:
            what, reached = min(tried, key=lambda trial: trial[1])
            yield f"With {what} it would still be {_ms(reached)} a token."
        yield "A smaller model would help; nothing else does enough."
    if request.n_ctx >= LONG:
        yield "For a long document, retrieving the passages a question needs keeps the context short."


LONG = 8192
"""From this context on retrieval is worth mentioning."""


def _tried(model: CostModel, base: Placement, budget: Budget, request: PlanRequest) -> Iterator[tuple[str, float]]:
    """Changes that make the model or its cache smaller, and the seconds a token then takes at full context."""
    smaller, compact = replace(model, spec=_quantised(model.spec)), replace(base, kv_dtype="q8_0")
    quantise = _bits(model.spec) > SMALLER_BITS + 0.5
    trials: list[tuple[str, CostModel, Placement]] = []
    if quantise:
        trials.append((f"a quantisation of {SMALLER_BITS} bits a weight", smaller, base))
    if request.kv_dtype != "q8_0":
        trials.append(("a q8_0 KV cache (--kv-type q8_0)", model, compact))
        if quantise:
            trials.append((f"{SMALLER_BITS} bits a weight and a q8_0 KV cache", smaller, compact))
    for what, changed, placement in trials:
        winner = best(candidates(changed, placement, budget, n_batch=request.n_batch))
        if winner is not None:
            yield what, winner.tpot_s[request.n_ctx]


def _shorter(model: CostModel, base: Placement, budget: Budget, request: PlanRequest) -> int:
    """The longest context (to 3 %) that is enough and not beyond what the model was trained for; 0 if none is."""

    def good(n_ctx: int) -> bool:
        return _enough(model, replace(base, n_ctx=n_ctx), budget, request)

    low, high = 0, request.n_ctx
    if 0 < model.spec.n_ctx_train < request.n_ctx:
        high = model.spec.n_ctx_train
        if good(high):
            return high
    for _ in range(5):
        middle = (low + high) // 2 if low else max(1, high // 4)
        low, high = (middle, high) if good(middle) else (low, middle)
    return low // 64 * 64 if low >= 128 else 0


def _fewer(model: CostModel, base: Placement, budget: Budget, request: PlanRequest) -> int:
    """Sequences at a time that are few enough, halved as often as it takes; 0 if not even one is."""
    n = request.n_sequences // 2
    while n and not _enough(model, replace(base, n_sequences=n), budget, request):
        n //= 2
    return n


def _enough(model: CostModel, base: Placement, budget: Budget, request: PlanRequest) -> bool:
    """Whether something like `base` fits and is quick enough at its full context."""
    winner = best(candidates(model, base, budget, n_batch=request.n_batch))
    return winner is not None and (request.tpot_s is None or meets(winner, request.tpot_s))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"


def _bits(spec: ModelSpec) -> float:
    """Bits a weight of the layers' matrices."""
    tensors = [t for layer in spec.layers for t in layer.weights.values() if len(t.shape) > 1]
    return 8 * sum(t.n_bytes for t in tensors) / max(1, sum(t.n_values for t in tensors))


def _quantised(spec: ModelSpec) -> ModelSpec:
    """The model as if every larger matrix had SMALLER_BITS."""

    def small(tensor: TensorInfo) -> TensorInfo:
        n_bytes = min(tensor.n_bytes, int(tensor.n_values * SMALLER_BITS / 8))
        return tensor if len(tensor.shape) < 2 else replace(tensor, n_bytes=n_bytes, type=Q4_K)

    def all_small(tensors: Any) -> dict[str, TensorInfo]:
        return {name: small(tensor) for name, tensor in tensors.items()}

    layers = tuple(replace(layer, weights=all_small(layer.weights)) for layer in spec.layers)
    return replace(spec, layers=layers, weights=all_small(spec.weights))


Q4_K = 12
