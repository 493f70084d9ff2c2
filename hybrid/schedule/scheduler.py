"""Scheduler: turns what the user asked for into a Placement, and says in one line why."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid.errors import BadRequestError, HostMemoryError, UnsupportedError
from hybrid.model.spec import ModelSpec
from hybrid.model.splits import find_splits
from hybrid.schedule import facts
from hybrid.schedule.budget import VRAM_RESERVE, Budget, mib, ram_budget
from hybrid.schedule.kv_checks import kv_refusal
from hybrid.schedule.kv_size import kv_bytes
from hybrid.schedule.ledger import CUDA_CONTEXT_BYTES, ledger_of
from hybrid.schedule.limits import available_ram, usable_cores
from hybrid.schedule.own_offload import asked_layers, auto_layers, checked_engine, own_candidates
from hybrid.schedule.placement import KV_DTYPES, KV_STRATEGIES, KVDtype, KVStrategy, Placement
from hybrid.schedule.sentences import EMULATED, longer_than_trained
from hybrid.schedule.sequences import with_sequences

if TYPE_CHECKING:
    from hybrid.schedule.estimate import Estimate
    from hybrid.schedule.profile import Profile

DEFAULT_N_CTX = 4096
"""The context without -c, where the model was trained for it and memory allows it."""
DEFAULT_N_BATCH = 512
SPLIT_N_BATCH = 128
"""The chunk where both halves work: the smaller it is, the sooner the tail starts, until overhead eats the gain
(`scripts/bench_split.py` sweeps it; 64 and 128 are equally fast there, 512 is a tenth to a sixth slower)."""
KV_AVAILABLE: tuple[KVStrategy, ...] = KV_STRATEGIES
"""The strategies that the head has."""
MAX_N_THREADS = 512
"""GGML_MAX_N_THREADS in llama.cpp's ggml.h."""
CONTEXT_SHARE = 0.25
"""The share of available memory that a context nobody asked for may take."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a person asked for; None means "you choose"."""

    n_gpu_layers: int | str = "auto"
    device: str | None = None
    n_ctx: int | None = None
    n_batch: int | None = None
    n_ubatch: int | None = None
    n_threads: int | None = None
    n_sequences: int | str = 1
    """Sequences at a time; "auto": as many as fit beside the context and the layers chosen for one."""
    most_sequences: int = 8
    """For "auto"."""
    n_draft: int = 0
    kv: str = "device"
    kv_dtype: str = "f16"
    kv_budget: int | None = None
    """Device bytes that `tiered` may use for K and V; None: the VRAM that is left."""
    kv_keep_sliding: bool = True
    engine: str = "auto"
    """Whose GPU layers `n_gpu_layers` are: "hybrid" (ours), "llama.cpp" (its own), or "auto"."""
    offload_kqv: bool = True
    """With llama.cpp's own GPU layers: whether their KV cache is there too."""
    vram_reserve: int = VRAM_RESERVE
    """Bytes of the free VRAM that `auto` leaves to the desktop."""


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
    kv, kv_dtype = _checked_kv(request)
    n_sequences = _positive("n_sequences", request.n_sequences)
    cores = usable_cores()
    if request.n_threads is not None:
        cores = _positive("n_threads", request.n_threads, MAX_N_THREADS)
    engine = checked_engine(request.engine)
    own = asked_layers(request.n_gpu_layers, spec) if engine == "llama.cpp" else 0
    layers = 0 if engine == "llama.cpp" else _wanted_layers(request.n_gpu_layers, spec)
    device = _device(request, layers)
    base = Placement(
        device=device or "cpu",
        n_gpu_layers=layers or 0,
        n_ctx=1,
        n_sequences=n_sequences,
        n_draft=_natural("n_draft", request.n_draft),
        kv=kv,
        kv_dtype=kv_dtype,
        kv_budget=_kv_budget(request),
        kv_keep_sliding=bool(request.kv_keep_sliding),
    )
    n_ctx = _context(spec, base, request.n_ctx, notes)
    base = replace(base, n_ctx=n_ctx)
    if layers is None and engine == "auto":
        own, why = auto_layers(spec, base, request.vram_reserve)
        notes += [why] * bool(why)
    base = replace(base, llama_gpu_layers=own, offload_kqv=own > 0 and request.offload_kqv)
    if layers is None and own == 0:
        found = _auto_placement(spec, base, device, request, cores, profile, notes)
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
        vram = _vram(p.device)[0] - request.vram_reserve
    placement, note = with_sequences(spec, p, request.most_sequences, Budget(vram_bytes=vram, ram_bytes=ram_budget()))
    return Plan(placement, (*one.notes, note))


def with_batch(base: Placement, spec: ModelSpec, n_batch: int | None, n_ubatch: int | None = None) -> Placement:
    """The placement with the chunk sizes asked for, or the defaults for its k; never more than the context."""
    default = SPLIT_N_BATCH if 0 < base.n_gpu_layers < spec.n_layers else DEFAULT_N_BATCH
    n_batch = min(_positive("n_batch", n_batch or default), base.n_ctx)
    n_ubatch = min(_positive("n_ubatch", n_ubatch or n_batch), n_batch)
    return replace(base, n_batch=n_batch, n_ubatch=n_ubatch)


def _positive(name: str, value: object, most: int = 2**31 - 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise BadRequestError(f"{name} must be a whole number between 1 and {most}, not {value!r}.")
    return value


def _natural(name: str, value: object) -> int:
    return 0 if value == 0 and not isinstance(value, bool) else _positive(name, value)


def _checked_kv(request: Request) -> tuple[KVStrategy, KVDtype]:
    for strategy in KV_STRATEGIES:
        if strategy == request.kv:
            break
    else:
        raise BadRequestError(f"kv must be one of {', '.join(KV_STRATEGIES)}, not {request.kv!r}.")
    for dtype in KV_DTYPES:
        if dtype == request.kv_dtype:
            break
    else:
        raise BadRequestError(f"kv_dtype must be one of {', '.join(KV_DTYPES)}, not {request.kv_dtype!r}.")
    if strategy not in KV_AVAILABLE:
        raise UnsupportedError(f"The KV strategy {strategy!r} is not in this version; use --kv {KV_AVAILABLE[0]}.")
    return strategy, dtype


def _kv_budget(request: Request) -> int | None:
    budget = request.kv_budget
    if budget is None:
        return None
    if request.kv != "tiered":
        raise BadRequestError("kv_budget is what the device may hold of a tiered KV cache; use it with --kv tiered.")
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 0:
        raise BadRequestError(f"kv_budget must be a whole number of bytes, 0 or more, not {budget!r}.")
    return budget


def with_kv_budget(placement: Placement, spec: ModelSpec, request: Request, notes: list[str]) -> Placement:
    """The placement with the budget of `tiered`: what was asked for, or the VRAM that the rest leaves."""
    if placement.kv != "tiered" or placement.kv_budget is not None or placement.n_gpu_layers == 0:
        return placement
    if placement.device == "cpu":
        notes.append("Without --kv-budget an emulated device holds the whole KV cache: tiered is device then.")
        return placement
    free = _vram(placement.device)[0] - request.vram_reserve
    left = max(0, free - ledger_of(spec, replace(placement, kv_budget=0)).vram_bytes)
    whole = ledger_of(spec, placement)
    if whole.vram_bytes <= free:
        notes.append(f"The whole KV cache fits the {mib(free)} of VRAM that may be used.")
        return placement
    notes.append(f"{mib(left)} of VRAM for the most recent part of the KV cache; the rest is in host memory.")
    return replace(placement, kv_budget=left)


def _wanted_layers(asked: int | str, spec: ModelSpec) -> int | None:
    """The k asked for, clamped to L; None for auto. Raises where the architecture cannot be split there."""
    if isinstance(asked, str):
        word = asked.strip().lower()
        if word == "auto":
            return None
        if word == "all":
            asked = -1
        elif re.fullmatch("-?[0-9]+", word):
            asked = int(word)
        else:
            raise BadRequestError(f"n_gpu_layers must be a number, 'all' or 'auto', not {asked!r}.")
    if asked == -1:  # llama-cpp-python's "all"
        asked = spec.n_layers
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 0:
        raise BadRequestError(f"n_gpu_layers must be 0 or more, 'all' or 'auto', not {asked!r}.")
    k = min(asked, spec.n_layers)
    if refusal := find_splits(spec).refusal(k):
        raise UnsupportedError(f"This model cannot run with {k} layers on the GPU: {refusal}.")
    return k


def _gpu() -> str | None:
    """The default accelerator, without importing torch where there is plainly none (the import costs over a second)."""
    nvidia = any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))
    apple = sys.platform == "darwin"
    if not nvidia and not apple:
        return None
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if apple and torch.backends.mps.is_available() else None


def default_device() -> str | None:
    """The accelerator that is used where none was named; None where PyTorch can use none."""
    return _gpu()


def vram_limit(device: str, asked: int | None, reserve: int) -> int | None:
    """Bytes of a device that may be taken now: those asked for, or what is free, less the reserve. None: an emulated
    device without a budget. Raises UnsupportedError where there is no such device."""
    if asked is not None or device == "cpu":
        return asked
    return max(0, _vram(device)[0] - reserve)


def _device(request: Request, layers: int | None) -> str | None:
    """The head's device; None where there is no GPU and none is needed."""
    if request.device is not None and not isinstance(request.device, str):
        raise BadRequestError(f"device must be a PyTorch device's name such as cuda or cpu, not {request.device!r}.")
    if request.device is not None or layers == 0:
        return request.device
    device = _gpu()
    if device is None and layers:
        raise UnsupportedError(
            "There is no GPU here that PyTorch can use; use -ngl 0, or --device cpu to emulate one on the CPU."
        )
    return device


def _context(spec: ModelSpec, base: Placement, asked: int | None, notes: list[str]) -> int:
    if asked is not None and asked != 0:  # llama.cpp's 0 means "as trained"
        n_ctx = _positive("n_ctx", asked)
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


def _auto_placement(
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
        free, total = _vram(device)
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


def _vram(device: str) -> tuple[int, int]:
    """Free and total bytes of the head's device: from the driver, which knows it before a CUDA context takes its share;
    from torch where there is no such driver; the RAM where the GPU shares it."""
    index = device.partition(":")[2] or "0"
    for gpu in facts.gpus():
        if gpu.device == f"cuda:{index}" and device.startswith("cuda"):
            return gpu.free_bytes, gpu.total_bytes
    if device.startswith("cuda"):
        import torch

        try:
            free, total = torch.cuda.mem_get_info(device)
        except (AssertionError, RuntimeError, ValueError) as e:  # no CUDA in this PyTorch, no such GPU, no such name
            why = (str(e).strip().splitlines() or [type(e).__name__])[0].rstrip(".")
            raise UnsupportedError(
                f"The device {device!r} is not available ({why}); use -ngl 0, or --device cpu to emulate it."
            ) from e
        return int(free) + CUDA_CONTEXT_BYTES, int(total)  # asking made the context, which the Ledger counts
    return available_ram(), available_ram()


def with_threads(base: Placement, spec: ModelSpec, cores: int) -> Placement:
    """The placement with `cores` shared out: the pools that work at the same time never exceed the cores together."""
    k = base.n_gpu_layers
    if k == 0:
        head, beside = 1, cores
    elif k == spec.n_layers:
        head, beside = (cores if base.device == "cpu" else 1), cores
    else:
        head = max(1, cores // 2) if base.device == "cpu" else 1
        beside = max(1, cores - head)
    attend = cores
    if base.kv == "tiered":  # the only strategy that attends on both sides at once; an emulated one has cores for it
        attend = max(1, cores // 2 if base.device == "cpu" else cores - head)
    return replace(
        base, n_threads_head=head, n_threads_tail=cores, n_threads_tail_batch=beside, n_threads_attend=attend
    )


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
