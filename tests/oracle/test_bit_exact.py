"""Given llama.cpp's hidden state and the same batches, the tail gives llama.cpp's logits, bit for bit, at every k."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T

from hybrid.tail.reference import Reference
from tests.oracle.compare import open_tail, oracle, run_tail, some_tokens
from tests.tiny import write_tiny

MIXED = [T.Q4_K, T.Q6_K, T.Q8_0, T.Q5_0, T.IQ4_XS, T.Q4_0, T.F16]
N_TOKENS = 60

MODELS: dict[str, dict[str, Any]] = {
    "llama-f32": {},
    "llama-f16": {"kind": T.F16, "embd_kind": T.F16},
    "llama-q4_0": {"kind": T.Q4_0, "embd_kind": T.Q8_0},
    "llama-q4_k": {"kind": T.Q4_K, "embd_kind": T.Q6_K},
    "llama-q6_k": {"kind": T.Q6_K},
    "llama-iq4_xs": {"kind": T.IQ4_XS},
    "llama-mixed-untied": {"kind": MIXED, "embd_kind": T.Q6_K, "tied": False},
    "llama-narrow-untied": {"kind": T.Q8_0, "embd_kind": T.Q5_0, "tied": False, "n_embd": 96, "n_ff": 192},
    "llama-rope-freqs": {"rope_freqs": True, "kind": T.Q8_0},
    "llama-biases": {"biases": True},
    "gemma3-f32-short-window": {"architecture": "gemma3", "n_layers": 8, "window": 16},
    "gemma3-mixed-short-window": {"architecture": "gemma3", "n_layers": 8, "window": 16, "kind": MIXED},
    "gemma3-long-window": {"architecture": "gemma3", "n_layers": 8, "window": 128, "kind": T.Q4_0},
    "gemma3-no-window": {"architecture": "gemma3", "window": 0},
    "gemma3-untied": {"architecture": "gemma3", "n_layers": 7, "kind": T.Q6_K, "tied": False},
    "gemma3-pattern": {
        "architecture": "gemma3",
        "metadata": {"gemma3.attention.sliding_window_pattern": [True, False, True, True, False, False]},
    },
    "gemma3-numeric-pattern": {
        "architecture": "gemma3",
        "n_layers": 8,
        "metadata": {"gemma3.attention.sliding_window_pattern": 3},
    },
}


def assert_exact_at_every_k(path: Path, n_layers: int, chunks: list[int], **more: Any) -> None:
    tokens = some_tokens(sum(chunks))
    want = oracle(path, tokens, chunks, **more)
    assert np.ptp(want.logits) > 0.1  # the model says something
    for k in range(1, n_layers):
        with open_tail(path, k, **more) as tail:
            got = run_tail(tail, want.hidden[k - 1], chunks)
        assert np.array_equal(got, want.logits), f"k = {k}: off by {abs(got - want.logits).max()}"


@pytest.mark.parametrize("name", MODELS)
def test_tail_logits_equal_llama_cpp_for_every_split(name: str, tmp_path: Path) -> None:
    options = {"n_layers": 6, **MODELS[name]}
    path = write_tiny(tmp_path / "m.gguf", **options)
    assert_exact_at_every_k(path, options["n_layers"], [N_TOKENS])


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_chunks_and_single_tokens_stay_exact(architecture: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", architecture, n_layers=7, kind=MIXED)
    assert_exact_at_every_k(path, 7, [32, 17, 5, 1, 1, 1])


@pytest.mark.parametrize("more", [{"swa_full": True}, {"kv_dtype": "f32"}, {"kv_dtype": "q8_0"}, {"kv_dtype": "bf16"}])
def test_cache_options_stay_exact(more: dict[str, Any], tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "gemma3", n_layers=7, kind=T.Q8_0)
    assert_exact_at_every_k(path, 7, [40, 20], **more)


def test_a_tail_with_only_global_or_only_windowed_layers_is_exact(tmp_path: Path) -> None:
    """Every sixth layer of gemma3 is global: of six, k = 5 leaves only that one; of eight, k = 6 and 7 leave none."""
    for n_layers in (6, 8):
        path = write_tiny(tmp_path / f"{n_layers}.gguf", "gemma3", n_layers=n_layers, window=8)
        assert_exact_at_every_k(path, n_layers, [N_TOKENS])


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_several_sequences_in_ragged_batches_are_exact(architecture: str, unified: bool, tmp_path: Path) -> None:
    """llama.cpp computes the rows of a batch in an order of its own; the embeddings tell us which."""
    path = write_tiny(tmp_path / "m.gguf", architecture, n_layers=4, kind=T.Q8_0)
    options = {"n_sequences": 3, "kv_unified": unified}
    batches = [np.array(s) for s in ([0] * 20 + [1] * 7 + [2] * 12, [2, 0, 1], [1] * 4 + [0], [0, 1, 2])]
    taps = ["embd", *(f"l_out-{i}" for i in range(4))]
    with Reference(path, n_ctx=128, taps=taps, **options) as reference:  # type: ignore[arg-type]
        tails = {k: open_tail(path, k, n_ctx=128, **options) for k in (1, 2, 3)}
        seen = 0
        for seqs in batches:
            n = len(seqs)
            tokens = np.arange(10 + seen, 10 + seen + n, dtype=np.int32)  # all different: a row names its token
            seen += n
            positions = np.array([reference.n_tokens(s) + list(seqs[:i]).count(s) for i, s in enumerate(seqs)])
            reference.decode(tokens, positions, seqs, np.ones(n, bool))
            want = reference.logits_block().copy()
            order = _order(path, tokens, reference.tapped("embd"), architecture)
            for k, tail in tails.items():
                hidden = np.empty((n, tail.n_embd), np.float32)
                hidden[order] = reference.hidden(k - 1)
                tail.decode(hidden, positions, seqs, np.ones(n, bool))
                assert np.array_equal(tail.logits_block(), want), k
            reference.hidden(3)  # the last layer's; nobody needs it
        for tail in tails.values():
            tail.close()


def _order(path: Path, tokens: np.ndarray, rows: np.ndarray, architecture: str) -> np.ndarray:
    """The batch index of each row that llama.cpp computed."""
    from hybrid.model.file import ModelFile

    with ModelFile(path) as file:
        table = file.data("token_embd.weight").view(np.float32).reshape(-1, rows.shape[1])
        found = [int(np.flatnonzero((table[tokens] == row).all(1))[0]) for row in rows]
    assert sorted(found) == list(range(len(tokens)))
    return np.array(found)


def test_the_taps_change_nothing(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "gemma3", kind=MIXED)
    tokens = some_tokens(N_TOKENS)
    with Reference(path, n_ctx=256) as untapped:
        assert np.array_equal(untapped.evaluate(tokens), oracle(path, tokens, [N_TOKENS]).logits)


@pytest.mark.real
def test_real_models_are_exact_over_a_spread_of_k(real_model: Path) -> None:
    from hybrid.model.architectures import read_spec
    from hybrid.model.file import ModelFile

    with ModelFile(real_model) as file:
        n = read_spec(file).n_layers
    tokens = np.random.default_rng(2).integers(100, 40000, 48).astype(np.int32)
    chunks = [40, 7, 1]
    want = oracle(real_model, tokens, chunks)
    for k in (1, n // 3, n // 2, n - 1):
        with open_tail(real_model, k) as tail:
            got = run_tail(tail, want.hidden[k - 1], chunks)
        assert np.array_equal(got, want.logits), k
