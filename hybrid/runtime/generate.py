"""The generation loop: prompt tokens in, pieces of text out."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import psutil

from hybrid.errors import BadRequestError, Cancelled
from hybrid.runtime.completion import Completion, FinishReason, Memory, Timings
from hybrid.runtime.engine import Engine
from hybrid.runtime.sampling import Sampler, SamplingParams
from hybrid.runtime.text import TextStream


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to sample and when to end. `max_tokens` None: when the model ends the text or the context is full."""

    sampling: SamplingParams
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and (not isinstance(self.max_tokens, int) or self.max_tokens < 0):
            raise BadRequestError(f"max_tokens must be a whole number of 0 or more, not {self.max_tokens!r}.")


def generate(
    engine: Engine,
    prompt: Sequence[int],
    options: Options,
    *,
    load_s: float | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    on_prefill: Callable[[int, int], None] | None = None,
) -> Generator[str, None, Completion]:
    """Continue `prompt`, reusing what sequence 0 already holds of it; yields text as it becomes certain.

    `on_prefill(done, total)` follows a prompt of several chunks. Returns the Completion. Raises BadRequestError if the
    prompt does not fit the context; it is never cut.
    """
    start = time.perf_counter()
    n_ctx = engine.placement.n_ctx
    if len(prompt) > n_ctx:
        raise BadRequestError(
            f"The prompt has {len(prompt)} tokens, but the context holds {n_ctx}; raise it with -c or cut the prompt."
        )
    vocabulary = engine.vocabulary
    sampling = options.sampling
    if options.ignore_eos:
        never = {token: float("-inf") for token in vocabulary.eog_tokens}
        sampling = replace(sampling, logit_bias={**sampling.logit_bias, **never})
    text = TextStream(options.stop)
    made: list[int] = []
    pieces: list[str] = []
    reason: FinishReason = "length"
    first_at: float | None = None
    waited_s = 0.0  # while whoever reads the pieces did something else
    limit = n_ctx if options.max_tokens is None else options.max_tokens
    with Sampler(sampling, vocabulary.n_vocab) as sampler:
        sampler.accept(prompt)
        reused = engine.reuse(prompt)
        rest = prompt[reused:]
        try:
            engine.evaluate(rest, progress=on_prefill and (lambda done: on_prefill(done, len(rest))))
        except Cancelled:
            if not cancelled():
                raise
            reason, limit = "interrupted", 0
        prefill_s = time.perf_counter() - start if reason != "interrupted" else None
        while len(made) < limit:
            token = engine.sample(sampler)
            first_at = first_at or time.perf_counter()
            if not options.ignore_eos and vocabulary.is_eog(token):
                reason = "stop"
                break
            made.append(token)
            if piece := text.push(vocabulary.piece(token)):
                pieces.append(piece)
                paused = time.perf_counter()
                yield piece
                waited_s += time.perf_counter() - paused
            if text.stopped:
                reason = "stop"
                break
            if cancelled():
                reason = "interrupted"
                break
            if len(made) == limit or len(prompt) + len(made) > n_ctx:
                break
            try:
                engine.evaluate([token])
            except Cancelled:
                if not cancelled():
                    raise
                reason = "interrupted"
                break
    end = time.perf_counter()
    if piece := text.finish():
        pieces.append(piece)
        yield piece
    decode_s = end - (first_at or end) - waited_s
    return Completion(
        "".join(pieces),
        tokens=made,
        n_prompt_tokens=len(prompt),
        n_cached_tokens=reused,
        finish_reason=reason,
        placement=engine.placement,
        timings=Timings(
            load_s=load_s,
            ttft_s=first_at and first_at - start,
            prefill_tok_per_s=prefill_s and len(rest) / prefill_s,
            decode_tok_per_s=(len(made) - 1) / decode_s if len(made) > 1 and decode_s > 0 else None,
        ),
        memory=Memory(
            device_bytes=engine.head.nbytes if engine.head is not None else 0,
            host_bytes=psutil.Process().memory_info().rss,
        ),
    )
