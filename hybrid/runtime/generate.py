"""The generation loop: prompt tokens in, pieces of text out."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence

from hybrid.errors import Cancelled
from hybrid.runtime.completion import Completion
from hybrid.runtime.engine import Engine
from hybrid.runtime.reply import Options, Reply


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
    reply = Reply(engine, len(prompt), options)
    prefill_s: float | None = None
    with reply.sampler() as sampler:
        sampler.accept(prompt)
        reused = engine.reuse(prompt)
        rest = prompt[reused:]

        def follow(done: int) -> None:
            if cancelled():  # it may have been said before there was anything to interrupt
                engine.interrupt()
            if on_prefill is not None:
                on_prefill(done, len(rest))

        try:
            engine.evaluate(rest, progress=follow)
            prefill_s = time.perf_counter() - start
        except Cancelled:
            if not cancelled():
                raise
            reply.interrupt()
        edit, is_over = options.edit_logits, options.is_over

        def so_far() -> list[int]:
            return [*prompt, *reply.tokens]

        while reply.reason is None:
            if is_over is not None and is_over(so_far(), engine.last_logits()):
                reply.end()
                break
            token = engine.sample(sampler, edit=edit and (lambda logits: edit(so_far(), logits)))
            n = len(reply.tokens)
            piece = reply.push(token, sampler)
            if options.on_token is not None and len(reply.tokens) > n:
                options.on_token(token, engine.last_logits())
            if piece:
                with reply.paused():
                    yield piece
            if cancelled():
                reply.interrupt()
            if reply.reason:
                break
            try:
                engine.evaluate([token])
            except Cancelled:
                if not cancelled():
                    raise
                reply.interrupt()
    if piece := reply.finish():
        yield piece
    return reply.completion(n_cached=reused, prefill_s=prefill_s, load_s=load_s)
