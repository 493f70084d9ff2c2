"""Scheduler: turns what the user asked for into a Placement, and says in one line why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hybrid.errors import BadRequestError, HostMemoryError, UnsupportedError
from hybrid.model.spec import ModelSpec
from hybrid.schedule.auto import auto_placement
from hybrid.schedule.budget import Budget, mib, ram_budget
from hybrid.schedule.devices import default_device, vram_of
from hybrid.schedule.kv_checks import kv_refusal
from hybrid.schedule.kv_size import kv_bytes
from hybrid.schedule.ledger import ledger_of
from hybrid.schedule.limits import available_ram, usable_cores
from hybrid.schedule.own_offload import asked_layers, auto_layers, checked_engine
from hybrid.schedule.placement import Placement
from hybrid.schedule.request import (
    MAX_N_THREADS,
    Request,
    checked_kv,
    checked_kv_budget,
    natural,
    positive,
    wanted_layers,
)
from hybrid.schedule.sentences import EMULATED, longer_than_trained
from hybrid.schedule.sequences import with_sequences
from hybrid.schedule.shares import with_batch, with_threads

if TYPE_CHECKING:
    from hybrid.schedule.profile import Profile

__all__ = ["DEFAULT_N_CTX", "Plan", "Request", "check_memory", "plan", "with_kv_budget"]

DEFAULT_N_CTX = 4096
"""The context without -c, where the model was trained for it and memory allows it."""
CONTEXT_SHARE = 0.25
"""The share of available memory that a context nobody asked for may take."""


@dataclass(frozen=True)
class Plan:
    """A placement and the one-line facts the user should know about it."""

    placement: Placement
    notes: tuple[str, ...]


def plan(spec: ModelSpec, request: Request, profile: Profile | None = None) -> Plan:
    """Choose a placement; `auto` goes by the speeds in `profile` where it has some.

    Raises BadRequestError for a senseless request, UnsupportedError where this machine or version cannot serve it
    (GPU layers without a GPU, a k the architecture forbids), OutOfMemoryError where it cannot fit.
    """
    if request.n_sequences == "auto":
        return _as_many_as_fit(spec, request)
    notes: list[str] = []
    kv, kv_dtype = checked_kv(request)
    n_sequences = positive("n_sequences", request.n_sequences)
    cores = usable_cores()
    if request.n_threads is not None:
        cores = positive("n_threads", request.n_threads, MAX_N_THREADS)
    engine = checked_engine(request.engine)
    own = asked_layers(request.n_gpu_layers, spec) if engine == "llama.cpp" else 0
    layers = 0 if engine == "llama.cpp" else wanted_layers(request.n_gpu_layers, spec)
    device = _device(request, layers)
    base = Placement(
        device=device or "cpu",
        n_gpu_layers=layers or 0,
        n_ctx=1,
        n_sequences=n_sequences,
        n_draft=natural("n_draft", request.n_draft),
        kv=kv,
        kv_dtype=kv_dtype,
        kv_budget=checked_kv_budget(request),
        kv_keep_sliding=bool(request.kv_keep_sliding),
    )
    n_ctx = _context(spec, base, request.n_ctx, notes)
    base = replace(base, n_ctx=n_ctx)
    if layers is None and engine == "auto":
        own, why = auto_layers(spec, base, request.vram_reserve)
        notes += [why] * bool(why)
    base = replace(base, llama_gpu_layers=own, offload_kqv=own > 0 and request.offload_kqv)
    if layers is None and own == 0:
        found = auto_placement(spec, base, device, request, cores, profile, notes)
        base = replace(base, llama_gpu_layers=found.llama_gpu_layers, offload_kqv=found.offload_kqv)
        layers, own = found.n_gpu_layers, found.llama_gpu_layers
    layers = layers or 0
    base = with_batch(replace(base, n_gpu_layers=layers), spec, request.n_batch, request.n_ubatch)
    if layers and base.device == "cpu":
        notes.append(EMULATED)
    if layers == own == 0 and kv != "device":
        notes.append(f"Without layers on the GPU --kv {kv} changes nothing: llama.cpp has the whole KV cache in RAM.")
    placement = with_kv_budget(with_threads(base, spec, cores), spec, request, notes)
    if refusal := kv_refusal(spec, placement):
        raise UnsupportedError(refusal)
    check_memory(spec, placement, notes)
    return Plan(placement, tuple(notes))


def _as_many_as_fit(spec: ModelSpec, request: Request) -> Plan:
    """The plan for one sequence, and beside it whatever fits."""
    one = plan(spec, replace(request, n_sequences=1))
    p = one.placement
    vram = None
    if p.n_gpu_layers and p.device != "cpu":
        vram = vram_of(p.device)[0] - request.vram_reserve
    placement, note = with_sequences(spec, p, request.most_sequences, Budget(vram_bytes=vram, ram_bytes=ram_budget()))
    return Plan(placement, (*one.notes, note))


def with_kv_budget(placement: Placement, spec: ModelSpec, request: Request, notes: list[str]) -> Placement:
    """The placement with the budget of `tiered`: what was asked for, or the VRAM that the rest leaves."""
    if placement.kv != "tiered" or placement.kv_budget is not None or placement.n_gpu_layers == 0:
        return placement
    if placement.device == "cpu":
        notes.append("Without --kv-budget an emulated device holds the whole KV cache: tiered is device then.")
        return placement
    free = vram_of(placement.device)[0] - request.vram_reserve
    left = max(0, free - ledger_of(spec, replace(placement, kv_budget=0)).vram_bytes)
    whole = ledger_of(spec, placement)
    if whole.vram_bytes <= free:
        notes.append(f"The whole KV cache fits the {mib(free)} of VRAM that may be used.")
        return placement
    notes.append(f"{mib(left)} of VRAM for the most recent part of the KV cache; the rest is in host memory.")
    return replace(placement, kv_budget=left)


def _device(request: Request, layers: int | None) -> str | None:
    """The head's device; None where there is no GPU and none is needed."""
    if request.device is not None and not isinstance(request.device, str):
        raise BadRequestError(f"device must be a PyTorch device's name such as cuda or cpu, not {request.device!r}.")
    if request.device is not None or layers == 0:
        return request.device
    device = default_device()
    if device is None and layers:
        raise UnsupportedError(
            "There is no GPU here that PyTorch can use; use -ngl 0, or --device cpu to emulate one on the CPU."
        )
    return device


def _context(spec: ModelSpec, base: Placement, asked: int | None, notes: list[str]) -> int:
    if asked is not None and asked != 0:  # llama.cpp's 0 means "as trained"
        n_ctx = positive("n_ctx", asked)
        if n_ctx > spec.n_ctx_train:
            notes.append(longer_than_trained(n_ctx, spec))
        return n_ctx
    if asked == 0:
        return spec.n_ctx_train
    n_ctx = min(DEFAULT_N_CTX, spec.n_ctx_train)
    budget = int(available_ram() * CONTEXT_SHARE)
    while n_ctx > 256 and kv_bytes(spec, replace(base, n_ctx=n_ctx)) > budget:
        n_ctx //= 2
    notes.append(f"Context: {n_ctx} tokens of the {spec.n_ctx_train} the model was trained for (change it with -c).")
    return n_ctx


def check_memory(spec: ModelSpec, placement: Placement, notes: list[str]) -> None:
    """Both memories count; but a file that llama.cpp merely maps may be larger than the RAM, which is only slow."""
    ledger, allowed = ledger_of(spec, placement), ram_budget()
    need = ledger.ram_bytes - ledger.mapped_bytes
    if need > allowed:
        raise HostMemoryError(
            f"This needs {mib(need)} of RAM, but only {mib(allowed)} may be used (a margin is left to the system); "
            "use a shorter context (-c) or fewer layers."
        )
    if ledger.ram_bytes > allowed:
        notes.append(
            f"The model does not fit the {mib(allowed)} of RAM that may be used: parts of its file will be read from "
            "the disk at every token, which is slow."
        )
