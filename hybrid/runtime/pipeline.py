"""The pipeline: chunks of tokens on their way through both halves."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hybrid.errors import Cancelled
from hybrid.runtime.boundary import Parcel
from hybrid.runtime.halves import Halves
from hybrid.runtime.worker import Job, wait_all

Logits = npt.NDArray[np.float32]
T = TypeVar("T")


@dataclass(frozen=True)
class Chunk:
    """Tokens that are evaluated together, at most n_batch of them, of one sequence or of several, one after the other.
    All arrays are [n_tokens]."""

    tokens: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    seqs: npt.NDArray[np.int32]
    outputs: npt.NDArray[np.bool_]


class Pipeline(Halves):
    """What takes a chunk through the head, over the boundary, and through the tail; several of them overlapped."""

    _logits: Logits | None = None
    _threads: tuple[int, int]

    def _use_threads(self, single: int, batch: int) -> None:
        """The tail's threads from now on, for single tokens and for batches of several."""
        if self.tail is not None and self._threads != (single, batch):
            self.tail.set_threads(single, batch)
            self._threads = single, batch

    def _front(self, chunk: Chunk, *, alone: bool) -> Parcel | Logits | None:
        """The head's part, on the head's thread: a hidden state under way, or at k = L the wanted logits. `alone`: the
        tail does not compute meanwhile."""
        assert self.head is not None
        self.head.cache.alone = alone or self.tail is None
        try:
            hidden = self.head.forward(chunk.tokens, chunk.positions, chunk.seqs)
        finally:
            self.head.cache.alone = True
        if self._boundary is not None:
            return self._boundary.send(hidden)
        if not chunk.outputs.any():
            return None
        rows: Logits = self.head.logits(hidden[chunk.outputs.nonzero()[0]]).cpu().numpy()
        return rows

    def _back(self, chunk: Chunk, front: Parcel | Logits | None) -> None:
        """The tail's part: from tokens (k = 0) or hidden states to logits; at k = L they are there already."""
        if not isinstance(front, Parcel):
            if self.tail is not None:
                self.tail.decode(chunk.tokens, chunk.positions, chunk.seqs, chunk.outputs)
            elif front is not None:
                self._logits = front
            return
        assert self.tail is not None
        try:
            self.tail.decode(front.open(), chunk.positions, chunk.seqs, chunk.outputs)
        finally:
            front.release()

    def on_tail_thread(self, work: Callable[[], T]) -> T:
        """Do it on the thread on which the tail computes, always that one: OpenMP, with which llama.cpp's CPU backend
        computes, has a team of threads for each thread that calls it, and where the teams have more threads than there
        are cores, all of them go to sleep at every barrier (libgomp; a token can take twice as long). Interrupted, what
        llama.cpp computes is stopped: on a busy machine a token may take seconds."""
        return work() if self.tail is None else self._tail_thread.do(work, self.tail.abort)

    def _pipeline(
        self,
        chunks: Sequence[Chunk],
        finish: Callable[[Chunk, Parcel | Logits | None], None],
        progress: Callable[[int], None],
    ) -> None:
        """While the tail finishes chunk i, the head works on chunk i + 1. The caller only waits and reports."""
        ready: queue.SimpleQueue[tuple[Chunk, Parcel | Logits | None] | None] = queue.SimpleQueue()
        done: queue.SimpleQueue[int | None] = queue.SimpleQueue()

        def produce() -> None:
            try:
                for chunk in chunks:
                    if self._stopping:
                        return
                    ready.put((chunk, None if self.head is None else self._front(chunk, alone=False)))
            finally:
                ready.put(None)

        fronts: list[Job[None]] = []

        def consume() -> None:
            try:
                if self.head is None:
                    produce()
                else:
                    fronts.append(self._head_thread.submit(produce))  # here, where no Ctrl-C comes between the two
                while (item := ready.get()) is not None:
                    if self._stopping:
                        _drop(item[1])
                    else:
                        finish(*item)
                        done.put(len(item[0].tokens))
            except BaseException:
                self._stopping = True
                while (item := ready.get()) is not None:  # the head may be waiting for a buffer
                    _drop(item[1])
                raise
            finally:
                done.put(None)

        jobs: list[Job[None]] = []
        finished = 0
        try:
            jobs.append(self._tail_thread.submit(consume))
            while (n := done.get()) is not None:
                finished += n
                progress(finished)
        except BaseException:
            self.interrupt()
            raise
        finally:
            wait_all(jobs)
        for job in (*jobs, *fronts):
            job.result()
        if self._stopping:
            raise Cancelled("Interrupted.")


def _drop(front: Parcel | Logits | None) -> None:
    """Give back the buffer of a hidden state nobody will read."""
    if isinstance(front, Parcel):
        front.release()
