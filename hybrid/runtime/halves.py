"""Halves: Head and Tail, loaded side by side and closed together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hybrid.errors import Cancelled
from hybrid.model.file import ModelFile
from hybrid.model.spec import ModelSpec
from hybrid.runtime.boundary import Boundary
from hybrid.runtime.worker import Job, Worker, wait_all
from hybrid.schedule.placement import Placement

if TYPE_CHECKING:
    from hybrid.head.head import Head
    from hybrid.tail.tail import Tail
    from hybrid.tail.vocab import Vocabulary


class Halves:
    """The two halves of a placement, each with a thread of its own, and the boundary between them.

    `head` is None at k = 0, `tail` at k = L.
    """

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
        self.file, self.spec, self.placement = file, spec, placement
        self._vram_budget = vram_budget
        self.head: Head | None = None
        self.tail: Tail | None = None
        self._vocabulary: Vocabulary | None = None
        self._boundary: Boundary | None = None
        self._stopping = False  # a bool, because setting a threading.Event can be interrupted with its lock held
        self._importing = False
        self._tail_thread = Worker("hybrid-tail")
        self._head_thread = Worker("hybrid-head")
        try:
            self._load(progress or (lambda part, done: None))
        except BaseException:
            self.close()
            raise

    @property
    def vocabulary(self) -> Vocabulary:
        """llama.cpp's tokenizer for this model."""
        assert self._vocabulary is not None
        return self._vocabulary

    @property
    def can_go_back(self) -> bool:
        """Whether the last tokens of a sequence can be forgotten again: not where a layer's state is recurrent."""
        tail = self.tail  # another thread may be closing
        return tail is None or tail.can_go_back

    @property
    def notes(self) -> list[str]:
        """What the user should know, a sentence each: weights that could not stay quantised, memory not pinned."""
        return [note for part in (self.head, self._boundary) if part is not None for note in part.notes]

    def interrupt(self) -> None:
        """From any thread: stop the evaluation under way, which raises Cancelled. Harmless when there is none."""
        self._stopping = True
        tail = self.tail  # another thread may be closing
        if tail is not None:
            tail.abort()

    def close(self) -> None:
        """Free both halves. Calling it again does nothing."""
        self._stopping = True
        self._head_thread.close(wait=not self._importing)  # an import holds nothing of ours, and cannot be stopped
        self._tail_thread.close()
        for part in (self._vocabulary, self.tail, self.head):
            if part is not None:
                part.close()
        self.head = self.tail = self._vocabulary = self._boundary = None

    # -- inside --------------------------------------------------------------------------------------------------

    def _wait_until_idle(self) -> None:
        """Until both threads have done what they were given, also a job whose `submit` Ctrl-C never let return."""
        wait_all([thread.submit(lambda: None) for thread in (self._head_thread, self._tail_thread)])

    def _load(self, progress: Callable[[str, float], None]) -> None:
        """Both halves at the same time; the first failure (or Ctrl-C) stops the other."""
        k, n_layers = self.placement.n_gpu_layers, self.spec.n_layers

        def begin(thread: Worker, load: Callable[[Callable[[float], None]], None], part: str) -> Job[None]:
            def work() -> None:
                try:
                    load(lambda done: progress(part, done))
                except BaseException:
                    self._stopping = True
                    raise

            return thread.submit(work)

        jobs: list[Job[None]] = []
        try:
            if k > 0:
                jobs.append(begin(self._head_thread, self._load_head, "head"))
            jobs.append(begin(self._tail_thread, self._load_tail if k < n_layers else self._load_vocabulary, "tail"))
            for job in jobs:
                job.wait()
        except BaseException:
            self._stopping = True  # Ctrl-C: `close` waits until both have seen it
            raise
        for job in sorted(jobs, key=lambda job: isinstance(job.error, Cancelled)):  # the cause before its effect
            job.result()
        if self.head is not None and self.tail is not None:
            self._boundary = Boundary(self.placement.device, self.placement.n_batch, self.spec.n_embd)

    def _load_head(self, progress: Callable[[float], None]) -> None:
        self._importing = True  # from here on `close` does not wait; before, it was in time to be seen
        self._check_stopping()
        import torch  # 1.4 s, and k = 0 never pays it

        from hybrid.head.head import Head

        self._importing = False
        self._check_stopping()
        torch.set_num_threads(self.placement.n_threads_head)  # of this thread, on which the head does all its work
        self.head = Head(
            self.file,
            self.spec,
            self.placement,
            vram_budget=self._vram_budget,
            progress=progress,
            cancelled=lambda: self._stopping,
        )

    def _check_stopping(self) -> None:
        if self._stopping:
            raise Cancelled("Loading was interrupted.")

    def _load_tail(self, progress: Callable[[float], None]) -> None:
        from hybrid.tail.tail import Tail

        self.tail = Tail(self.file, self.spec, self.placement, progress=progress, cancelled=lambda: self._stopping)
        self._vocabulary = self.tail.vocabulary

    def _load_vocabulary(self, progress: Callable[[float], None]) -> None:
        from hybrid.tail.vocab import Vocabulary

        self._vocabulary = Vocabulary.open(self.file.path)
