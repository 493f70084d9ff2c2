"""Several requests at once, each in a sequence of its own. Where one has ended, the next begins.

Every step decodes one token of each live sequence (and what is drafted for it) in one batch. Where both halves work and
it pays, the sequences form two groups: while the tail decodes one, the head is at work on the other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from hybrid.errors import BadRequestError, Cancelled
from hybrid.runtime.completion import Completion
from hybrid.runtime.curve import BatchCurve
from hybrid.runtime.engine import Engine, State, Step
from hybrid.runtime.reply import Options, Reply
from hybrid.runtime.speculation import Speculation

KEPT_BYTES = 64 << 20
"""A common prefix is kept beside the caches, to be put into each sequence, up to this size."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A prompt to continue. The first `n_prefix` tokens are common to many requests: they are evaluated by themselves,
    once, and the rest in the same batches whatever came before. `index` is the caller's."""

    prompt: tuple[int, ...]
    options: Options
    n_prefix: int = 0
    index: int = 0
    on_text: Callable[[str], bool] | None = None
    """Called with each piece of text; True ends the task (`finish_reason` "interrupted")."""


@dataclass(frozen=True)
class Finished:
    """A task that has ended, and the seconds it took: those of a step are shared by all sequences in it."""

    task: Task
    completion: Completion
    prefill_s: float
    decode_s: float
    n_drafted: int
    """Tokens that were guessed and verified in the same step as the one before, and those of them that were right."""
    n_accepted: int


class Batch:
    """Up to `n_parallel` requests at a time through `engine`, in its sequences 0 … n_parallel - 1.

    Sequences do not see each other; each has its own sampler, stop strings and limits. Raises BadRequestError where the
    engine has not as many sequences, or its batches have no room for them.
    """

    def __init__(
        self,
        engine: Engine,
        n_parallel: int,
        *,
        curve: BatchCurve | None = None,
        n_draft: int = 0,
        n_groups: int | None = None,
        load_s: float | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """By `curve` up to `n_draft` tokens a step are drafted from what the text repeats: the answers are the same,
        sooner. `n_groups` is 1, or 2 where both halves work (default: by the curve, 2 without one).
        `on_prefill(done, total)` follows each prompt."""
        placement = engine.placement
        most = min(placement.n_sequences, placement.n_batch)
        if not isinstance(n_parallel, int) or not 1 <= n_parallel <= most:
            raise BadRequestError(
                f"n_parallel must be between 1 and {most} with this model as it is loaded, not {n_parallel!r}."
            )
        both = engine.head is not None and engine.tail is not None
        if n_groups is None:
            n_groups = 2 if curve is None or curve.pays_in_groups(n_parallel) else 1
        self._n_groups = min(n_groups, n_parallel) if both else 1
        self._engine, self._load_s, self._cancelled, self._on_prefill = engine, load_s, cancelled, on_prefill
        self._n_draft = min(n_draft, placement.n_draft) if curve is not None and engine.can_go_back else 0
        self._curve = curve if self._n_draft else None
        half = -(-n_parallel // self._n_groups)
        # Neighbours are filled up from each group's first: llama.cpp takes consecutive sequences together.
        self._order = [seq for i in range(half) for seq in range(i, n_parallel, half)]
        self._half = half
        self._live: dict[int, _Slot] = {}
        self._prefix: State | None = None

    def run(self, supply: Callable[[], Task | None]) -> Generator[Finished, None, None]:
        """Serve requests until `supply` has none left and all are finished; yields each as it ends.

        `supply` is asked whenever a sequence is free, and asked again after it had none, while others are at work.
        Nothing is under way between two results, so that the engine may be used for something else, or left.
        """
        self._engine.settle()
        try:
            while True:
                try:
                    over = self._fill(supply)
                    if not (over or self._cancelled()):
                        over = self._decode()
                except BaseException as error:
                    self._engine.abandon()
                    if not (isinstance(error, Cancelled) and self._cancelled()):
                        raise
                    over = []
                if self._cancelled():
                    over += self._live.values()
                    self._live.clear()
                    for slot in over:
                        slot.reply.interrupt()
                for slot in over:
                    yield slot.finished(self._load_s)
                if self._cancelled() or not (over or self._live):
                    return
        finally:
            for slot in self._live.values():
                slot.close()
            self._live.clear()

    # -- inside --------------------------------------------------------------------------------------------------

    def _fill(self, supply: Callable[[], Task | None]) -> list[_Slot]:
        """Let requests begin where there is room. Returns those that ended at once."""
        over: list[_Slot] = []
        for slot in self._live.values():
            if slot.lost:
                read = [*slot.task.prompt, *slot.reply.tokens[:-1]]
                self._engine.evaluate(read, slot.seq, cancelled=self._cancelled)
                slot.lost = False
        for seq in self._order:
            if seq in self._live:
                continue
            if over or self._cancelled() or (task := supply()) is None:
                break
            slot = self._live[seq] = _Slot(self._engine, seq, task, self._curve)
            self._read(slot)
            if slot.reply.reason:
                over.append(self._live.pop(seq))
        return over

    def _read(self, slot: _Slot) -> None:
        """Evaluate a prompt and draw the first token."""
        start = time.perf_counter()
        slot.n_cached = self._prime(slot)
        rest, tell = slot.task.prompt[slot.n_cached :], self._on_prefill
        self._engine.evaluate(
            rest, slot.seq, progress=tell and (lambda done: tell(done, len(rest))), cancelled=self._cancelled
        )
        slot.prefill_s = time.perf_counter() - start
        if slot.reply.reason is None:
            slot.push(self._engine.sample(slot.sampler))

    def _prime(self, slot: _Slot) -> int:
        """Make the slot's sequence hold the task's prefix and nothing else. Returns how much was there already.

        It was evaluated by itself, wherever it comes from: left in the sequence, or kept from another. (Where a
        sliding window has moved on, the sequence cannot go back to it.)
        """
        engine, seq, prompt = self._engine, slot.seq, slot.task.prompt
        n = min(slot.task.n_prefix, len(prompt) - 1)
        if n <= 0:
            return engine.reuse(prompt, seq)
        prefix = prompt[:n]
        if engine.tokens(seq)[:n] == prefix and engine.trim(n, seq) == n:
            return n
        if self._prefix is not None and self._prefix.tokens == prefix:
            engine.load(self._prefix, seq)
            return n
        engine.trim(0, seq)
        engine.evaluate(prefix, seq, cancelled=self._cancelled)
        slot.n_own_prefix = n
        self._keep(seq)
        return n

    def _keep(self, seq: int) -> None:
        """Remember the prefix that `seq` now holds, if it is not too large."""
        state = self._engine.save(seq)
        self._prefix = state if state.nbytes <= KEPT_BYTES else None

    def _decode(self) -> list[_Slot]:
        """Step after step until a task ends. Returns those that have; nothing is under way then."""
        engine, groups = self._engine, self._groups()
        alone = len(groups) == 1
        over: list[_Slot] = []
        under_way: deque[tuple[list[_Slot], Step]] = deque()
        at = time.perf_counter()
        for group in groups:
            under_way.append((group, self._begin(group, alone)))
        while under_way:
            group, step = under_way.popleft()
            engine.complete(step)
            over += self._draw(group, step)
            now = time.perf_counter()
            for slot in group:
                slot.decode_s += (now - at) / len(group)
            at = now
            if not (over or self._cancelled() or any(slot.lost for slot in self._live.values())):
                under_way.append((group, self._begin(group, alone)))
        for slot in over:
            self._live.pop(slot.seq, None)
        return over

    def _begin(self, group: Sequence[_Slot], alone: bool) -> Step:
        """A step: of each sequence the token drawn last, and what is drafted to follow it."""
        p = self._engine.placement
        room = min(self._n_draft, p.n_batch - len(group))
        rows: dict[int, list[int]] = {}
        for slot in group:
            rows[slot.seq] = slot.next(len(group), room)
            room -= len(rows[slot.seq]) - 1
        return self._engine.begin(rows, alone=alone)

    def _draw(self, group: Sequence[_Slot], step: Step) -> list[_Slot]:
        """Draw the next tokens of each sequence of the step just completed. Returns the slots that are over.

        A draft is right as long as it is what is drawn from the logits before it, by the sequence's own sampler: text
        and distribution are those without drafts. What comes after the first wrong one is taken back.
        """
        i = 0
        for slot in group:
            drafted = step.rows[slot.seq][1:]
            n_right = 0
            for guess in [*drafted, None]:
                token = self._engine.sample(slot.sampler, i + n_right)
                slot.push(token)
                if token != guess or slot.reply.reason:
                    break
                n_right += 1
            i += 1 + len(drafted)
            if drafted and slot.speculation is not None:
                slot.speculation.verified(len(drafted), n_right)
            if n_right < len(drafted) and slot.reply.reason is None:
                self._take_back(slot, len(drafted) - n_right)
        return [slot for slot in group if slot.reply.reason]

    def _take_back(self, slot: _Slot, n: int) -> None:
        """Forget the last n tokens of a sequence; where a half cannot go back, it is read again, and drafts no more."""
        keep = len(self._engine.tokens(slot.seq)) - n
        if self._engine.trim(keep, slot.seq) != keep:
            slot.lost, slot.speculation = True, None

    def _groups(self) -> list[list[_Slot]]:
        """The live slots, by sequence, in one group or two."""
        slots = [self._live[seq] for seq in sorted(self._live)]
        groups = [slots] if self._n_groups == 1 else [
            [slot for slot in slots if slot.seq < self._half],
            [slot for slot in slots if slot.seq >= self._half],
        ]  # fmt: skip
        return [group for group in groups if group]


class _Slot:
    """A task at work in a sequence."""

    def __init__(self, engine: Engine, seq: int, task: Task, curve: BatchCurve | None) -> None:
        self.seq, self.task = seq, task
        self.reply = Reply(engine, len(task.prompt), task.options)
        self.sampler = self.reply.sampler(task.prompt)
        self.n_cached = self.n_own_prefix = 0
        self.prefill_s = self.decode_s = 0.0
        self.lost = False
        self.speculation: Speculation | None = None
        if curve is not None:
            self.speculation = Speculation(task.prompt, curve, engine.placement.n_draft)

    def next(self, n_live: int, room: int) -> list[int]:
        """What to evaluate next: the token drawn last, and up to `room` drafted ones, in a step of n_live sequences."""
        left = min(room, self.reply.limit - len(self.reply.tokens) - 1)  # no more than can still be drawn
        last = self.reply.tokens[-1:]
        return last if self.speculation is None else last + self.speculation.draft(n_live, left)

    def push(self, token: int) -> None:
        """A drawn token."""
        if self.speculation is not None:
            self.speculation.push(token)
        piece = self.reply.push(token, self.sampler)
        if piece and self.task.on_text is not None and self.task.on_text(piece):
            self.reply.interrupt()

    def finished(self, load_s: float | None) -> Finished:
        """The result; the sampler is freed."""
        if (piece := self.reply.finish()) and self.task.on_text is not None:
            self.task.on_text(piece)
        self.close()
        prefilled = self.prefill_s or None
        completion = self.reply.completion(
            n_cached=self.n_cached - self.n_own_prefix, prefill_s=prefilled, load_s=load_s
        )
        s = self.speculation
        n_drafted, n_accepted = (s.n_drafted, s.n_accepted) if s else (0, 0)
        return Finished(self.task, completion, self.prefill_s, self.decode_s, n_drafted, n_accepted)

    def close(self) -> None:
        """Free the sampler. Harmless when repeated."""
        self.sampler.close()
