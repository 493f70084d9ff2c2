"""Sampling goes through llama.cpp's chain, whichever half made the logits."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid.errors import BadRequestError, EngineError
from hybrid.runtime.grammar import Grammar
from hybrid.runtime.sampling import Sampler, SamplingParams
from hybrid.tail.reference import Reference
from hybrid.tail.vocab import Vocabulary

CHAINS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 7},
    {"seed": 7, "temperature": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"seed": 3, "repeat_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"seed": 5, "logit_bias": {5: 8.0, 6: float("-inf")}},
]


@pytest.mark.parametrize("options", CHAINS)
def test_the_same_logits_give_the_same_tokens_from_numpy_and_from_a_context(
    llama_f32: Path, options: dict[str, Any]
) -> None:
    params = SamplingParams(**options)
    with (
        Reference(llama_f32, n_ctx=64) as reference,
        Sampler(params, reference.n_vocab) as there,
        Sampler(params, reference.n_vocab) as here,
    ):
        reference.evaluate([1, 70, 80])
        for _ in range(20):
            row = reference.logits(-1).copy()
            token = there.sample_from(reference.context, -1)
            assert here.sample(row) == token
            reference.evaluate([token])


@pytest.mark.parametrize("bias", [{}, {3: 2.0, 7: float("-inf")}])
def test_the_short_way_to_a_greedy_token_gives_the_chains(bias: dict[int, float]) -> None:
    rng = np.random.default_rng(3)
    with Sampler(SamplingParams(temperature=0, logit_bias=bias), 40) as sampler:
        assert sampler.takes_the_largest
        for _ in range(50):
            logits = rng.integers(0, 6, 40).astype(np.float32)  # with ties
            before = logits.copy()
            assert sampler.largest(logits) == sampler.sample(logits)
            assert np.array_equal(logits, before)
    for other in ({"temperature": 0.5}, {"temperature": 0, "repeat_penalty": 1.1}):
        with Sampler(SamplingParams(**other), 40) as sampler:
            assert not sampler.takes_the_largest


def test_greedy_takes_the_argmax_and_a_ban_the_next() -> None:
    logits = np.array([0.0, 3.0, 2.0, 1.0], np.float32)
    with closing(Sampler(SamplingParams(temperature=0), 4)) as greedy:
        assert greedy.sample(logits) == 1
    with closing(Sampler(SamplingParams(temperature=0, logit_bias={1: float("-inf")}), 4)) as banned:
        assert banned.sample(logits) == 2


def test_penalties_see_accepted_tokens() -> None:
    logits = np.array([1.0, 3.0, 2.9, 1.0], np.float32)
    with Sampler(SamplingParams(temperature=0, repeat_penalty=2.0), 4) as sampler:
        sampler.accept([1])
        assert sampler.sample(logits) == 2


def test_a_seed_repeats_and_seeds_differ() -> None:
    logits = np.zeros(1000, np.float32)

    def draw(seed: int | None) -> list[int]:
        with Sampler(SamplingParams(seed=seed, top_k=0, min_p=0.0, top_p=1.0), 1000) as sampler:
            return [sampler.sample(logits) for _ in range(8)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert draw(None) != draw(None)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"repeat_penalty": 0.0},
        {"top_k": 2**40},
        {"seed": -2},
        {"seed": 2**32},
        {"logit_bias": {0: float("nan")}},
    ],
)
def test_senseless_parameters_are_named(bad: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match=next(iter(bad))):
        SamplingParams(**bad)


def test_a_bias_on_no_token_is_refused() -> None:
    with pytest.raises(BadRequestError, match="token 9"):
        Sampler(SamplingParams(logit_bias={9: 1.0}), 4)


def test_logits_that_are_no_numbers_are_an_error_not_an_abort() -> None:
    with Sampler(SamplingParams(seed=1), 4) as sampler, pytest.raises(EngineError, match="not numbers"):
        sampler.sample(np.full(4, np.nan, np.float32))


def test_penalties_look_back_on_no_more_than_the_context_and_minus_one_on_all_of_it() -> None:
    for asked, given in ((-1, 64), (0, 0), (16, 16), (2**31 - 1, 64)):  # llama.cpp makes room for as many as it is told
        assert SamplingParams(repeat_last_n=asked).within(64).repeat_last_n == given


def test_a_sampler_that_cannot_be_made_frees_its_grammar(llama_f32: Path) -> None:
    with Vocabulary.open(llama_f32) as vocabulary:
        for token in (vocabulary.n_vocab, 2**70):
            grammar = Grammar('root ::= "a"', vocabulary)
            with pytest.raises(BadRequestError, match="logit_bias"):
                Sampler(SamplingParams(logit_bias={token: 1.0}), vocabulary.n_vocab, grammar)
            assert grammar._sampler is None
