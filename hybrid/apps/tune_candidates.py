"""What a tuning tries: the device, the depth, and every placement that fits and may pay."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid.apps.conditions import WARMUP
from hybrid.errors import BadRequestError
from hybrid.model.spec import ModelSpec
from hybrid.report.tuning import TuneRequest
from hybrid.schedule import facts, own_offload
from hybrid.schedule.budget import Budget, mib
from hybrid.schedule.candidates import smallest_vram, tunable
from hybrid.schedule.devices import default_device
from hybrid.schedule.ledger import ledger_of
from hybrid.schedule.limits import usable_cores
from hybrid.schedule.placement import Placement
from hybrid.schedule.request import MAX_N_THREADS
from hybrid.schedule.sentences import EMULATED, longer_than_trained
from hybrid.schedule.shares import with_batch, with_threads

REPEATS = 3
"""Stretches of decoding that are timed in one run."""


def chosen_device(request: TuneRequest) -> str:
    """The head's device; where PyTorch has none, the GPU that llama.cpp may have."""
    own_offload.checked_engine(request.engine)
    if request.device is not None:
        if request.engine == "llama.cpp":
            raise BadRequestError("--device is the head's; with --engine llama.cpp there is none.")
        return request.device
    if (device := default_device()) is not None:
        return device
    gpus = facts.gpus()
    if gpus and request.engine != "hybrid" and own_offload.supports_offload():
        return gpus[0].device
    return "cpu"


def chosen_depth(request: TuneRequest) -> int:
    """Tokens in the context, such that what is decoded still fits."""
    if request.n_ctx < 16:
        raise BadRequestError("Tuning needs a context of 16 tokens or more.")
    if request.depth is not None and not 0 < request.depth < request.n_ctx:
        raise BadRequestError(f"The depth must be between 1 and the context, {request.n_ctx}, not {request.depth}.")
    most = request.n_ctx - 2 if request.objective == "ttft" else request.n_ctx - 1 - WARMUP - REPEATS * 2
    wanted = request.depth if request.depth is not None else request.n_ctx // 2
    return max(1, min(wanted, most))


def chosen_placements(
    spec: ModelSpec, request: TuneRequest, device: str, budget: Budget
) -> tuple[list[Placement], list[str]]:
    """All that may be measured, llama.cpp alone among them; and what there is to say about that."""
    base = Placement(
        device=device,
        n_gpu_layers=0,
        n_ctx=request.n_ctx,
        n_sequences=request.n_sequences,
        kv_dtype=request.kv_dtype,
    )
    notes = [longer_than_trained(request.n_ctx, spec)] if request.n_ctx > spec.n_ctx_train > 0 else []
    threads = _threads(request.threads)
    found = tunable(spec, base, budget, n_batch=request.n_batch, threads=threads)
    own = _own(spec, request, base, budget, threads)
    if request.engine == "llama.cpp" or (request.device is None and default_device() is None):
        found = [p for p in found if p.n_gpu_layers == 0]
        if not own:
            notes.append("No GPU that PyTorch can use: only -ngl 0 is tried (--device cpu emulates a GPU).")
    elif not any(p.n_gpu_layers for p in found) and budget.vram_bytes is not None:
        least = smallest_vram(spec, base, request.n_batch)
        why = f"the smallest budget is {mib(least)}" if least else "this model cannot be split"
        notes.append(f"{mib(budget.vram_bytes)} of VRAM hold not even one layer with its context: {why}.")
    if not found:
        shortfall = budget.shortfall(ledger_of(spec, base))
        raise BadRequestError(f"Nothing fits this machine: {shortfall}; use a shorter context (-c).")
    if any(p.n_gpu_layers for p in found) and device == "cpu":
        notes.append(EMULATED)
    return found + own, notes


def _own(
    spec: ModelSpec, request: TuneRequest, base: Placement, budget: Budget, threads: Sequence[int]
) -> list[Placement]:
    """llama.cpp's own offload, where it has a GPU and nobody asked for an emulated one or for ours alone."""
    if request.engine == "llama.cpp":
        own_offload.asked_layers("all", spec)  # raises where it has none
    if request.engine == "hybrid" or base.device == "cpu":
        return []
    found: list[Placement] = []
    for n in threads:
        alone = with_threads(with_batch(base, spec, request.n_batch), spec, n)
        found += own_offload.own_candidates(spec, alone, budget)
    return found


def _threads(asked: int | str | None) -> Sequence[int]:
    cores = usable_cores()
    if asked is None:
        return [cores]
    if asked == "auto":
        return sorted({cores, max(1, cores - 1), max(1, cores // 2)}, reverse=True)
    if not isinstance(asked, int) or not 0 < asked <= MAX_N_THREADS:
        raise BadRequestError(f"threads must be a number between 1 and {MAX_N_THREADS}, or 'auto', not {asked!r}.")
    return [asked]
