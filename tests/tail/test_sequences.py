"""Rolling back, copying, saving and restoring leave exactly the KV that evaluating the tokens afresh would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hybrid.errors import BadRequestError
from hybrid.tail.tail import Tail
from tests.oracle.compare import run_tail

Open = Callable[..., Tail]
K = 2


def hidden(tail: Tail, n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, tail.n_embd)).astype(np.float32)


def one_by_one(tail: Tail, rows: np.ndarray, seq: int = 0) -> np.ndarray:
    return run_tail(tail, rows, [1] * len(rows), seq)


def close(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal but for the order in which attention adds: a restored cache may hold its cells in another order."""
    return bool(abs(a - b).max() <= 2e-3 * abs(b).max())


@pytest.mark.parametrize("separate", [True, False])
def test_a_sequence_trimmed_and_continued_equals_a_fresh_one(
    tiny_llama: Path, open_tails: Open, separate: bool
) -> None:
    tail = open_tails(tiny_llama, K, n_sequences=2, kv_unified=not separate)
    rows = hidden(tail, 40)
    want = run_tail(tail, rows, [30, 10], seq=0)[30:]
    run_tail(tail, rows[:30], [30], seq=1)
    run_tail(tail, hidden(tail, 8, seed=1), [8], seq=1)
    assert tail.trim(1, 30) == 30
    assert tail.n_tokens(1) == 30
    assert close(run_tail(tail, rows[30:], [10], seq=1), want)
    assert tail.n_tokens(0) == 40


def test_trim_beyond_the_end_and_to_nothing(tiny_llama: Path, open_tails: Open) -> None:
    tail = open_tails(tiny_llama, K)
    assert tail.trim(0, 5) == 0
    run_tail(tail, hidden(tail, 10), [10])
    assert tail.trim(0, 10) == 10
    assert tail.trim(0, 99) == 10
    assert tail.trim(0, 0) == 0
    assert tail.n_tokens() == 0


def test_a_windowed_sequence_is_never_rolled_back_to_a_lost_window(tiny_gemma: Path, open_tails: Open) -> None:
    """After any history, trim either leaves what a fresh evaluation gives, or empties the sequence and says so."""
    tail = open_tails(tiny_gemma, K, n_ctx=1024, n_batch=64, n_ubatch=64)
    rows = hidden(tail, 700)
    fresh = run_tail(tail, rows, [64] * 10 + [60])
    kept = []
    for n in (699, 690, 640, 500, 400, 200, 20):
        tail.trim(0, 0)
        run_tail(tail, rows, [64] * 10 + [60])
        kept.append(tail.trim(0, n))
        assert tail.n_tokens() == kept[-1]
        if kept[-1]:
            assert close(one_by_one(tail, rows[n : n + 1]), fresh[n : n + 1])
    assert kept[0] == 699
    assert kept[-1] == 0
    assert set(kept) <= {699, 690, 640, 500, 400, 200, 20, 0}


def test_with_a_full_size_window_cache_every_rollback_works(tiny_gemma: Path, open_tails: Open) -> None:
    tail = open_tails(tiny_gemma, K, n_ctx=512, n_batch=64, n_ubatch=64, swa_full=True)
    rows = hidden(tail, 320)
    fresh = run_tail(tail, rows, [64] * 5)
    for n in (300, 100, 3):
        assert tail.trim(0, n) == n
        assert close(one_by_one(tail, rows[n : n + 1]), fresh[n : n + 1])


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gemma"])
def test_a_copied_prefix_continues_like_the_original(
    name: str, separate: bool, open_tails: Open, request: pytest.FixtureRequest
) -> None:
    tail = open_tails(request.getfixturevalue(name), K, n_sequences=3, kv_unified=not separate)
    rows = hidden(tail, 30)
    want = run_tail(tail, rows, [24, 6], seq=0)[24:]
    run_tail(tail, hidden(tail, 9, seed=1), [9], seq=2)
    assert tail.copy(0, 2, 24) == 24
    assert tail.n_tokens(2) == 24
    assert tail.copy(2, 1, 24) == 24
    assert tail.copy(2, 2, 20) == 20
    assert close(run_tail(tail, rows[24:], [6], seq=1), want)
    assert close(run_tail(tail, rows[20:], [4, 6], seq=2)[4:], want)
    assert tail.copy(1, 0, 0) == 0
    assert tail.n_tokens(0) == 0


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gemma"])
def test_a_restored_sequence_continues_exactly(name: str, open_tails: Open, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(name)
    tail, other = open_tails(path, K), open_tails(path, K)
    rows = hidden(tail, 40)
    run_tail(tail, rows[:30], [30])
    state = tail.save(0)
    want = run_tail(tail, rows[30:], [10])
    run_tail(other, hidden(other, 50, seed=1), [50])
    assert other.load(0, state) == 30
    assert np.array_equal(run_tail(other, rows[30:], [10]), want)


@pytest.mark.parametrize("seq", [0, 1])
def test_a_sequence_saved_right_after_a_copy_is_whole(tiny_gemma: Path, open_tails: Open, seq: int) -> None:
    """llama.cpp copies between separate caches only when it decodes next; save and load must not see the old bytes."""
    tail = open_tails(tiny_gemma, K, n_sequences=2)
    rows = hidden(tail, 30)
    want = run_tail(tail, rows, [24, 6])[24:]
    run_tail(tail, hidden(tail, 28, seed=1), [28], seq=1)
    tail.copy(0, 1, 24)
    tail.trim(0, 24)
    state = tail.save(seq)
    tail.trim(0, 0)
    tail.trim(1, 0)
    tail.load(0, state)
    assert close(run_tail(tail, rows[24:], [6]), want)


def test_an_empty_sequence_survives_saving(tiny_llama: Path, open_tails: Open) -> None:
    tail = open_tails(tiny_llama, K)
    empty = tail.save(0)
    run_tail(tail, hidden(tail, 5), [5])
    assert tail.load(0, empty) == 0


def test_damaged_or_foreign_states_are_refused_and_leave_the_sequence_empty(tiny_llama: Path, open_tails: Open) -> None:
    tail = open_tails(tiny_llama, K)
    run_tail(tail, hidden(tail, 20), [20])
    state = tail.save(0)
    flipped = bytearray(state)
    flipped[len(state) // 2] ^= 1
    for bad in (b"", b"nonsense", state[:-1], state + b"x", bytes(flipped)):
        with pytest.raises(BadRequestError, match="damaged"):
            tail.load(0, bad)
        assert tail.n_tokens() == 0
    for other in (open_tails(tiny_llama, K + 1), open_tails(tiny_llama, K, kv_dtype="f32")):
        run_tail(other, hidden(other, 20), [20])
        with pytest.raises(BadRequestError, match="another model"):
            tail.load(0, other.save(0))
        assert tail.n_tokens() == 0
    assert tail.load(0, state) == 20
