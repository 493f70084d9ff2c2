"""Tuning: measure the few placements that matter, each in a process of its own, and say which is best."""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from hybrid.apps.runner import run_calibration, run_trial
from hybrid.errors import BadRequestError
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.report.trial import Condition, Spread, Trial
from hybrid.report.tuning import Row, TuneReport, TuneRequest
from hybrid.schedule.budget import Budget, mib, ram_budget
from hybrid.schedule.candidates import smallest_vram, tunable
from hybrid.schedule.cost import CostModel
from hybrid.schedule.cost_fit import fit
from hybrid.schedule.cost_prior import assumed_rates
from hybrid.schedule.estimate import Estimate, measured_s, same_speed
from hybrid.schedule.identity import identify
from hybrid.schedule.ledger import ledger_of
from hybrid.schedule.limits import usable_cores
from hybrid.schedule.machine_store import this_machine, unmeasured_machine
from hybrid.schedule.placement import Placement
from hybrid.schedule.profile import ProfileStore, Record, now
from hybrid.schedule.scheduler import default_device, vram_limit
from hybrid.schedule.search import next_option
from hybrid.schedule.sentences import EMULATED, longer_than_trained

__all__ = ["Row", "TuneReport", "TuneRequest", "tune"]

WARMUP, REPEATS = 4, 3
SECONDS_A_REPEAT = 0.4
LEAST_DECODED, MOST_DECODED = 6, 64
"""Tokens of a repeat: about so many seconds' worth."""
PREFILLS = 2
CALIBRATION_DEPTH, CALIBRATION_SHARE = 256, 0.25
"""Tokens, and the most of the time budget that fitting the CostModel may take."""
ROUNDS = 2
"""Of an exhaustive sweep, there and back, so that what drifts does not favour one end."""
START_S = 3.0
"""A process's start and its loading, before one was seen."""
BUSY = 0.75
"""A load average of so many times the cores, before anything was measured, is worth a word."""
SLOWEST = 20
"""A measurement that takes so many times longer than expected is ended."""
PATIENCE = 5
"""Before anything was measured it may take so many times the whole budget: one figure is more than none."""


OnProgress = Callable[[str, float, float], None]
"""Called with what is done now, the seconds spent, and those left at most."""


def tune(
    model: Path, request: TuneRequest, *, name: str | None = None, on_progress: OnProgress | None = None
) -> TuneReport:
    """Measure, until the best is known well enough or the time is up, and remember everything measured.

    `name` is what the command to use it calls the model. Ctrl-C ends the measuring, not the report. Raises
    BadRequestError and UnsupportedError for what cannot be, OutOfMemoryError where nothing fits.
    """
    with ModelFile(model) as file:
        return _Session(file, request, name or str(model), on_progress or (lambda *_: None)).run()


@dataclass
class _Session:
    """One call of `tune`."""

    file: ModelFile
    request: TuneRequest
    name: str
    on_progress: OnProgress
    trials: list[Trial] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    interrupted: bool = False

    def run(self) -> TuneReport:
        self.started = time.perf_counter()
        request = self.request
        self.spec = read_spec(self.file)
        self.store = ProfileStore(identify(self.file))
        profile = self.store.load()
        self.notes = list(profile.notes)
        self.device = request.device or default_device() or "cpu"
        self.depth = _depth(request)
        self.budget = Budget(
            vram_bytes=vram_limit(self.device, request.vram_bytes, request.vram_reserve), ram_bytes=ram_budget()
        )
        self.placements = self._placements()
        self.records = [r for r in profile.records if self._counts(r)]
        reused = len(self.records)
        self.notes += busy()
        try:
            self.model = self._cost_model(profile.rates.get(self.device.partition(":")[0]))
            if request.exhaustive:
                self._sweep()
            else:
                self._search()
        except KeyboardInterrupt:
            self.interrupted = True
        return self._report(reused)

    # -- before ------------------------------------------------------------------------------------------------------

    def _placements(self) -> list[Placement]:
        request, spec = self.request, self.spec
        base = Placement(
            device=self.device,
            n_gpu_layers=0,
            n_ctx=request.n_ctx,
            n_sequences=request.n_sequences,
            kv_dtype=request.kv_dtype,
        )
        if request.n_ctx > spec.n_ctx_train > 0:
            self.notes.append(longer_than_trained(request.n_ctx, spec))
        found = tunable(spec, base, self.budget, n_batch=request.n_batch, threads=_threads(request.threads))
        if request.device is None and self.device == "cpu":
            self.notes.append("No GPU that PyTorch can use: only -ngl 0 is tried (--device cpu emulates a GPU).")
            found = [p for p in found if p.n_gpu_layers == 0]
        elif not any(p.n_gpu_layers for p in found) and self.budget.vram_bytes is not None:
            least = smallest_vram(spec, base, request.n_batch)
            why = f"the smallest budget is {mib(least)}" if least else "this model cannot be split"
            self.notes.append(f"{mib(self.budget.vram_bytes)} of VRAM hold not even one layer with its context: {why}.")
        if not found:
            shortfall = self.budget.shortfall(ledger_of(spec, base))
            raise BadRequestError(f"Nothing fits this machine: {shortfall}; use a shorter context (-c).")
        if any(p.n_gpu_layers for p in found) and self.device == "cpu":
            self.notes.append(EMULATED)
        return found

    def _counts(self, record: Record) -> bool:
        """Whether an earlier record is worth something here: a speed at a depth that is not far off, or that a budget
        which is the same was too small. What failed otherwise may succeed today."""
        if record.failure:
            return record.failure == "out of memory" and record.vram_budget == self.request.vram_bytes is not None
        depth = record.n_prompt if self.request.objective == "ttft" else record.depth
        wanted = {same_speed(p, self.request.objective) for p in self.placements}
        near = abs(depth - self.depth) <= max(32, self.depth // 8)
        return near and same_speed(record.placement, self.request.objective) in wanted

    def _cost_model(self, known: Any) -> CostModel:
        """With rates that were fitted before, or fitted now, or assumed where that fails."""
        machine = this_machine() or unmeasured_machine()
        prior = assumed_rates(machine, self.device)
        self.model = CostModel(self.spec, machine, known or prior)
        if known is not None:
            return self.model
        split = [p for p in self.placements if p.kv == "device" and 0 < p.n_gpu_layers < self.spec.n_layers]
        middle = split[len(split) // 2] if split else self.placements[0]
        self._say("Calibrating the cost model")
        measured = run_calibration(
            str(self.file.path),
            replace(middle, n_sequences=1),
            min(CALIBRATION_DEPTH, max(1, middle.n_ctx // 2)),
            vram_budget=self._limit(),
            timeout_s=CALIBRATION_SHARE * self.request.budget_s,
        )
        if not measured:
            return self.model
        rates = fit(self.spec, machine, prior, measured)
        self.store.add(rates={self.device.partition(":")[0]: rates})
        return CostModel(self.spec, machine, rates)

    # -- measuring ---------------------------------------------------------------------------------------------------

    def _search(self) -> None:
        while True:
            estimate = self._estimate()
            option = next_option(estimate.options, estimate.belief, self._open())
            if option is None:
                return
            if self.trials and self._spent() + self._cost(option) > self.request.budget_s:
                self.notes.append(
                    f"The time is up before it is certain which is quickest (another {self._cost(option):.0f} s would "
                    "be needed for the next measurement): --budget gives more, and a second tune goes on from here."
                )
                return
            self._measure(option)

    def _sweep(self) -> None:
        order = list(range(len(self.placements)))
        for number in range(ROUNDS):
            for option in order if number % 2 == 0 else reversed(order):
                if option in self._open():
                    self._measure(option)

    def _measure(self, option: int) -> None:
        p = self.placements[option]
        self._say(f"Measuring -ngl {p.n_gpu_layers}" + (f" --kv {p.kv}" if p.n_gpu_layers and p.kv != "device" else ""))
        patience = SLOWEST * self._cost(option)
        if not any(trial.failure is None for trial in self.trials):  # expectations are untested, or the machine is busy
            patience = max(patience, PATIENCE * self.request.budget_s)
        trial = run_trial(self.condition(p), timeout_s=patience)
        record = record_of(trial)
        self.trials.append(trial)
        self.records.append(record)
        self.store.add(record)

    def condition(self, p: Placement) -> Condition:
        """What is run of a placement."""
        ttft = self.request.objective == "ttft"
        n = round(SECONDS_A_REPEAT / self.model.tpot_s(p, self.depth))
        room = (p.n_ctx - self.depth - 1 - WARMUP) // REPEATS
        return Condition(
            model=str(self.file.path),
            placement=p,
            prompt=prompt_tokens(self.depth, self.spec.n_vocab),
            n_decode=max(1, min(max(n, LEAST_DECODED), MOST_DECODED, room)),
            warmup=WARMUP,
            repeats=0 if ttft else REPEATS,
            prefills=PREFILLS if ttft else 0,
            vram_budget=self._limit(),
        )

    def _limit(self) -> int | None:
        """The budget that is enforced; what merely happens to be free on a GPU enforces itself."""
        return self.request.vram_bytes

    def _open(self) -> list[int]:
        """Those that may still be measured: not failed, nor larger than what ran out of memory."""
        shut: dict[Any, int] = {}
        failed = set()
        for record in self.records:
            if record.failure:
                failed.add(same_speed(record.placement, self.request.objective))
                if record.failure in ("out of memory", "killed"):
                    kv = record.placement.kv
                    shut[kv] = min(record.placement.n_gpu_layers, shut.get(kv, 1 << 30))
        return [
            i
            for i, p in enumerate(self.placements)
            if same_speed(p, self.request.objective) not in failed and p.n_gpu_layers < shut.get(p.kv, 1 << 30)
        ]

    def _cost(self, option: int) -> float:
        """Seconds one measurement is likely to take."""
        expected = self._work_s(self.placements[option])
        starts = [t.wall_s - self._work_s(t.condition.placement) for t in self.trials if t.wall_s and not t.failure]
        return max(1.0, expected + (max(0.0, median(starts)) if starts else START_S))

    def _work_s(self, p: Placement) -> float:
        prefill = self.model.prefill_s(p, self.depth) * p.n_sequences
        if self.request.objective == "ttft":
            return (PREFILLS + (self._limit() is not None)) * prefill
        return prefill + (WARMUP + REPEATS * self.condition(p).n_decode) * self.model.tpot_s(p, self.depth)

    def _estimate(self) -> Estimate:
        return Estimate(self.model, self.placements, self.records, self.depth, self.request.objective)

    def _spent(self) -> float:
        return time.perf_counter() - self.started

    def _say(self, what: str) -> None:
        spent = self._spent()
        self.on_progress(what, spent, max(0.0, self.request.budget_s - spent))

    # -- after -------------------------------------------------------------------------------------------------------

    def _report(self, reused: int) -> TuneReport:
        estimate = self._estimate()
        best = estimate.belief.leader(self._open())
        rows = tuple(self._row(estimate, i, best) for i in range(len(self.placements)))
        if self.interrupted:
            self.notes.append("Interrupted: what was measured is kept, and the next tune goes on from there.")
        others = any(row.measured and row.placement.n_gpu_layers for row in rows)
        if best is not None and others and not self.placements[best].n_gpu_layers:
            self.notes.append("Nothing on the GPU is quicker here than llama.cpp alone.")
        return TuneReport(
            request=self.request,
            model=str(self.file.path),
            device=self.device,
            depth=self.depth,
            budget=self.budget,
            rows=rows,
            best=best,
            command="" if best is None else command(self.name, self.placements[best]),
            noise=estimate.belief.noise,
            reused=reused,
            trials=tuple(self.trials),
            notes=tuple(self.notes),
            interrupted=self.interrupted,
            elapsed_s=self._spent(),
        )

    def _row(self, estimate: Estimate, i: int, best: int | None) -> Row:
        p, objective = self.placements[i], self.request.objective
        records = estimate.records_of(i)
        timed = [r for r in records if r.source == "tune" and measured_s(r, objective) is not None]
        samples = [s for r in timed for s in (r.prefill_s if objective == "ttft" else r.decode_s)]
        failures = [r for r in records if r.failure]
        ledger = ledger_of(self.spec, p)
        verdict, message = "not measured", ""
        if failures:
            verdict, message = failures[-1].failure, failures[-1].message
        elif samples and best is not None:
            verdict = _verdict(estimate, i, best)
        return Row(
            placement=p,
            vram_bytes=ledger.vram_bytes,
            ram_bytes=ledger.ram_bytes,
            predicted_s=estimate.options[i].predicted_s,
            measured=None if failures else Spread.of(samples),
            n_runs=len(timed),
            device_bytes=max((r.device_bytes for r in timed if r.device_bytes), default=None),
            host_bytes=max((r.host_bytes for r in timed if r.host_bytes), default=None),
            verdict=verdict,
            message=message,
        )


def _verdict(estimate: Estimate, i: int, best: int) -> str:
    """ "best", "tie" where twice the spread does not tell them apart, or how much longer it takes."""
    if i == best:
        return "best"
    mean, sd = estimate.belief.apart(i, best)
    if mean <= 2 * sd:
        return "tie"
    return f"{100 * (math.exp(mean) - 1):.0f} % slower"


def record_of(trial: Trial) -> Record:
    """What the profile keeps of a trial."""
    condition, memory = trial.condition, trial.memory
    return Record(
        placement=condition.placement,
        source="tune",
        at=trial.at or now(),
        depth=condition.depth,
        decode_s=trial.decode_s,
        n_prompt=condition.depth if trial.ttft_s else 0,
        prefill_s=trial.ttft_s,
        wall_s=trial.wall_s,
        vram_budget=condition.vram_budget,
        device_bytes=memory.device_bytes if memory else None,
        host_bytes=memory.host_bytes if memory else None,
        failure=trial.failure.kind if trial.failure else "",
        message=trial.failure.message if trial.failure else "",
    )


def command(name: str, p: Placement) -> str:
    """The command line that runs a placement."""
    words = ["hybrid", "chat", name, "-ngl", str(p.n_gpu_layers), "-c", str(p.n_ctx)]
    if p.n_gpu_layers and p.device != "cuda":
        words += ["--device", p.device]
    if p.n_gpu_layers and p.kv != "device":
        words += ["--kv", p.kv]
        words += ["--kv-budget", str(p.kv_budget)] if p.kv_budget is not None else []
    if p.kv_dtype != "f16":
        words += ["--kv-type", p.kv_dtype]
    if p.n_threads_tail != usable_cores():
        words += ["-t", str(p.n_threads_tail)]
    return shlex.join(words)


def busy() -> list[str]:
    """A sentence where other programs' work will show in every figure."""
    with suppress(OSError):
        load = os.getloadavg()[0]
        if load > BUSY * usable_cores():
            return [
                f"Other programs keep the processors busy (a load of {load:.1f} on {usable_cores()} cores): "
                "what is measured now may not hold when they are done."
            ]
    return []


def prompt_tokens(n: int, n_vocab: int) -> tuple[int, ...]:
    """n ordinary tokens, not all the same; the same ones every time."""
    span = max(1, min(n_vocab, 4096) - 100)
    return tuple(min(100, n_vocab - 1) + (7919 * i) % span if n_vocab > 200 else i % n_vocab for i in range(n))


def _depth(request: TuneRequest) -> int:
    """Tokens in the context, such that what is decoded still fits."""
    if request.n_ctx < 16:
        raise BadRequestError("Tuning needs a context of 16 tokens or more.")
    if request.depth is not None and not 0 < request.depth < request.n_ctx:
        raise BadRequestError(f"The depth must be between 1 and the context, {request.n_ctx}, not {request.depth}.")
    most = request.n_ctx - 2 if request.objective == "ttft" else request.n_ctx - 1 - WARMUP - REPEATS * 2
    wanted = request.depth if request.depth is not None else request.n_ctx // 2
    return max(1, min(wanted, most))


def _threads(asked: int | str | None) -> Sequence[int]:
    cores = usable_cores()
    if asked is None:
        return [cores]
    if asked == "auto":
        return sorted({cores, max(1, cores - 1), max(1, cores // 2)}, reverse=True)
    if not isinstance(asked, int) or asked < 1:
        raise BadRequestError(f"threads must be a number of 1 or more, or 'auto', not {asked!r}.")
    return [asked]
