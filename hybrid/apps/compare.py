"""Comparing: the same work under several placements, each run in a process of its own, and what that says."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from hybrid.apps.compare_modes import ALONE, Mode, chosen_modes
from hybrid.apps.compare_verdict import verdict
from hybrid.apps.conditions import WARMUP, Others, busy, prompt_tokens
from hybrid.apps.runner import run_trial
from hybrid.errors import BadRequestError
from hybrid.files import write_atomically
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.model.splits import find_splits
from hybrid.report.comparing import CompareReport, CompareRequest, CompareRow, Limit, Setting, compared
from hybrid.report.trial import Condition, Failure, Trial
from hybrid.schedule.budget import Budget, mib, needed_vram, ram_budget
from hybrid.schedule.devices import default_device, vram_limit
from hybrid.schedule.kv_checks import kv_refusal
from hybrid.schedule.ledger import Ledger, ledger_of
from hybrid.schedule.placement import KVDtype, Placement
from hybrid.schedule.profile import now
from hybrid.schedule.sentences import EMULATED, longer_than_trained

SHORT, LONG = 256, 2048
"""Tokens, where nobody said which and no budget does either."""
LONGEST_S = 1_000_000
"""What a run's time limit may be: far more cannot be waited for by the system's clocks."""
CONTEXT_STEP = 256
"""Contexts are a whole number of these, as llama.cpp rounds them."""

OnProgress = Callable[[str, int, int], None]
"""Called with what is done now, how many runs are over, and how many there will be."""


def compare(
    model: Path, request: CompareRequest, *, save: Path | None = None, on_progress: OnProgress | None = None
) -> CompareReport:
    """Run every mode at every depth, number of sequences and cache type, and say what came of it.

    In `save`, a folder of this comparison's own gets every Trial as a JSON file as soon as it is over. Ctrl-C ends the
    measuring, not the report. Raises BadRequestError and UnsupportedError, before anything is run, for what cannot be
    compared.
    """
    with ModelFile(model) as file:
        return _Session(file, request, save, on_progress or (lambda *_: None)).run()


@dataclass
class _Session:
    """One call of `compare`."""

    file: ModelFile
    request: CompareRequest
    save: Path | None
    on_progress: OnProgress
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False
    n_run: int = 0

    def run(self) -> CompareReport:
        started = time.perf_counter()
        request = self.request
        self.spec = read_spec(self.file)
        self.modes = chosen_modes(request.modes, self.spec)
        self.device = request.device or default_device() or "cpu"
        self.limit = request.vram_bytes
        self.budget = Budget(
            vram_bytes=vram_limit(self.device, request.vram_bytes, request.vram_reserve), ram_bytes=ram_budget()
        )
        self.depths = self._depths()
        self._note()
        if self.save is not None:
            self.save = _new_folder(self.save)
        self.rows = [self._row(mode, setting) for setting in self._settings() for mode in self.modes]
        others = Others()
        try:
            self._measure()
        except KeyboardInterrupt:
            self.interrupted = True
            self.notes.append("Interrupted: what was measured until then is shown.")
        if self.n_run:
            self.notes += others.note()
        names = [mode.name for mode in self.modes]
        report = CompareReport(
            request=request,
            model=str(self.file.path),
            device=self.device,
            vram_bytes=self.limit if self.limit is not None else self.budget.vram_bytes,
            n_ctx_train=self.spec.n_ctx_train,
            baseline=ALONE if ALONE in names else names[0],
            reference="device" if "device" in names else names[0],
            rows=(),
            limits=tuple(self._limits()),
            notes=tuple(self.notes),
            saved=None if self.save is None else str(self.save),
            interrupted=self.interrupted,
            elapsed_s=time.perf_counter() - started,
        )
        report = replace(report, rows=tuple(self._with_outputs(report.baseline)))
        return replace(report, verdict=verdict(report))

    # -- before ------------------------------------------------------------------------------------------------------

    def _depths(self) -> tuple[int, ...]:
        """The depths asked for; of a prompt, its length and a short beginning; or a short one that everything should
        complete, and the first at which the device's memory ends."""
        request = self.request
        if request.n_decode < 1 or request.repeats < 1:
            raise BadRequestError("A comparison needs a token to decode and a run of everything, at least.")
        if not 0 < request.time_limit_s <= LONGEST_S:  # a NaN is neither
            raise BadRequestError(f"The time limit of a run is more than 0 and at most {LONGEST_S} seconds.")
        if request.prompt is not None:
            if request.depths is not None:
                raise BadRequestError("The prompt's length is the depth: give a prompt or depths, not both.")
            self.tokens = self._tokenized(request.prompt)
            n = len(self.tokens)
            return (min(SHORT, n // 2), n) if n > 1 else (n,)
        if request.depths is not None:
            depths = tuple(sorted(set(request.depths)))
            if not depths or depths[0] < 1:
                raise BadRequestError("Depths are tokens in the context, 1 or more.")
        else:
            depths = self._default_depths()
        self.tokens = prompt_tokens(depths[-1], self.spec.n_vocab)
        return depths

    def _default_depths(self) -> tuple[int, ...]:
        room = max(2, (self.spec.n_ctx_train or LONG) - 1 - WARMUP - self.request.n_decode)
        short = min(SHORT, room // 2)
        heads = [mode for mode in self.modes if mode.n_gpu_layers]
        if not heads:
            return short, min(LONG, room)
        if self.budget.vram_bytes is None:
            long = min(LONG, room)
            self.limit = self._between(long)
            self.budget = replace(self.budget, vram_bytes=self.limit)
            return short, long
        long = 2 * short
        while long < room and needed_vram(self._whole(self._setting(long))) <= self.budget.vram_bytes:
            long *= 2
        if long >= room:
            long = room
            if needed_vram(self._whole(self._setting(long))) <= self.budget.vram_bytes:
                self.notes.append(
                    f"The device holds the whole KV cache up to the {self.spec.n_ctx_train} tokens that this model was "
                    "trained for: its limit does not appear (a smaller --vram-budget shows it)."
                )
        return short, long

    def _between(self, depth: int) -> int:
        """A budget for an emulated device that shows what a limit does: between the needs of `stream` and `device`."""
        setting = self._setting(depth)
        whole = self._whole(setting)
        stream = ledger_of(self.spec, replace(whole.placement, kv="stream"))
        limit = (whole.vram_bytes + stream.vram_bytes) // 2
        self.notes.append(
            f"The emulated device gets {mib(limit)}, between what stream ({mib(stream.vram_bytes)}) and device "
            f"({mib(whole.vram_bytes)}) need for {depth} tokens; --vram-budget sets another limit."
        )
        return limit

    def _tokenized(self, text: str) -> tuple[int, ...]:
        from hybrid.schedule.identity import identify
        from hybrid.tail.preflight import preflight
        from hybrid.tail.vocab import Vocabulary  # llama.cpp is needed for a prompt only

        preflight(self.file, self.spec.n_layers, identify(self.file).machine)
        with Vocabulary.open(self.file.path) as vocabulary:
            tokens = tuple(vocabulary.tokenize(text))
        if not tokens:
            raise BadRequestError("The prompt is empty.")
        return tokens

    def _note(self) -> None:
        self.notes += busy()
        if self.device == "cpu" and any(mode.n_gpu_layers for mode in self.modes):
            self.notes.append(EMULATED)
            if self.limit is None:
                self.notes.append("Without --vram-budget the emulated device has no limit: tiered is device then.")
        if self.limit is not None and any(mode.own for mode in self.modes):
            self.notes.append("--vram-budget limits the head's device; llama.cpp's own GPU layers take what they need.")
        longest = self._n_ctx(self.depths[-1])
        if longest > self.spec.n_ctx_train > 0:
            self.notes.append(longer_than_trained(longest, self.spec))

    # -- conditions --------------------------------------------------------------------------------------------------

    def _settings(self) -> Iterator[Setting]:
        for kv_dtype in dict.fromkeys(self.request.kv_dtypes):
            for n_sequences in sorted(set(self.request.n_sequences)):
                for depth in self.depths:
                    yield Setting(kv_dtype, n_sequences, depth)

    def _setting(self, depth: int) -> Setting:
        """The first one of a depth, which decides about the default depths and budget."""
        return Setting(self.request.kv_dtypes[0], min(self.request.n_sequences), depth)

    def _n_ctx(self, depth: int) -> int:
        needed = depth + 1 + WARMUP + self.request.n_decode
        return -(-needed // CONTEXT_STEP) * CONTEXT_STEP

    def _base(self, kv_dtype: KVDtype, n_sequences: int, n_ctx: int) -> Placement:
        """What all modes of a setting have in common, the chunk included."""
        n_batch = min(self.request.n_batch, n_ctx)
        return Placement(
            device=self.device,
            n_gpu_layers=0,
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=n_batch,
            n_sequences=n_sequences,
            kv_dtype=kv_dtype,
        )

    def _whole(self, setting: Setting) -> Ledger:
        """What all layers with their cache on the device need."""
        return self._whole_of(setting.kv_dtype, setting.n_sequences, self._n_ctx(setting.depth))

    def _whole_of(self, kv_dtype: KVDtype, n_sequences: int, n_ctx: int) -> Ledger:
        k = find_splits(self.spec).allowed[-1]
        mode = Mode("device", "device", k)
        return ledger_of(self.spec, mode.placement(self.spec, self._base(kv_dtype, n_sequences, n_ctx), self.budget))

    def _row(self, mode: Mode, setting: Setting) -> CompareRow:
        base = self._base(setting.kv_dtype, setting.n_sequences, self._n_ctx(setting.depth))
        placement = mode.placement(self.spec, base, self.budget)
        ledger, whole = ledger_of(self.spec, placement), self._whole(setting)
        return CompareRow(
            mode=mode.name,
            setting=setting,
            placement=placement,
            vram_needed=ledger.vram_bytes,
            host_needed=ledger.host.n_bytes,
            vram_saved=None if mode.own else whole.vram_bytes - ledger.vram_bytes,
            host_cost=None if mode.own else ledger.host.n_bytes - whole.host.n_bytes,
        )

    def _condition(self, row: CompareRow) -> Condition:
        return Condition(
            model=str(self.file.path),
            placement=row.placement,
            prompt=self.tokens[: row.setting.depth],
            n_decode=self.request.n_decode,
            warmup=WARMUP,
            repeats=1,
            prefills=1,
            vram_budget=self.limit if row.placement.n_gpu_layers else None,
        )

    # -- measuring ---------------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        """Round after round, there and back, so that what drifts favours nobody. What failed is not run again."""
        n = len(self.rows)
        for number in range(self.request.repeats):
            order = range(n) if number % 2 == 0 else reversed(range(n))
            for done, i in enumerate(order):
                row = self.rows[i]
                if row.failure is not None:
                    continue
                what = f"{row.mode}, {row.setting.depth} tokens"
                if row.setting.n_sequences > 1:
                    what += f", {row.setting.n_sequences} sequences"
                self.on_progress(what, number * n + done, n * self.request.repeats)
                trial = self._trial(row)
                self.rows[i] = replace(row, trials=(*row.trials, trial))
                self._saved(trial, row, number)

    def _trial(self, row: CompareRow) -> Trial:
        """The run; or its refusal, where the host's memory or llama.cpp rules it out."""
        condition = self._condition(row)
        ledger = ledger_of(self.spec, row.placement)
        why = kv_refusal(self.spec, row.placement)
        need = ledger.ram_bytes - ledger.mapped_bytes
        if why is None and need > self.budget.ram_bytes:
            why = f"It needs {mib(need)} of RAM, but only {mib(self.budget.ram_bytes)} may be used."
        if why is None:
            return run_trial(condition, timeout_s=self.request.time_limit_s)
        return Trial(condition=condition, failure=Failure(kind="refused", message=why), at=now())

    def _saved(self, trial: Trial, row: CompareRow, number: int) -> None:
        self.n_run += 1
        if self.save is None:
            return
        s = row.setting
        mode = re.sub(r"[^a-z0-9.]+", "-", row.mode)
        name = f"{self.n_run:03}-{mode}-d{s.depth}-s{s.n_sequences}-{s.kv_dtype}-run{number + 1}.json"
        facts = {"mode": row.mode, **trial.to_dict()}
        try:
            write_atomically(self.save / name, json.dumps(facts, ensure_ascii=False) + "\n")
        except OSError as e:  # a full disk is no reason to lose what is still to be measured
            self.notes.append(f"{self.save} holds the runs before {name} only: {e.strerror}.")
            self.save = None

    # -- after -------------------------------------------------------------------------------------------------------

    def _with_outputs(self, baseline: str) -> Iterator[CompareRow]:
        for setting in self._settings():
            rows = [row for row in self.rows if row.setting == setting]
            first = next(row for row in rows if row.mode == baseline)
            for row, (comparable, difference) in zip(rows, compared(rows, first), strict=True):
                yield replace(row, comparable=comparable, difference=difference)

    def _limits(self) -> Iterator[Limit]:
        """How long a context the device holds whole, in each cache type asked for and in q8_0."""
        vram = self.budget.vram_bytes
        if vram is None or not any(mode.n_gpu_layers for mode in self.modes):
            return
        for kv_dtype in dict.fromkeys((*self.request.kv_dtypes, "q8_0")):
            for n_sequences in sorted(set(self.request.n_sequences)):
                base = self._base(kv_dtype, n_sequences, 1)
                if kv_refusal(self.spec, replace(base, n_gpu_layers=self.spec.n_layers)) is not None:
                    continue
                low, high = 0, max(self.spec.n_ctx_train, self._n_ctx(self.depths[-1]))
                while low < high:
                    middle = (low + high + 1) // 2
                    need = needed_vram(self._whole_of(base.kv_dtype, n_sequences, middle))
                    low, high = (middle, high) if need <= vram else (low, middle - 1)
                yield Limit(kv_dtype=base.kv_dtype, n_sequences=n_sequences, n_ctx=low)


def _new_folder(parent: Path) -> Path:
    """A new folder in `parent`, named by date and time: no two comparisons' files are mixed, and none is lost."""
    name, number = time.strftime("%Y-%m-%d-%H%M%S"), 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:  # another one began in the same second
            number += 1
        except OSError as e:
            raise BadRequestError(f"{parent} cannot be a folder for the trials: {e.strerror}.") from e
