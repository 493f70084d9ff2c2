"""Evaluation: what is refused before llama.cpp could abort on it, where logits are found, and how it is interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid.errors import BadRequestError, Cancelled, EngineError
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.tail.reference import Reference
from hybrid.tail.tail import Tail
from tests.oracle.compare import placement, run_tail, some_tokens
from tests.tiny import write_tiny

Open = Callable[..., Tail]


def batch(n: int = 4, **changes: Any) -> dict[str, Any]:
    return {
        "inputs": np.zeros((n, 256), np.float32),
        "positions": np.arange(n),
        "seqs": np.zeros(n, np.int64),
        "outputs": np.zeros(n, bool),
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 0}, "1 to 64"),
        ({"n": 65}, "1 to 64"),
        ({"inputs": np.zeros((4, 255), np.float32)}, "Hidden states"),
        ({"inputs": np.zeros((4, 256, 1), np.float32)}, "Hidden states"),
        ({"inputs": np.zeros((3, 256), np.float32)}, "differ in length"),
        ({"inputs": np.array([1, 2, 3, -1])}, "Token ids"),
        ({"inputs": np.array([1, 2, 3, 100000])}, "Token ids"),
        ({"inputs": np.array([1.0, 2.0, 3.0, 4.0])}, "Token ids"),
        ({"positions": np.array([0, 1, 3, 4])}, "in order"),
        ({"positions": np.array([1, 2, 3, 4])}, "in order"),
        ({"positions": np.array([0, 1, 1, 2])}, "in order"),
        ({"positions": np.array([-1, 0, 1, 2])}, "in order"),
        ({"seqs": np.array([0, 0, 2, 2])}, "no sequence 2"),
        ({"seqs": np.array([-1, 0, 0, 0])}, "no sequence -1"),
        ({"outputs": np.ones(4, bool)}, "room for 2"),
    ],
)
def test_a_bad_batch_is_refused_and_changes_nothing(tiny_llama: Path, changes: dict[str, Any], message: str) -> None:
    with ModelFile(tiny_llama) as file:
        tail = Tail(file, read_spec(file), placement(1, n_batch=64, n_sequences=2))
    with tail:
        with pytest.raises(BadRequestError, match=message):
            tail.decode(**batch(**changes))
        assert tail.n_tokens(0) == tail.n_tokens(1) == 0
        tail.decode(**batch())
        assert tail.n_tokens(0) == 4


def test_a_full_context_is_a_refusal_not_an_abort(tiny_llama: Path, open_tails: Open) -> None:
    tail = open_tails(tiny_llama, 2, n_batch=64)
    for start in range(0, tail.n_ctx, 64):
        tail.decode(**batch(64, positions=np.arange(start, start + 64)))
    with pytest.raises(BadRequestError, match="no room"):
        tail.decode(**batch(1, positions=np.array([tail.n_ctx])))
    assert tail.n_tokens() == tail.n_ctx


def test_logits_are_found_by_token_and_from_the_end(tiny_llama: Path, open_tails: Open) -> None:
    tail = open_tails(tiny_llama, 2)
    rows = np.random.default_rng(0).standard_normal((6, 256)).astype(np.float32)
    every = run_tail(tail, rows, [6])
    tail.trim(0, 0)
    wanted = np.array([False, True, False, False, True, False])
    tail.decode(**batch(6, inputs=rows, outputs=wanted))
    assert tail.logits_block().shape == (2, tail.n_vocab)
    assert np.allclose(tail.logits_block(), every[[1, 4]], atol=1e-4)
    for i, row in ((1, 0), (4, 1), (-1, 1), (-2, 0)):
        assert np.array_equal(tail.logits(i), tail.logits_block()[row])
    for i in (0, 5, 6, -3):
        with pytest.raises(BadRequestError, match="no logits"):
            tail.logits(i)
    tail.decode(**batch(1, positions=np.array([6])))
    with pytest.raises(BadRequestError, match="no logits"):
        tail.logits_block()


def test_k_zero_is_llama_cpp_itself(tiny_gemma: Path, open_tails: Open) -> None:
    tokens = some_tokens(50)
    tail = open_tails(tiny_gemma, 0)
    with Reference(tiny_gemma, n_ctx=256) as reference:
        want = reference.evaluate(tokens)
    tail.decode(**batch(50, inputs=tokens, outputs=np.ones(50, bool)))
    assert np.array_equal(tail.logits_block(), want)


def test_reopening_changes_the_room_for_outputs_and_nothing_else(tiny_llama: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32)
    with ModelFile(tiny_llama) as file:
        tail = Tail(file, read_spec(file), placement(2))
    with tail:
        tail.decode(**batch(8, inputs=rows, outputs=np.arange(8) == 7))
        last = tail.logits().copy()
        tail.reopen(8)
        assert tail.n_tokens() == 0
        assert np.allclose(run_tail(tail, rows, [8])[-1], last, atol=1e-4)
        tail.reopen()
        with pytest.raises(BadRequestError, match="room for 1"):
            tail.decode(**batch(8, outputs=np.ones(8, bool)))


def test_an_evaluation_can_be_interrupted_from_another_thread(tmp_path: Path, open_tails: Open) -> None:
    """An evaluation in many micro-batches: interrupted after the first, it must not run to its end."""
    tail = open_tails(write_tiny(tmp_path / "m.gguf", n_layers=6, n_ctx=8192), 1, n_ctx=8192, n_ubatch=32)
    run_tail(tail, np.zeros((16, 256), np.float32), [16])
    seen: list[BaseException] = []

    def work() -> None:
        try:
            tail.decode(**batch(8000, inputs=np.zeros((8000, 256), np.float32), positions=np.arange(16, 8016)))
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while tail.n_tokens() <= 16 and thread.is_alive():
        pass  # until the first micro-batch is in the cache
    tail.abort()
    thread.join()
    assert isinstance(seen[0], Cancelled)
    assert tail.n_tokens() == 16
    run_tail(tail, np.zeros((4, 256), np.float32), [4])
    assert tail.n_tokens() == 20


def test_an_abort_before_an_evaluation_stops_it_and_trim_withdraws_it(tiny_llama: Path, open_tails: Open) -> None:
    tail = open_tails(tiny_llama, 2)
    run_tail(tail, np.ones((6, 256), np.float32), [6])
    tail.abort()
    with pytest.raises(Cancelled):
        tail.decode(**batch(4, positions=np.arange(6, 10)))
    assert tail.n_tokens() == 6
    tail.decode(**batch(4, positions=np.arange(6, 10)))
    tail.abort()
    tail.trim(0, 6)
    tail.decode(**batch(4, positions=np.arange(6, 10)))
    assert tail.n_tokens() == 10


def test_a_closed_tail_refuses_instead_of_crashing(tiny_llama: Path, open_tails: Open) -> None:
    tail = open_tails(tiny_llama, 2)
    vocabulary = tail.vocabulary
    run_tail(tail, np.ones((2, 256), np.float32), [2])
    tail.close()
    tail.close()
    for use in (
        lambda: tail.decode(**batch()),
        lambda: tail.n_tokens(),
        lambda: tail.trim(0, 0),
        lambda: tail.save(0),
        lambda: tail.copy(0, 0, 1),
        lambda: tail.set_threads(1, 1),
        lambda: vocabulary.tokenize("x"),
    ):
        with pytest.raises(EngineError, match="closed"):
            use()
    with pytest.raises(BadRequestError):
        tail.logits()
