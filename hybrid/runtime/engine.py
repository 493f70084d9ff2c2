"""Engine: Head and Tail running one Placement."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from hybrid.errors import BadRequestError, Cancelled, EngineError
from hybrid.model.file import ModelFile
from hybrid.model.spec import ModelSpec
from hybrid.prefix import common_prefix
from hybrid.runtime.boundary import Parcel
from hybrid.runtime.pipeline import Chunk, Logits, Pipeline
from hybrid.runtime.worker import Job
from hybrid.schedule.placement import Placement

if TYPE_CHECKING:
    from hybrid.runtime.sampling import Sampler

Outputs = Literal["last", "all"]

INLINE_TOKENS = 8
"""Batches up to this size go through one half after the other: over before Ctrl-C matters, and decode pays for no
pipeline."""


@dataclass(frozen=True)
class State:
    """A sequence as it was saved: its tokens, and what each half (where it exists) holds of them."""

    tokens: tuple[int, ...]
    head: bytes | None
    tail: bytes | None

    @property
    def nbytes(self) -> int:
        """Host bytes it takes."""
        return len(self.head or b"") + len(self.tail or b"")


@dataclass(frozen=True)
class Step:
    """A batch under way through both halves: `rows` are the tokens it appends to each sequence."""

    rows: Mapping[int, Sequence[int]]
    chunk: Chunk
    front: Job[Parcel | Logits | None] | None
    alone: bool


class Engine(Pipeline):
    """The early layers (`head`, torch) and the late ones (`tail`, llama.cpp) as one model with one KV state.

    `head` is None at k = 0, `tail` at k = L. Both hold the same tokens of every sequence, also after an error or an
    interruption: what one half has beyond the other is rolled back. Each works on a thread of its own, with the
    placement's thread count, so that the halves overlap and Ctrl-C reaches the caller, who only waits. Where Ctrl-C
    comes again before all is rolled back, the next request does the rest (`settle`).
    """

    _unsettled = False
    """The halves may hold different tokens, or be at work for nobody."""
    _n_steps = 0
    """Steps begun and not completed."""

    def __init__(
        self,
        file: ModelFile,
        spec: ModelSpec,
        placement: Placement,
        *,
        vram_budget: int | None = None,
        progress: Callable[[str, float], None] | None = None,
    ) -> None:
        """Load both halves. With `vram_budget` the head gets no more bytes of its device than that."""
        self._tokens: list[list[int]] = [[] for _ in range(placement.n_sequences)]
        self._threads = placement.n_threads_tail, placement.n_threads_tail_batch
        super().__init__(file, spec, placement, vram_budget=vram_budget, progress=progress)

    # -- state ---------------------------------------------------------------------------------------------------

    def tokens(self, seq: int = 0) -> tuple[int, ...]:
        """The tokens both halves hold for `seq`, by position."""
        return tuple(self._tokens[seq])

    def reuse(self, tokens: Sequence[int], seq: int = 0) -> int:
        """Roll `seq` back to the longest prefix it shares with `tokens`, less the last token, whose logits are wanted.

        Returns how many tokens are kept; evaluate the rest. Where a half cannot go back there (a sliding window
        has moved on), the sequence is emptied and 0 returned: right instead of fast.
        """
        self.settle()
        old = self._tokens[seq]
        keep = common_prefix(old, tokens[:-1])
        return self.trim(keep, seq) if keep < len(old) else keep

    def trim(self, n: int, seq: int = 0) -> int:
        """Forget every token of `seq` from position n on, in both halves. Returns n, or 0 where that was impossible."""
        before, self._unsettled = self._unsettled, True
        n = self._trim(n, seq)
        self._unsettled = before
        return n

    def _trim(self, n: int, seq: int) -> int:
        trims = [half.trim for half in (self.head.cache if self.head else None, self.tail) if half is not None]
        if any(trim(seq, n) != n for trim in trims):
            n = 0
            for trim in trims:
                trim(seq, 0)
        del self._tokens[seq][n:]
        return n

    def save(self, seq: int = 0) -> State:
        """The sequence as bytes, exactly, for `load` of this engine."""
        self.settle()
        head = None if self.head is None else self.head.cache.save(seq)
        tail = None if self.tail is None else self.tail.save(seq)
        return State(self.tokens(seq), head, tail)

    def load(self, state: State, seq: int = 0) -> None:
        """Replace `seq` by what was saved, of whichever sequence."""
        self.settle()
        self._unsettled = True
        try:
            self._tokens[seq] = []
            if self.head is not None and state.head is not None:
                self.head.cache.load(seq, state.head)
            if self.tail is not None and state.tail is not None:
                self.tail.load(seq, state.tail)
            self._tokens[seq] = list(state.tokens)
        except BaseException:
            self._trim(0, seq)
            self._unsettled = False
            raise
        self._unsettled = False

    # -- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(
        self,
        tokens: Sequence[int],
        seq: int = 0,
        *,
        outputs: Outputs = "last",
        progress: Callable[[int], None] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Logits | None:
        """Append `tokens` to `seq` through both halves.

        `outputs="all"` returns every token's logits, [n_tokens, n_vocab] float32 (inside `scoring` only, where a tail
        is involved); "last" keeps the last token's for `sample` and `last_logits`. `progress` gets the number of
        tokens done after each chunk. An `interrupt` of before it began is forgotten, unless `cancelled` says that it
        was meant for this one. Raises BadRequestError if the context has no room, Cancelled. If interrupted, the
        sequence holds what both halves had finished, or nothing.
        """
        self.settle()
        held = self._tokens[seq]
        if not tokens:
            raise BadRequestError("There is nothing to evaluate: the prompt has no tokens.")
        self._check_room(seq, len(tokens))
        chunks = list(self._chunks(tokens, len(held), seq, outputs))
        rows: list[Logits] = []

        def finish(chunk: Chunk, front: Parcel | Logits | None) -> None:
            self._back(chunk, front)
            held.extend(chunk.tokens.tolist())
            if outputs == "all":
                rows.append(self._logits if self.tail is None else self.tail.logits_block().copy())  # type: ignore[arg-type]

        self._stopping = False
        if self.tail is not None:
            self.tail.withdraw_abort()
        if cancelled():
            raise Cancelled("Interrupted.")
        self._use_threads(self.placement.n_threads_tail, self.placement.n_threads_tail_batch)
        self._unsettled = True
        try:
            if len(tokens) <= INLINE_TOKENS and len(chunks) == 1:
                chunk = chunks[0]
                front = None if self.head is None else self._head_thread.do(lambda: self._front(chunk, alone=True))
                self.on_tail_thread(lambda: finish(chunk, front))
            else:
                self._pipeline(chunks, finish, progress or (lambda n: None))
        except BaseException:
            self.abandon()
            raise
        self._unsettled = False
        return np.concatenate(rows) if outputs == "all" else None

    def begin(self, rows: Mapping[int, Sequence[int]], *, alone: bool = True) -> Step:
        """Start a batch that appends tokens to several sequences, {sequence: tokens}: the head works on it from now on.

        `complete` ends it; steps are completed in the order in which they began, at most two are under way at a time,
        and those two are of different sequences. `alone`: no other is, so the tail may use all threads. Raises
        BadRequestError if a context has no room.
        """
        for seq, tokens in rows.items():
            self._check_room(seq, len(tokens))
        chunk = _mixed(rows, [len(self._tokens[seq]) for seq in rows])
        self._n_steps += 1
        front = None if self.head is None else self._head_thread.submit(lambda: self._front(chunk, alone=alone))
        return Step(rows, chunk, front, alone)

    def complete(self, step: Step) -> None:
        """The tail's part of a step; afterwards `sample(sampler, i)` draws from the logits of its i-th token.

        If it raises, `abandon` what is under way.
        """
        p = self.placement
        front = None if step.front is None else step.front.result()
        self._use_threads(*((p.n_threads_tail,) * 2 if step.alone else (p.n_threads_tail_batch,) * 2))
        self.on_tail_thread(lambda: self._back(step.chunk, front))
        for seq, tokens in step.rows.items():
            self._tokens[seq].extend(tokens)
        self._n_steps -= 1

    def abandon(self) -> None:
        """Forget what is under way or failed: the halves go back to what both hold."""
        self._unsettled = True
        self.interrupt()
        self._wait_until_idle()
        if self._boundary is not None:
            self._boundary.reset()
        for seq, held in enumerate(self._tokens):
            self._trim(len(held), seq)
        self._n_steps = 0
        self._unsettled = self._stopping = False

    def settle(self) -> None:
        """At the beginning of a request, when nothing is under way for anybody else: `abandon` what Ctrl-C, pressed
        again and again, has not let the one before."""
        if self._unsettled or self._n_steps:
            self.abandon()

    @contextlib.contextmanager
    def scoring(self) -> Iterator[None]:
        """Within this block all-token outputs are possible: llama.cpp needs room for n_batch rows of logits.

        Entering and leaving empties every sequence.
        """
        self.settle()
        if self.tail is None:
            yield
            return
        self._reopen_tail(self.placement.n_batch)
        try:
            yield
        finally:
            self._reopen_tail(None)

    def sample(self, sampler: Sampler, i: int = -1, edit: Callable[[Logits], Logits] | None = None) -> int:
        """The next token from the logits of the last batch's token `i` (negative: of its outputs, from the end), or
        from what `edit` makes of a copy of them.

        NOTHING (of `hybrid.runtime.sampling`) where the sampler's grammar allows none.
        Raises EngineError for logits that are not finite: llama.cpp would draw from them without a word.
        """
        row = self.logits(i)
        if not np.isfinite(row.max()):
            raise EngineError("The model computed logits that are not numbers; its file may be damaged.")
        if edit is not None:
            return sampler.sample(edit(row.copy()))
        if sampler.takes_the_largest:
            return sampler.largest(row)
        if self.tail is not None and sampler.grammar is None:
            return sampler.sample_from(self.tail.context, i)
        return sampler.sample(row)

    def last_logits(self) -> Logits:
        """The last evaluated token's logits, [n_vocab]; valid until the next evaluation."""
        return self.logits(-1)

    def logits(self, i: int) -> Logits:
        """The same of the last batch's token `i`, or if negative, of its outputs counted from the end."""
        if self.tail is not None:
            row: Logits = self.tail.logits(i)
            return row
        if self._logits is None:
            raise BadRequestError("There are no logits yet: evaluate a token first.")
        own: Logits = self._logits[i]
        return own

    def close(self) -> None:
        """Free both halves. Calling it again does nothing."""
        super().close()
        self._logits = None

    # -- inside --------------------------------------------------------------------------------------------------

    def _chunks(self, tokens: Sequence[int], start: int, seq: int, outputs: Outputs) -> Iterator[Chunk]:
        ids = np.asarray(tokens, np.int32)
        wanted = np.full(len(ids), outputs == "all")
        wanted[-1] = True
        for i in range(0, len(ids), self.placement.n_batch):
            part = slice(i, i + self.placement.n_batch)
            n = len(ids[part])
            positions = np.arange(start + i, start + i + n, dtype=np.int32)
            yield Chunk(ids[part], positions, np.full(n, seq, np.int32), wanted[part])

    def _check_room(self, seq: int, n: int) -> None:
        """Raise BadRequestError where `seq` has no room for n more tokens."""
        n += len(self._tokens[seq])
        if n > self.placement.n_ctx:
            raise BadRequestError(f"{n} tokens do not fit the context of {self.placement.n_ctx} tokens.")

    def _reopen_tail(self, n_outputs_max: int | None) -> None:
        tail = self.tail
        assert tail is not None
        self._unsettled = True
        try:
            self.on_tail_thread(lambda: tail.reopen(n_outputs_max))  # where no Ctrl-C leaves it without a context
        finally:  # one that failed has left a fresh context, too
            self._threads = self.placement.n_threads_tail, self.placement.n_threads_tail_batch
            if tail.context:
                for seq in range(self.placement.n_sequences):
                    self._trim(0, seq)
        self._unsettled = False


def _mixed(rows: Mapping[int, Sequence[int]], starts: Sequence[int]) -> Chunk:
    """One chunk of several sequences' next tokens, all of whose logits are wanted."""
    counts = [len(tokens) for tokens in rows.values()]
    positions = [np.arange(start, start + n, dtype=np.int32) for start, n in zip(starts, counts, strict=True)]
    return Chunk(
        np.asarray([token for tokens in rows.values() for token in tokens], np.int32),
        np.concatenate(positions),
        np.repeat(np.asarray(list(rows), np.int32), counts),
        np.ones(sum(counts), np.bool_),
    )
