"""One answer while it is made: its tokens, its text, and whether it is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hybrid.errors import BadRequestError
from hybrid.runtime.completion import Completion, FinishReason, Memory, Timings
from hybrid.runtime.engine import Engine
from hybrid.runtime.grammar import Grammar, stuck
from hybrid.runtime.pipeline import Logits
from hybrid.runtime.sampling import NOTHING, Sampler, SamplingParams
from hybrid.runtime.text import TextStream


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to sample and when to end. `max_tokens` None: when the model ends the text or the context is full."""

    sampling: SamplingParams
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    grammar: str = ""
    """GBNF that the text (not the prompt) follows; "": any text."""
    penalize_prompt: bool = True
    """Whether the penalties see the prompt's tokens too, as in llama-cli."""
    edit_logits: Callable[[Sequence[int], Logits], Logits] | None = None
    """Given the tokens so far and a copy of the logits [n_vocab]: the logits to sample from. This and the next two are
    for `generate` alone, not for several sequences at a time."""
    is_over: Callable[[Sequence[int], Logits], bool] | None = None
    """Given the tokens so far and their logits: whether the text ends here, before the next token."""
    on_token: Callable[[int, Logits], None] | None = None
    """Sees every token that joins the text, before its piece comes out, and the logits it was drawn from."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and (not isinstance(self.max_tokens, int) or self.max_tokens < 0):
            raise BadRequestError(f"max_tokens must be a whole number of 0 or more, not {self.max_tokens!r}.")


class Reply:
    """The answer to a prompt of `n_prompt` tokens. Feed it the sampled tokens until it has a `reason` to end.

    Raises BadRequestError for a prompt that does not fit the context; it is never cut.
    """

    def __init__(self, engine: Engine, n_prompt: int, options: Options) -> None:
        self._engine, self._options = engine, options
        self._vocabulary = engine.vocabulary
        self._started = time.perf_counter()
        self._first_at: float | None = None
        self._waited_s = 0.0
        self._text = TextStream(options.stop)
        self._pieces: list[str] = []
        n_ctx = engine.placement.n_ctx
        if n_prompt > n_ctx:
            raise BadRequestError(
                f"The prompt has {n_prompt} tokens, but the context holds {n_ctx}; raise it with -c or cut the prompt."
            )
        self.n_prompt = n_prompt
        self.tokens: list[int] = []
        self.limit = min(n_ctx + 1 - n_prompt, n_ctx if options.max_tokens is None else options.max_tokens)
        """The most tokens it may have: what was asked for, and one more than the context has room for."""
        self.reason: FinishReason | None = None if self.limit else "length"

    def sampler(self, prompt: Sequence[int]) -> Sampler:
        """A chain of its own, by the options; its penalties have seen `prompt` where they are to."""
        sampling = self._options.sampling.within(self._engine.placement.n_ctx)
        if self._options.ignore_eos:
            never = {token: float("-inf") for token in self._vocabulary.eog_tokens}
            sampling = replace(sampling, logit_bias={**sampling.logit_bias, **never})
        grammar = Grammar(self._options.grammar, self._vocabulary) if self._options.grammar else None
        sampler = Sampler(sampling, self._vocabulary.n_vocab, grammar)
        if self._options.penalize_prompt:
            sampler.accept(prompt)
        return sampler

    def push(self, token: int, sampler: Sampler) -> str:
        """The next token, drawn by `sampler`; returns the text that is now certain, perhaps none.

        Raises EngineError if there is none that the grammar allows, though the text is not complete.
        """
        if token == NOTHING:
            if sampler.grammar is None or not sampler.grammar.complete:
                raise stuck()
            self.end()
            return ""
        if self._first_at is None:
            self._first_at = time.perf_counter()
        if not self._options.ignore_eos and self._vocabulary.is_eog(token):
            self.end()
            return ""
        self.tokens.append(token)
        piece = self._text.push(self._vocabulary.piece(token))
        if piece:
            self._pieces.append(piece)
        if self._text.stopped:
            self.end()
        elif len(self.tokens) >= self.limit:
            self.reason = "length"
        return piece

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While whoever reads the text does something else: no time of ours."""
        start = time.perf_counter()
        yield
        self._waited_s += time.perf_counter() - start

    def end(self) -> None:
        """The text is complete."""
        self.reason = "stop"

    def interrupt(self) -> None:
        """It ends here, unless it has ended by itself."""
        if self.reason != "stop":
            self.reason = "interrupted"

    def finish(self) -> str:
        """No more tokens will come: returns the text that was held back."""
        self._ended = time.perf_counter()
        piece = self._text.finish()
        if piece:
            self._pieces.append(piece)
        return piece

    def completion(self, *, n_cached: int, prefill_s: float | None, load_s: float | None = None) -> Completion:
        """The whole, after `finish`. `prefill_s`: what the prompt's other tokens took; None if they were not read."""
        import psutil  # not before the first token is out

        engine, first_at = self._engine, self._first_at
        decode_s = self._ended - (first_at or self._ended) - self._waited_s
        n = len(self.tokens)
        return Completion(
            "".join(self._pieces),
            tokens=self.tokens,
            n_prompt_tokens=self.n_prompt,
            n_cached_tokens=n_cached,
            finish_reason=self.reason or "length",
            placement=engine.placement,
            timings=Timings(
                load_s=load_s,
                ttft_s=first_at and first_at - self._started,
                prefill_tok_per_s=prefill_s and (self.n_prompt - n_cached) / prefill_s,
                decode_tok_per_s=(n - 1) / decode_s if n > 1 and decode_s > 0 else None,
            ),
            memory=Memory(
                device_bytes=engine.head.nbytes if engine.head is not None else 0,
                host_bytes=psutil.Process().memory_info().rss,
            ),
        )
