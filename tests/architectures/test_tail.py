"""Given llama.cpp's hidden state and the same batches, the tail of every architecture gives llama.cpp's logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.model.splits import find_splits, padding
from tests.architectures.models import ALL_GLOBAL, MODELS, PLAIN, TESTED
from tests.oracle.compare import open_tail, oracle, run_tail, some_tokens
from tests.tiny_arch import write_arch

CHUNKS = [44, 15, 1]


def splits_between(path: Path) -> list[int]:
    """Every allowed k that leaves layers to both halves."""
    with ModelFile(path) as file:
        spec = read_spec(file)
    assert spec.unsupported is None
    return [k for k in find_splits(spec).allowed if 0 < k < spec.n_layers]


def assert_exact_at_every_split(path: Path) -> None:
    want = oracle(path, some_tokens(sum(CHUNKS)), CHUNKS)
    assert np.ptp(want.logits) > 0.1  # the model says something
    for k in splits_between(path):
        with open_tail(path, k) as tail:
            got = run_tail(tail, want.hidden[k - 1], CHUNKS)
        assert np.array_equal(got, want.logits), f"k = {k}: off by {abs(got - want.logits).max()}"


@pytest.mark.parametrize("name", MODELS)
def test_tail_logits_equal_llama_cpp_for_every_split(name: str, tiny: Callable[..., Path]) -> None:
    assert_exact_at_every_split(tiny(name))


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("types", TESTED)
def test_quantised_tails_are_exact_too(name: str, types: str, tmp_path: Path) -> None:
    how = TESTED[types]
    model = replace(MODELS[name], sizes={**MODELS[name].sizes, **how.sizes})
    assert_exact_at_every_split(write_arch(tmp_path / "m.gguf", model, how.kinds, expert_kind=how.expert_kind))


@pytest.mark.parametrize("name", ALL_GLOBAL)
def test_tails_without_a_windowed_layer_are_exact(name: str, tmp_path: Path) -> None:
    """llama.cpp aborts on a window that no layer has; each architecture needs another way around it."""
    assert_exact_at_every_split(write_arch(tmp_path / "m.gguf", ALL_GLOBAL[name]))


def test_a_hidden_state_that_llama_cpp_rescales_agrees_to_one_rounding_of_it(tmp_path: Path) -> None:
    """sqrt(96) is no power of two. The yardstick is what the last bit of the hidden state does to the same tail."""
    model = replace(MODELS["gemma2"], sizes={"n_embd": 96})
    path = write_arch(tmp_path / "m.gguf", model)
    want = oracle(path, some_tokens(60), [60])
    for k in splits_between(path):
        hidden = want.hidden[k - 1]
        with open_tail(path, k) as tail:
            got = run_tail(tail, hidden, [60])
            tail.trim(0, 0)
            rounded = run_tail(tail, np.nextafter(hidden, np.float32(np.inf)), [60])
        assert rms(got - want.logits) <= 1.5 * rms(rounded - got) + 1e-6 * abs(want.logits).max(), k
        assert rms(got - want.logits) <= 1e-3 * abs(want.logits).max(), k


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.square(values, dtype=np.float64).mean()))


def test_models_that_need_padding_were_among_them(tiny: Callable[..., Path]) -> None:
    found = {}
    for name in ("smollm3", "cohere2", "gemma4"):
        with ModelFile(tiny(name)) as file:
            spec = read_spec(file)
        found[name] = [padding(spec, k) for k in range(spec.n_layers + 1)]
    assert found == {
        "smollm3": [0, 1, 2, 3, 0, 1, 2, 3, 0, 0],
        "cohere2": [0, 0, 0, 0, 0, 0, 0, 1, 0],
        "gemma4": [0, 0, 0, 0, 0, 1, 0],
    }
