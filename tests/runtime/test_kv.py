"""Where the KV cache lives cannot be seen in the logits: splits, chunks, reuse and sequences under every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid.head.kv import host
from tests.runtime.test_engine import engine_of

TOKENS = np.random.default_rng(1).integers(5, 300, 400).tolist()
INVISIBLE = 1e-3
"""The design's bound for F32 files, as a share of max|logit|."""
A_TOKEN = 2 * 2 * 2 * 64 * 4
"""Bytes of a token of both sequences in one layer of the tiny models."""
STRATEGIES: dict[str, dict[str, Any]] = {
    "stream": {"kv": "stream"},
    "stream, windows too": {"kv": "stream", "kv_keep_sliding": False},
    "attend": {"kv": "attend"},
    "attend, windows too": {"kv": "attend", "kv_keep_sliding": False},
    "tiered": {"kv": "tiered", "kv_budget": 70 * 4 * A_TOKEN},
    "tiered, windows too": {"kv": "tiered", "kv_budget": 64 * 4 * A_TOKEN, "kv_keep_sliding": False},
}


def a_session(path: Path, k: int, **placement: Any) -> list[np.ndarray]:
    """The logits after each step of a conversation that outgrows the device's room, goes back, and has a neighbour."""
    steps: list[tuple[int, list[int]]] = [(0, TOKENS[:150])]
    steps += [(0, [t]) for t in TOKENS[150:153]]
    steps += [(1, TOKENS[40:49]), (1, TOKENS[49:52])]
    found = []
    with engine_of(path, k, n_ctx=256, n_sequences=2, **{"n_batch": 32, "kv_dtype": "f32", **placement}) as engine:
        for seq, tokens in steps:
            engine.evaluate(tokens, seq)
            found.append(engine.last_logits().copy())
        for other in (TOKENS[:149] + TOKENS[200:220], TOKENS[:30] + TOKENS[300:303], TOKENS[200:290]):
            kept = engine.reuse(other)
            engine.evaluate(other[kept:])
            found.append(engine.last_logits().copy())
            engine.evaluate(TOKENS[7:8])
            found.append(engine.last_logits().copy())
    return found


@pytest.fixture(scope="module")
def on_device() -> dict[tuple[str, int], list[np.ndarray]]:
    """What `device` makes of each model and split, once."""
    return {}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("model", "k", "n_batch"), [("llama_f32", 4, 32), ("llama_f32", 2, 7), ("gemma3_f32", 7, 32)])
def test_logits_do_not_show_the_strategy(
    strategy: str,
    model: str,
    k: int,
    n_batch: int,
    on_device: dict[tuple[str, int], list[np.ndarray]],
    request: pytest.FixtureRequest,
) -> None:
    path = request.getfixturevalue(model)
    if (model, k) not in on_device:
        on_device[model, k] = a_session(path, k, n_batch=n_batch)
    wanted = on_device[model, k]
    found = a_session(path, k, n_batch=n_batch, **STRATEGIES[strategy])
    for ours, theirs in zip(found, wanted, strict=True):
        assert np.abs(ours - theirs).max() <= INVISIBLE * np.abs(theirs).max()


@pytest.mark.parametrize("strategy", ["stream", "attend", "tiered"])
@pytest.mark.parametrize("n_batch", [5, 64])
def test_logits_do_not_show_the_chunks(strategy: str, n_batch: int, llama_f32: Path) -> None:
    found = a_session(llama_f32, 3, n_batch=n_batch, **STRATEGIES[strategy])
    for ours, theirs in zip(found, a_session(llama_f32, 3, n_batch=32), strict=True):
        assert np.abs(ours - theirs).max() <= 5 * INVISIBLE * np.abs(theirs).max()


@pytest.mark.parametrize("kv_dtype", ["f16", "bf16", "q8_0"])
@pytest.mark.parametrize("k", [2, 4])
def test_both_halves_have_every_precision(kv_dtype: str, k: int, llama_f32: Path) -> None:
    """As far from F32 as eight or eleven bits are, and alike under every strategy."""
    exact = a_session(llama_f32, k)
    rough = a_session(llama_f32, k, kv_dtype=kv_dtype)
    for ours, theirs in zip(rough, exact, strict=True):
        assert 1e-6 < np.abs(ours - theirs).max() / np.abs(theirs).max() < 0.05
    for strategy in ("stream", "attend", "tiered"):
        for ours, theirs in zip(a_session(llama_f32, k, kv_dtype=kv_dtype, **STRATEGIES[strategy]), rough, strict=True):
            assert np.abs(ours - theirs).max() <= 10 * INVISIBLE * np.abs(theirs).max()


def test_attention_on_the_cpu_leaves_the_tail_its_cores(llama_f32: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's last, short chunk is attended to while llama.cpp computes the one before it; a single token is not."""
    threads: list[int] = []
    attend = host.attend_on_cpu

    def watched(*args: Any, n_threads: int, **more: Any) -> Any:
        threads.append(n_threads)
        return attend(*args, n_threads=n_threads, **more)

    monkeypatch.setattr(host, "attend_on_cpu", watched)
    with engine_of(llama_f32, 2, kv="attend", n_batch=32, n_threads_head=1, n_threads_attend=2) as engine:
        engine.evaluate(TOKENS[:37])
        assert threads == [1, 1]
        engine.evaluate(TOKENS[37:38])
        assert threads == [1, 1, 2, 2]
