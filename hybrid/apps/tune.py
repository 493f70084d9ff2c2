"""Tuning: measure the few placements that matter, each in a process of its own, and say which is best."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from hybrid.apps.commands import command
from hybrid.apps.conditions import WARMUP, Others, busy, prompt_tokens
from hybrid.apps.remember import record_of
from hybrid.apps.runner import run_calibration, run_trial
from hybrid.apps.tune_candidates import REPEATS, chosen_depth, chosen_device, chosen_placements
from hybrid.apps.tune_pace import Pace
from hybrid.apps.tune_rows import row_of
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.report.trial import LEAST_DECODED, Condition, Trial
from hybrid.report.tuning import Row, TuneReport, TuneRequest
from hybrid.schedule.budget import Budget, ram_budget
from hybrid.schedule.cost import CostModel
from hybrid.schedule.cost_fit import fit
from hybrid.schedule.cost_prior import assumed_rates
from hybrid.schedule.devices import vram_limit
from hybrid.schedule.estimate import Estimate, measured_s, same_speed, spread_of
from hybrid.schedule.identity import identify
from hybrid.schedule.ledger import ledger_of
from hybrid.schedule.machine_store import this_machine, unmeasured_machine
from hybrid.schedule.own_offload import own_vram_bytes, stand_in
from hybrid.schedule.placement import Placement
from hybrid.schedule.profile import ProfileStore, Record
from hybrid.schedule.search import FIRST, next_option

__all__ = ["Row", "TuneReport", "TuneRequest", "tune"]

SECONDS_A_REPEAT = 0.4
MOST_DECODED = 64
"""Tokens of a repeat: about so many seconds' worth, this many at most."""
PREFILLS = 2
CALIBRATION_DEPTH, CALIBRATION_SHARE = 256, 0.3
"""Tokens, and the share of the time that is left which fitting the CostModel may be expected to take."""
CALIBRATION_PROMPTS, CALIBRATION_TOKENS = 3, 40
"""What a calibration evaluates: prompts of its depth, and single tokens (`hybrid.apps.calibrate`)."""
CALIBRATION_PATIENCE = 3
"""A calibration that takes so many times longer than expected is given up."""
ROUNDS = 2
"""Of an exhaustive sweep, there and back, so that what drifts does not favour one end."""
MOST_SPREAD = 0.2
"""Of an earlier measurement's own stretches (`spread_of`), for it to count."""
MENTIONED_S = 1.0
"""Seconds over the budget from which on they are mentioned."""

MEMORY = {"out of memory": "vram", "out of RAM": "ram", "killed": "ram"}
"""Which memory was too small, by how a run failed; the system kills for RAM."""

OnProgress = Callable[[str, float, float], None]
"""Called with what is done now, the seconds spent, and those left: at most; of an exhaustive sweep about so many."""


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
    _known_needs: dict[Placement, dict[str, int]] = field(default_factory=dict)
    _known_keys: dict[Placement, Placement] = field(default_factory=dict)

    def run(self) -> TuneReport:
        self.started = time.perf_counter()
        request = self.request
        self.spec = read_spec(self.file)
        self.store = ProfileStore(identify(self.file))
        profile = self.store.load()
        self.notes = list(profile.notes)
        self.device = chosen_device(request)
        self.depth = chosen_depth(request)
        self.budget = Budget(
            vram_bytes=vram_limit(self.device, request.vram_bytes, request.vram_reserve), ram_bytes=ram_budget()
        )
        self.placements, notes = chosen_placements(self.spec, request, self.device, self.budget)
        self.notes += notes
        wanted = {self._key(p) for p in self.placements}
        self.records = [r for r in profile.records if self._counts(r, wanted)]
        reused = len(self.records)
        self.notes += busy()
        others = Others()
        machine = this_machine() or unmeasured_machine()
        known = profile.rates.get(self.device.partition(":")[0])
        self.uncalibrated = known is None
        self.model = CostModel(self.spec, machine, known or assumed_rates(machine, self.device))
        self.pace = Pace(self._work_s, request.budget_s)
        for record in self.records:
            if record.source == "tune" and not record.failure:
                self.pace.see(record.placement, record.wall_s)
        try:
            if request.exhaustive:
                if self.uncalibrated:
                    self._calibrate()
                self._sweep()
            else:
                self._search()
        except KeyboardInterrupt:
            self.interrupted = True
        if self.trials:
            self.notes += others.note()
        self.notes += self._overrun()
        return self._report(reused)

    # -- before ------------------------------------------------------------------------------------------------------

    def _counts(self, record: Record, wanted: Collection[Placement]) -> bool:
        """Whether an earlier record is worth something here: a speed at a depth that is not far off, or that a budget
        which is the same was too small. What failed otherwise may succeed today, and what a busy machine measured is
        measured again."""
        if record.failure:
            return record.failure == "out of memory" and record.vram_budget == self.request.vram_bytes is not None
        depth = record.n_prompt if self.request.objective == "ttft" else record.depth
        near = abs(depth - self.depth) <= max(32, self.depth // 8)
        quiet = spread_of(record, self.request.objective) <= MOST_SPREAD
        return near and quiet and self._key(record.placement) in wanted

    # -- measuring ---------------------------------------------------------------------------------------------------

    def _search(self) -> None:
        """llama.cpp alone first: its process starts soonest, every other placement is compared with it, and it tells
        how quick the machine is now, by which all that follows is rationed."""
        alone = [i for i in self._open() if not self.placements[i].n_offloaded]
        if alone and not self._seen(alone):
            self._measure(alone[0])
        if self.uncalibrated and not self._calibrate():
            self._scale(alone)
        while (option := self._next(self._estimate())) is not None:
            p, first = self.placements[option], not self._seen(self._heads())
            left = self.request.budget_s - self._spent()
            begun = bool(self.trials) or self._seen(range(len(self.placements)))
            if begun and not self.pace.affordable(p, left, untried=first and p.n_offloaded > 0):
                self.notes.append(self._time_is_up(p, first))
                return
            self._measure(option)

    def _next(self, estimate: Estimate) -> int | None:
        """What the search wants to know next. Whatever it thinks, something on the device is measured too, and each
        number of threads; and where the time is too short for several splits, that is the likeliest best."""
        open_options = self._open()
        option = next_option(estimate.options, estimate.belief, open_options)
        heads = self._heads()
        if not self._seen(heads) and (found := [i for i in heads if i in open_options]):
            likeliest = min(found, key=lambda i: estimate.belief.mean[i])
            several = FIRST * self.pace.cost_s(self.placements[likeliest])
            return likeliest if option is None or self._spent() + several > self.request.budget_s else option
        for n in dict.fromkeys(p.n_threads_tail for p in self.placements) if option is None else ():
            alike = [i for i, p in enumerate(self.placements) if p.n_threads_tail == n]
            if not self._seen(alike) and (found := [i for i in alike if i in open_options]):
                return min(found, key=lambda i: estimate.belief.mean[i])
        return option

    def _heads(self) -> list[int]:
        """Placements with layers on a GPU."""
        return [i for i, p in enumerate(self.placements) if p.n_offloaded]

    def _seen(self, options: Sequence[int]) -> bool:
        """Whether one of them was measured, now or earlier."""
        wanted = {self._key(self.placements[i]) for i in options}
        timed = (r for r in self.records if measured_s(r, self.request.objective) is not None)
        return any(self._key(record.placement) in wanted for record in timed)

    def _overrun(self) -> list[str]:
        """A line where the budget was not kept."""
        spent, budget = self._spent(), self.request.budget_s
        if self.request.exhaustive or not self.trials or spent < budget + MENTIONED_S:
            return []
        return [
            f"It took {spent:.0f} s instead of {budget:.3g} s: the first measurement may run on, for without one there "
            "would be nothing to tell."
        ]

    def _time_is_up(self, p: Placement, first: bool) -> str:
        need = f"another {self.pace.cost_s(p):.0f} s would be needed for"
        if first and p.n_offloaded:
            return (
                f"The time is up before anything on the device was measured ({need} -ngl {p.n_offloaded}): --budget "
                "gives more, and a second tune goes on from here."
            )
        return (
            f"The time is up before it is certain which is quickest ({need} the next measurement): --budget gives "
            "more, and a second tune goes on from here."
        )

    def _calibrate(self) -> bool:
        """Fit the CostModel's rates, unless that takes time which measurements need; whether it was done."""
        split = [p for p in self.placements if p.kv == "device" and 0 < p.n_gpu_layers < self.spec.n_layers]
        middle = replace(split[len(split) // 2] if split else self.placements[0], n_sequences=1)
        depth = min(CALIBRATION_DEPTH, max(1, middle.n_ctx // 2))
        work = CALIBRATION_PROMPTS * self.model.prefill_s(middle, depth)
        cost = self.pace.scaled(middle, work + CALIBRATION_TOKENS * self.model.tpot_s(middle, depth))
        left = self.request.budget_s - self._spent()
        if not self.request.exhaustive and cost > CALIBRATION_SHARE * left:
            would = f"calibrating them would take about {cost:.0f} s, too much of the {left:.0f} s that are left"
            why = would if left >= 1 else "there is no time to calibrate them"
            self.notes.append(f"Predictions rest on assumptions about this machine: {why}.")
            return False
        self._say("Calibrating the cost model")
        patience = CALIBRATION_PATIENCE * cost
        if not self.request.exhaustive:
            patience = min(patience, left / 2)
        measured = run_calibration(
            str(self.file.path), middle, depth, vram_budget=self._limit(middle), timeout_s=patience
        )
        if not measured:
            return False
        rates = fit(self.spec, self.model.machine, self.model.rates, measured)
        self.store.add(rates={self.device.partition(":")[0]: rates})
        self.model = CostModel(self.spec, self.model.machine, rates)
        return True

    def _scale(self, alone: Sequence[int]) -> None:
        """In a calibration's place: as much slower (or quicker) as llama.cpp alone was than assumed the host is, and
        the head too where it is emulated there."""
        seen = [one for one in self._estimate().observations if one.option in alone and one.predicted_s]
        if seen:
            factor = median(one.seconds / one.predicted_s for one in seen if one.predicted_s)
            rates = self.model.rates.slower(factor, head=self.device == "cpu")
            self.model = CostModel(self.spec, self.model.machine, rates)

    def _sweep(self) -> None:
        order = list(range(len(self.placements)))
        for number in range(ROUNDS):
            turn = order if number % 2 == 0 else order[::-1]
            for done, option in enumerate(turn):
                if option in self._open():
                    rest = [self.placements[i] for i in turn[done:] + (ROUNDS - 1 - number) * order]
                    self._measure(option, self.pace.total_s(rest))

    def _measure(self, option: int, left_s: float | None = None) -> None:
        p = self.placements[option]
        self._say(f"Measuring -ngl {p.n_offloaded}" + (f" ({p.strategy})" if p.strategy != "device" else ""), left_s)
        left = None if self.request.exhaustive else self.request.budget_s - self._spent()
        first = not self.trials and not self._seen(range(len(self.placements)))
        limit = self.pace.limit_s(p, left, first=first)
        predicted_s = None if self._seen([option]) else math.exp(self._estimate().belief.mean[option])
        trial = run_trial(self.condition(p), timeout_s=limit)
        self.trials.append(trial)
        if trial.failure is None or (first and trial.failure.kind == "too slow"):  # it would have taken even longer
            self.pace.see(p, trial.wall_s)
        elif trial.failure.kind == "too slow" and limit == left:
            self.notes.append(f"The time was up before -ngl {p.n_offloaded} was measured, after {limit:.0f} s of it.")
            return  # which says nothing about the placement
        record = replace(record_of(trial), predicted_s=predicted_s)
        self.records.append(record)
        self.store.add(record)

    def condition(self, p: Placement) -> Condition:
        """What is run of a placement."""
        ttft = self.request.objective == "ttft"
        n = round(SECONDS_A_REPEAT / self.model.tpot_s(stand_in(self.spec, p), self.depth))
        room = (p.n_ctx - self.depth - 1 - WARMUP) // REPEATS
        return Condition(
            model=str(self.file.path),
            placement=p,
            prompt=prompt_tokens(self.depth, self.spec.n_vocab),
            n_decode=max(1, min(max(n, LEAST_DECODED), MOST_DECODED, room)),
            warmup=WARMUP,
            repeats=0 if ttft else REPEATS,
            repeat_s=SECONDS_A_REPEAT,
            prefills=PREFILLS if ttft else 0,
            vram_budget=self._limit(p),
        )

    def _limit(self, p: Placement) -> int | None:
        """The budget that is enforced; what merely happens to be free on a GPU enforces itself, and what llama.cpp
        takes there nobody limits."""
        return None if p.llama_gpu_layers else self.request.vram_bytes

    def _open(self) -> list[int]:
        """Those that may still be measured: they did not fail, nor do they need more of a memory than what ran out of
        it. More layers need more VRAM and less RAM, so which memory it was decides which way is shut."""
        failed = set()
        least: dict[tuple[str, bool], int] = {}
        for record in self.records:
            if not record.failure:
                continue
            failed.add(self._key(record.placement))
            if memory := MEMORY.get(record.failure):
                kind = memory, bool(record.placement.llama_gpu_layers)
                least[kind] = min(least.get(kind, 1 << 62), self._needs(record.placement)[memory])
        return [
            i
            for i, p in enumerate(self.placements)
            if self._key(p) not in failed
            and all(
                n_bytes < least.get((memory, bool(p.llama_gpu_layers)), 1 << 62)
                for memory, n_bytes in self._needs(p).items()
            )
        ]

    def _needs(self, p: Placement) -> dict[str, int]:
        """Bytes that must be there, of each memory; a mapped file need not."""
        if p not in self._known_needs:
            ledger = ledger_of(self.spec, p)
            vram = own_vram_bytes(self.spec, p) if p.llama_gpu_layers else ledger.vram_bytes
            self._known_needs[p] = {"vram": vram, "ram": ledger.ram_bytes - ledger.mapped_bytes}
        return self._known_needs[p]

    def _key(self, p: Placement) -> Placement:
        if p not in self._known_keys:
            self._known_keys[p] = same_speed(p, self.request.objective, self.spec)
        return self._known_keys[p]

    def _work_s(self, p: Placement) -> float:
        n_decode = self.condition(p).n_decode
        p = stand_in(self.spec, p)
        prefill = self.model.prefill_s(p, self.depth) * p.n_sequences
        if self.request.objective == "ttft":
            return (PREFILLS + (self._limit(p) is not None)) * prefill
        return prefill + (WARMUP + REPEATS * n_decode) * self.model.tpot_s(p, self.depth)

    def _estimate(self) -> Estimate:
        return Estimate(self.model, self.placements, self.records, self.depth, self.request.objective)

    def _spent(self) -> float:
        return time.perf_counter() - self.started

    def _say(self, what: str, left_s: float | None = None) -> None:
        """Tell whoever waits what is done now; `left_s` where the budget does not say when it ends."""
        spent = self._spent()
        self.on_progress(what, spent, max(0.0, self.request.budget_s - spent) if left_s is None else left_s)

    # -- after -------------------------------------------------------------------------------------------------------

    def _report(self, reused: int) -> TuneReport:
        estimate = self._estimate()
        best = estimate.belief.leader(self._open())
        rows = tuple(row_of(estimate, i, best, self._needs(p)["vram"]) for i, p in enumerate(self.placements))
        if self.interrupted:
            self.notes.append("Interrupted: what was measured is kept, and the next tune goes on from there.")
        others = any(row.measured and row.placement.n_offloaded for row in rows)
        if best is not None and others and not self.placements[best].n_offloaded:
            self.notes.append("Nothing on the GPU is quicker here than llama.cpp alone.")
        return TuneReport(
            request=self.request,
            model=str(self.file.path),
            device=self.device,
            depth=self.depth,
            budget=self.budget,
            rows=rows,
            best=best,
            command="" if best is None else command(self.name, self.placements[best], self.spec),
            noise=estimate.belief.noise,
            reused=reused,
            trials=tuple(self.trials),
            notes=tuple(self.notes),
            interrupted=self.interrupted,
            elapsed_s=self._spent(),
        )
