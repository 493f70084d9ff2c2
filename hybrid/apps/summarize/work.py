"""One prompt to one answer: the place where summarising meets the model.

A `Runner` takes jobs that do not depend on each other and yields answers in whatever order they are finished; the
strategies need no more than that. `Answering` is the one that asks the model.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hybrid.apps.summarize.quality import Problem, cleaned, loop_of, problem, whole_part, without_loop
from hybrid.runtime.batch import Task
from hybrid.runtime.options import options_of

if TYPE_CHECKING:
    from hybrid import Hybrid
    from hybrid.runtime.batch import Finished
    from hybrid.runtime.curve import BatchCurve

LOOK_EVERY = 32
"""Pieces of text between two looks at whether an answer goes round in circles."""
RETRY_PENALTY = 1.15


@dataclass(frozen=True)
class Job:
    """A prompt to answer. `n_prefix` of its tokens are common to the whole phase; `n_text` are of the text to read,
    `n_new` of those for the first time."""

    id: str
    phase: str
    prompt: tuple[int, ...]
    n_prefix: int
    n_text: int
    n_new: int
    max_tokens: int

    @property
    def digest(self) -> str:
        """A hash of the prompt: an answer belongs to exactly this."""
        return hashlib.sha256(np.asarray(self.prompt, np.int32).tobytes()).hexdigest()


@dataclass(frozen=True)
class Answer:
    """What the model made of a job, with what that took. `problem` is what is wrong with it even after a retry."""

    id: str
    text: str
    n_read: int
    """Tokens of the text (`n_text` of the job) that went through the model, counted from what it says it evaluated."""
    n_prompt: int
    n_cached: int
    n_generated: int
    finish: str
    problem: Problem | None = None
    first_problem: Problem | None = None
    """What was wrong before the retry."""
    prefill_s: float = 0.0
    decode_s: float = 0.0
    """Both are shares of the run's time: what several answers had at once is divided among them."""
    n_drafted: int = 0
    n_accepted: int = 0
    """Tokens guessed from what the text repeats, and those of them that the model would have said anyway."""

    @property
    def cut_off(self) -> bool:
        """Whether it ended at its token limit."""
        return self.finish == "length"

    @property
    def whole(self) -> str:
        """The text; of one that was cut off, its whole sentences."""
        return whole_part(self.text) if self.cut_off else self.text


Runner = Callable[[Sequence[Job]], Iterator[Answer]]


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn; `seed` matters at a temperature above 0."""

    temperature: float = 0.0
    seed: int = 0
    repeat_penalty: float = 1.0


@dataclass
class _Ask:
    """A job to put to the model: for the first time, or again after `before`."""

    job: Job
    sampling: Sampling
    before: Answer | None = None


class Answering:
    """Answers jobs, `parallel` at a time, each in a sequence of its own.

    The common prefix is always evaluated by itself, once, and the rest after it, in the same batches whatever was
    evaluated before: one at a time, an answer depends on its prompt alone, so that a resumed run gives what an
    uninterrupted one does.
    """

    def __init__(
        self,
        model: Hybrid,
        sampling: Sampling,
        parallel: int = 1,
        curve: BatchCurve | None = None,
        n_draft: int = 0,
        on_token: Callable[[], None] = lambda: None,
    ) -> None:
        """Up to `n_draft` tokens are drafted by `curve`. `on_token` is called now and then while answers are made."""
        self._model, self._sampling, self._on_token = model, sampling, on_token
        self._batch = model.batch(parallel, curve=curve, n_draft=n_draft)

    def __call__(self, jobs: Sequence[Job]) -> Iterator[Answer]:
        """The answers, as they are finished. A bad one is asked for once more, with a penalty on repetition."""
        asks = [_Ask(job, self._sampling) for job in jobs]
        waiting = deque(range(len(asks)))
        for done in self._model.serve(self._batch, lambda: self._task(asks, waiting)):
            ask = asks[done.task.index]
            answer = _answer(ask.job, done)
            if ask.before is not None:
                answer = _better(ask.before, answer)
            elif answer.problem:
                penalty = max(RETRY_PENALTY, self._sampling.repeat_penalty)
                again = replace(self._sampling, repeat_penalty=penalty, seed=self._sampling.seed + 1)
                waiting.appendleft(len(asks))
                asks.append(_Ask(ask.job, again, answer))
                continue
            yield answer

    def _task(self, asks: Sequence[_Ask], waiting: deque[int]) -> Task | None:
        """What the model is to do next."""
        if not waiting:
            return None
        index = waiting.popleft()
        job, sampling = asks[index].job, asks[index].sampling
        options = options_of(
            max_tokens=job.max_tokens,
            stop=self._model.chat_template.stop,
            temperature=sampling.temperature,
            seed=(sampling.seed + int(job.digest[:8], 16)) % (2**32 - 1) if sampling.temperature else 0,
            repeat_penalty=sampling.repeat_penalty,
        )
        pieces: list[str] = []

        def watch(piece: str) -> bool:
            """Whether the answer goes round in circles; looked at now and then."""
            pieces.append(piece)
            if len(pieces) % LOOK_EVERY:
                return False
            self._on_token()
            return bool(loop_of("".join(pieces)))

        return Task(prompt=job.prompt, options=options, n_prefix=job.n_prefix, index=index, on_text=watch)


def _answer(job: Job, done: Finished) -> Answer:
    completion, text = done.completion, cleaned(done.completion.text)
    return Answer(
        id=job.id,
        text=text,
        n_read=completion.n_prompt_tokens - (len(job.prompt) - job.n_text),
        n_prompt=completion.n_prompt_tokens,
        n_cached=completion.n_cached_tokens,
        n_generated=len(completion.tokens),
        finish=completion.finish_reason,
        problem=problem(text),
        prefill_s=done.prefill_s,
        decode_s=done.decode_s,
        n_drafted=done.n_drafted,
        n_accepted=done.n_accepted,
    )


def _better(first: Answer, again: Answer) -> Answer:
    """Of two tries the one to keep, with what both took."""
    better = first if again.problem == "empty" else again
    return replace(
        better,
        text=without_loop(better.text) if better.problem == "looping" else better.text,
        first_problem=first.problem,
        n_generated=first.n_generated + again.n_generated,
        prefill_s=first.prefill_s + again.prefill_s,
        decode_s=first.decode_s + again.decode_s,
        n_drafted=first.n_drafted + again.n_drafted,
        n_accepted=first.n_accepted + again.n_accepted,
    )
