"""Sampling: llama.cpp's own sampler chain, for logits of either half."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hybrid.errors import BadRequestError, EngineError
from hybrid.tail.llama import lib as llama_cpp

if TYPE_CHECKING:
    from hybrid.runtime.grammar import Grammar

RANDOM_SEED = 0xFFFFFFFF
"""llama.cpp's LLAMA_DEFAULT_SEED: draw a fresh seed."""
NOTHING = -1
"""In place of a token: there is none that may come next."""
N_NEXT_BEST = 256
"""How many of the likeliest tokens are tried against a grammar before all of them are."""
MIROSTAT_M = 100
"""Candidates by which Mirostat 1 estimates a distribution's slope, as in llama.cpp."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What llama.cpp's `common_params_sampling` calls the same; defaults are llama-cli's. `temperature` 0 is greedy."""

    temperature: float = 0.8
    top_k: int = 40
    """0 or negative: off."""
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    mirostat: int = 0
    """1 or 2: that version of Mirostat instead of the truncations (top-k, top-p, min-p, typical-p)."""
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    """Tokens the penalties look back on; 0: off, -1: as many as the context holds."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> value added to its logit; -inf bans it."""

    def __post_init__(self) -> None:
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "typical_p",
            "mirostat_tau",
            "mirostat_eta",
            "repeat_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                raise BadRequestError(f"{name} must be a finite number, not {value!r}.")
        if self.temperature < 0:
            raise BadRequestError(f"temperature must be 0 (greedy) or more, not {self.temperature}.")
        for name in ("top_p", "min_p", "typical_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadRequestError(f"{name} must lie between 0 and 1, not {getattr(self, name)}.")
        if self.mirostat not in (0, 1, 2):
            raise BadRequestError(f"mirostat must be 0 (off), 1 or 2, not {self.mirostat!r}.")
        if self.repeat_penalty <= 0:
            raise BadRequestError(f"repeat_penalty must be above 0 (1 switches it off), not {self.repeat_penalty}.")
        for name in ("top_k", "repeat_last_n"):
            value = getattr(self, name)
            if not isinstance(value, int) or not -1 <= value < 2**31:
                raise BadRequestError(f"{name} must be a whole number between -1 and {2**31 - 1}, not {value!r}.")
        if self.seed is not None and not (isinstance(self.seed, int) and -1 <= self.seed <= RANDOM_SEED):
            raise BadRequestError(f"seed must be a whole number between 0 and {RANDOM_SEED}, not {self.seed!r}.")
        if any(math.isnan(bias) for bias in self.logit_bias.values()):
            raise BadRequestError("logit_bias values must be numbers, not nan.")

    def within(self, n_ctx: int) -> SamplingParams:
        """The same for a context of n_ctx tokens: the penalties look back on no more (llama.cpp makes room for all of
        them), and -1 says how many that is."""
        n = self.repeat_last_n
        return replace(self, repeat_last_n=n_ctx if n == -1 else min(n, n_ctx))

    @property
    def is_argmax(self) -> bool:
        """Whether sampling means no more than taking the token with the largest logit, biases added."""
        return self.temperature == 0 and not self.has_penalties

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens matter."""
        one, other = self.frequency_penalty, self.presence_penalty
        return bool(self.repeat_last_n and (self.repeat_penalty != 1 or one or other))


class Sampler:
    """One chain for one sequence: logit bias, penalties, then greedy or top-k, typical-p, top-p, min-p, temperature,
    draw (the order of llama-cli; with Mirostat temperature and Mirostat, as there). Call `accept` with prompt tokens so
    that the penalties see them.

    With a `grammar`, whose state it advances, only `sample` may be used. As in llama.cpp's own programs the chain draws
    first, and only where the grammar refuses that token are all of them masked by it and one drawn again: asking it
    about one token costs next to nothing, about all of them as much as a small model's decode. (Greedily, the likeliest
    few are asked about before all.) `close` frees both; so does a constructor that raises.
    """

    def __init__(self, params: SamplingParams, n_vocab: int, grammar: Grammar | None = None) -> None:
        self.grammar = grammar
        lib = self._lib = llama_cpp()
        self._chain: Any = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        try:
            if not self._chain:
                raise EngineError("llama.cpp could not make a sampler chain.")
            for sampler in _samplers(lib, params, n_vocab):
                lib.llama_sampler_chain_add(self._chain, sampler)
        except BaseException:
            self.close()
            raise
        self._remembers = params.has_penalties
        self.takes_the_largest = params.is_argmax and grammar is None
        """Whether it has no state and always takes the token with the largest logit: `largest` is the same, sooner."""
        self._biased = np.array(list(params.logit_bias), np.int64)
        self._biases = np.array(list(params.logit_bias.values()), np.float32)
        self._greedy = params.temperature == 0
        self._banned = [token for token, bias in params.logit_bias.items() if bias == -math.inf]
        self._ids = np.arange(n_vocab, dtype=np.int32)
        self._candidates: npt.NDArray[Any] | None = None

    def largest(self, logits: npt.NDArray[np.float32]) -> int:
        """The token with the largest of `logits` [n_vocab], biases added; the first of several, as in llama.cpp."""
        if self._biased.size:
            logits = logits.copy()
            logits[self._biased] += self._biases
        return int(logits.argmax())

    def sample_from(self, context: Any, index: int) -> int:
        """The next token from output `index` of a llama.cpp context's last decode; accepted into the penalties."""
        return int(self._lib.llama_sampler_sample(self._chain, context, index))

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        """The next token from `logits` [n_vocab], whoever computed them; accepted into penalties and grammar.
        NOTHING where the grammar allows none that the logit bias does not ban.

        Raises EngineError for logits that are not numbers: the chain would draw from them without a word.
        """
        if np.isnan(logits.max()):
            raise EngineError("The model computed logits that are not numbers.")
        token = self._draw(logits)
        if self.grammar is not None and not self.grammar.allows(token):
            token = self._next_best(self.grammar) if self._greedy else NOTHING
            token = self._draw(logits, self.grammar) if token == NOTHING else token
        if token != NOTHING:
            self._lib.llama_sampler_accept(self._chain, token)
            if self.grammar is not None:
                self.grammar.accept(token)
        return token

    def _draw(self, logits: npt.NDArray[np.float32], grammar: Grammar | None = None) -> int:
        """A token by the chain, out of those `grammar` allows; NOTHING where there is none."""
        if self._candidates is None:
            dtype = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
            self._candidates = np.empty(len(self._ids), dtype)
        candidates = self._candidates
        candidates["id"] = self._ids  # the chain reorders them in place
        candidates["logit"] = logits
        candidates["p"] = 0.0
        lib = self._lib
        data = ctypes.cast(candidates.ctypes.data, lib.llama_token_data_p)
        array = lib.llama_token_data_array(data, len(self._ids), -1, False)
        if grammar is not None:
            grammar.mask(ctypes.byref(array), candidates["id"], candidates["logit"])
            candidates["logit"][self._banned] = -np.inf
            if candidates["logit"].max() == -np.inf:  # llama.cpp would draw one of them nevertheless
                return NOTHING
        lib.llama_sampler_apply(self._chain, ctypes.byref(array))
        if not 0 <= array.selected < array.size:
            raise EngineError("llama.cpp's sampler chose no token.")
        return int(array.data[array.selected].id)

    def _next_best(self, grammar: Grammar) -> int:
        """The likeliest token that `grammar` allows, if it is among the likeliest N_NEXT_BEST of the last draw, whose
        bias and penalties their logits carry: then none beyond them can be likelier. NOTHING if it is not."""
        assert self._candidates is not None
        n = min(N_NEXT_BEST, len(self._candidates))
        best = np.sort(np.argpartition(self._candidates["logit"], -n)[-n:])
        few = self._candidates[best]
        array = self._lib.llama_token_data_array(
            ctypes.cast(few.ctypes.data, self._lib.llama_token_data_p), n, -1, False
        )
        grammar.mask(ctypes.byref(array), few["id"], few["logit"])
        i = int(few["logit"].argmax())
        return NOTHING if few["logit"][i] == -np.inf else int(few["id"][i])

    def accept(self, tokens: Iterable[int]) -> None:
        """Let the penalties see tokens that were not sampled here."""
        if not self._remembers:
            return
        for token in tokens:
            self._lib.llama_sampler_accept(self._chain, token)

    def close(self) -> None:
        """Free the chain and the grammar; calling it again does nothing."""
        if self._chain:
            self._lib.llama_sampler_free(self._chain)
            self._chain = None
        if self.grammar is not None:
            self.grammar.close()

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _samplers(lib: Any, params: SamplingParams, n_vocab: int) -> Iterable[Any]:
    if params.logit_bias:
        for token in params.logit_bias:
            if not 0 <= token < n_vocab:
                raise BadRequestError(f"logit_bias names token {token}, but the vocabulary has {n_vocab} tokens.")
        bias = (lib.llama_logit_bias * len(params.logit_bias))(*params.logit_bias.items())
        yield lib.llama_sampler_init_logit_bias(n_vocab, len(params.logit_bias), bias)
    if params.has_penalties:
        yield lib.llama_sampler_init_penalties(
            n_vocab, params.repeat_last_n, params.repeat_penalty, params.frequency_penalty, params.presence_penalty
        )
    if params.temperature == 0:
        yield lib.llama_sampler_init_greedy()
        return
    seed = RANDOM_SEED if params.seed in (None, -1) else params.seed
    if params.mirostat:
        yield lib.llama_sampler_init_temp(params.temperature)
        tau, eta = params.mirostat_tau, params.mirostat_eta
        if params.mirostat == 1:
            yield lib.llama_sampler_init_mirostat(n_vocab, seed, tau, eta, MIROSTAT_M)
        else:
            yield lib.llama_sampler_init_mirostat_v2(seed, tau, eta)
        return
    if params.top_k > 0:
        yield lib.llama_sampler_init_top_k(params.top_k)
    if params.typical_p < 1:
        yield lib.llama_sampler_init_typical(params.typical_p, 1)
    if params.top_p < 1:
        yield lib.llama_sampler_init_top_p(params.top_p, 1)
    if params.min_p > 0:
        yield lib.llama_sampler_init_min_p(params.min_p, 1)
    yield lib.llama_sampler_init_temp(params.temperature)
    yield lib.llama_sampler_init_dist(seed)
