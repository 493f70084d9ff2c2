"""The hidden state at the boundary is llama.cpp's, on F32 files, at every k.

A fair comparison needs llama.cpp with a float32 KV cache *and* without flash attention (which casts K and V to float16
even then): with its defaults llama.cpp alone is 3e-4 to 6e-4 away from what its own formulas give on these files.

One difference remains: llama.cpp's CPU GELU reads a table indexed by float16 (`ggml_vec_geglu_f32`). The head uses the
same table, but where its argument differs in the seventh digit it may fall on the neighbouring entry, 1e-3 away, as it
does when llama.cpp itself is given the same tokens one by one instead of all at once (other products, other roundings).
So for models with that GELU the claim is: within 2e-4, or as near as llama.cpp is to itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.tail.reference import Reference
from tests.head.heads import mean_kl, relative, run, some_tokens
from tests.tiny import write_tiny

FAIR: dict[str, Any] = {"kv_dtype": "f32", "flash_attn": "off", "swa_full": True}
LLAMA = {
    "plain": {},
    "untied": {"tied": False},
    "rope_freqs": {"rope_freqs": True},
    "biases": {"biases": True},
    "one head a kv head": {"n_kv_heads": 4},
    "linear rope": {"metadata": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}},
    "yarn": {
        "metadata": {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 64,
        }
    },
}
GEMMA = {
    "windows shorter than the prompt": {"n_layers": 7},
    "windows longer than the prompt": {"n_layers": 7, "window": 200},
    "no windows": {"n_layers": 4, "window": 0},
    "explicit pattern": {
        "n_layers": 5,
        "metadata": {"gemma3.attention.sliding_window_pattern": [False, True, True, False, True]},
    },
    "scaled rope": {
        "n_layers": 7,
        "metadata": {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0},
    },
}


def llama_cpp(path: Path, tokens: np.ndarray, chunk: int | None = None) -> tuple[list[np.ndarray], np.ndarray]:
    """Hidden states after every layer (of all tokens), and the logits."""
    with ModelFile(path) as file:
        n_layers = read_spec(file).n_layers
    taps = [f"l_out-{i}" for i in range(n_layers)]
    with Reference(path, n_ctx=512, taps=taps, **FAIR) as reference:
        logits = reference.evaluate(tokens, chunk=chunk)
        return [reference.hidden(i) for i in range(n_layers)], logits


@pytest.mark.parametrize("options", LLAMA.values(), ids=LLAMA.keys())
def test_llama_boundary_is_llama_cpp_s_at_every_k(options: dict[str, Any], tmp_path: Path, heads: Any) -> None:
    path, tokens = write_tiny(tmp_path / "m.gguf", n_layers=4, **options), some_tokens(120)
    hidden, logits = llama_cpp(path, tokens)
    for k in range(1, 5):
        assert relative(run(heads(path, k), tokens), hidden[k - 1]) < 1e-5, k
    head = heads(path)
    assert mean_kl(head.logits(head.forward(tokens, np.arange(120), np.full(120, 0))).numpy(), logits) < 1e-5


@pytest.mark.parametrize("options", GEMMA.values(), ids=GEMMA.keys())
def test_gemma3_boundary_is_llama_cpp_s_at_every_k(options: dict[str, Any], tmp_path: Path, heads: Any) -> None:
    path, tokens = write_tiny(tmp_path / "m.gguf", "gemma3", **options), some_tokens(120)
    hidden, logits = llama_cpp(path, tokens)
    one_by_one, _ = llama_cpp(path, tokens, chunk=1)
    for k in range(1, len(hidden) + 1):
        own = relative(one_by_one[k - 1], hidden[k - 1])
        assert relative(run(heads(path, k), tokens), hidden[k - 1]) < max(2e-4, 2 * own), k
    head = heads(path)
    assert mean_kl(head.logits(head.forward(tokens, np.arange(120), np.full(120, 0))).numpy(), logits) < 1e-5


def test_the_tolerance_would_catch_a_wrong_window_or_rope(tiny_gemma: Path, heads: Any, tmp_path: Path) -> None:
    """The same weights with a window one token longer, or another base, are hundreds of times further away."""
    tokens = some_tokens(120)
    hidden, _ = llama_cpp(tiny_gemma, tokens)
    for wrong in (
        {"window": 17},
        {"metadata": {"gemma3.rope.freq_base_swa": 10100.0}},
        {"metadata": {"gemma3.attention.layer_norm_rms_epsilon": 1e-3}},
    ):
        other = write_tiny(tmp_path / "wrong.gguf", "gemma3", n_layers=7, **{"window": 16, **wrong})
        assert relative(run(heads(other, 6), tokens), hidden[5]) > 3e-4


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("chunks", [[1] * 90, [7] * 12 + [6], [64, 26], [16, 1, 16, 1, 56]])
def test_chunks_are_invisible(architecture: str, chunks: list[int], request: Any, heads: Any) -> None:
    path = request.getfixturevalue("tiny_llama" if architecture == "llama" else "tiny_gemma")
    tokens = some_tokens(90)
    whole, pieces = heads(path), heads(path, n_batch=max(chunks))
    want = whole.logits(whole.forward(tokens, np.arange(90), np.full(90, 0))).numpy()
    at, got = 0, []
    for n in chunks:
        rows = pieces.forward(tokens[at : at + n], np.arange(at, at + n), np.full(n, 0))
        got.append(pieces.logits(rows).numpy())
        at += n
    assert np.abs(np.concatenate(got) - want).max() <= 5e-3 * np.abs(want).max()


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_other_sequences_in_the_batch_are_invisible(architecture: str, request: Any, heads: Any) -> None:
    """Three sequences of different lengths, interleaved raggedly, against each of them alone."""
    path = request.getfixturevalue("tiny_llama" if architecture == "llama" else "tiny_gemma")
    tokens = [some_tokens(n, seed=n) for n in (50, 33, 71)]
    alone = [run(heads(path, 3), t) for t in tokens]
    together, got = heads(path, 3, n_sequences=3), [[], [], []]
    done = [0, 0, 0]
    while any(done[s] < len(tokens[s]) for s in range(3)):
        part = [(s, done[s], min(5 + 4 * s, len(tokens[s]) - done[s])) for s in (2, 0, 1)]
        ids = np.concatenate([tokens[s][at : at + n] for s, at, n in part])
        where = np.concatenate([np.arange(at, at + n) for _, at, n in part])
        rows = together.forward(ids, where, np.concatenate([np.full(n, s) for s, _, n in part])).numpy()
        start = 0
        for s, _, n in part:
            got[s].append(rows[start : start + n])
            start, done[s] = start + n, done[s] + n
    for mine, want in zip(got, alone, strict=True):
        assert relative(np.concatenate(mine), want) < 5e-4


def test_a_trimmed_and_a_restored_sequence_go_on_as_if_nothing_had_happened(tiny_gemma: Path, heads: Any) -> None:
    tokens, other = some_tokens(60), some_tokens(10, seed=9)
    want = run(heads(tiny_gemma, 6), tokens)
    head = heads(tiny_gemma, 6, n_batch=32, n_sequences=2)
    run(head, tokens[:40], [20, 20])
    run(head, other, at=40)
    assert head.cache.trim(0, 40) == 40
    state = head.cache.save(0)
    assert relative(run(head, tokens[40:], at=40), want[40:]) < 5e-4
    assert head.cache.load(1, state) == 40
    assert relative(run(head, tokens[40:], seq=1, at=40), want[40:]) < 5e-4
