"""One prompt to one answer: the place where summarising meets the model.

A `Runner` takes jobs that do not depend on each other and yields answers in whatever order they are finished; the
strategies need no more than that. `Sequential` answers one after the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hybrid.apps.summarize.quality import Problem, cleaned, loop_of, problem, without_loop
from hybrid.errors import EngineError

if TYPE_CHECKING:
    from hybrid import Completion, Hybrid

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


Runner = Callable[[Sequence[Job]], Iterator[Answer]]


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn; `seed` matters at a temperature above 0."""

    temperature: float = 0.0
    seed: int = 0
    repeat_penalty: float = 1.0


class Sequential:
    """Answers jobs one after the other in sequence 0.

    The common prefix is always evaluated by itself and the rest after it, in the same batches whatever was evaluated
    before: an answer depends on its prompt alone, so that a resumed run gives what an uninterrupted one does.
    """

    def __init__(self, model: Hybrid, sampling: Sampling, on_token: Callable[[], None] = lambda: None) -> None:
        """`on_token` is called now and then while an answer is made."""
        self._model, self._sampling, self._on_token = model, sampling, on_token

    def __call__(self, jobs: Sequence[Job]) -> Iterator[Answer]:
        """The answers, in the order of the jobs. A bad one is asked for once more, with a penalty on repetition."""
        for job in jobs:
            answer = self._ask(job, self._sampling)
            if answer.problem:
                penalty = max(RETRY_PENALTY, self._sampling.repeat_penalty)
                again = self._ask(job, replace(self._sampling, repeat_penalty=penalty, seed=self._sampling.seed + 1))
                better = answer if again.problem == "empty" else again
                answer = replace(
                    better,
                    text=without_loop(better.text) if better.problem == "looping" else better.text,
                    first_problem=answer.problem,
                    n_generated=answer.n_generated + again.n_generated,
                    prefill_s=answer.prefill_s + again.prefill_s,
                    decode_s=answer.decode_s + again.decode_s,
                )
            yield answer

    def _ask(self, job: Job, sampling: Sampling) -> Answer:
        import time

        start = time.perf_counter()
        self._prime(job.prompt[: job.n_prefix])
        primed_s = time.perf_counter() - start
        text, completion = self._complete(job, sampling)
        timings = completion.timings
        n_new, n_made = completion.n_prompt_tokens - completion.n_cached_tokens, len(completion.tokens)
        return Answer(
            id=job.id,
            text=text,
            n_read=completion.n_prompt_tokens - (len(job.prompt) - job.n_text),
            n_prompt=completion.n_prompt_tokens,
            n_cached=completion.n_cached_tokens,
            n_generated=n_made,
            finish=completion.finish_reason,
            problem=problem(text),
            prefill_s=primed_s + (n_new / timings.prefill_tok_per_s if timings.prefill_tok_per_s else 0.0),
            decode_s=(n_made - 1) / timings.decode_tok_per_s if timings.decode_tok_per_s else 0.0,
        )

    def _complete(self, job: Job, sampling: Sampling) -> tuple[str, Completion]:
        stream = self._model.generate(
            job.prompt,
            max_tokens=job.max_tokens,
            temperature=sampling.temperature,
            seed=(sampling.seed + int(job.digest[:8], 16)) % (2**32 - 1) if sampling.temperature else 0,
            repeat_penalty=sampling.repeat_penalty,
            stop=self._model.chat_template.stop,
            stream=True,
        )
        pieces: list[str] = []
        for piece in stream:
            pieces.append(piece)
            if len(pieces) % LOOK_EVERY == 0:
                self._on_token()
                if loop_of("".join(pieces)):
                    stream.cancel()
        if stream.completion is None:
            raise EngineError("The answer ended before it was complete.")
        return cleaned(stream.completion.text), stream.completion

    def _prime(self, prefix: tuple[int, ...]) -> None:
        """Make sequence 0 hold exactly `prefix`, evaluated by itself."""
        engine = self._model.engine
        held = engine.tokens()
        if held[: len(prefix)] == prefix and engine.trim(len(prefix)) == len(prefix):
            return
        engine.trim(0)
        if prefix:
            engine.evaluate(prefix)
