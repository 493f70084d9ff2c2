"""The engine: two halves with one KV state, whatever is cut, reused, chunked or interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybrid.errors import BadRequestError, Cancelled, EngineError
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.runtime.boundary import Boundary
from hybrid.runtime.engine import Engine
from hybrid.schedule.placement import Placement
from hybrid.tail.reference import Reference

TOKENS = np.random.default_rng(1).integers(5, 300, 96).tolist()
SPLITS = [("llama_f32", k) for k in range(5)] + [("gemma3_f32", k) for k in (0, 1, 5, 6, 7)]
INVISIBLE = 5e-3
"""The design's bound for F32 files, as a share of max|logit|."""


@contextmanager
def engine_of(path: Path, k: int, **changes: object) -> Iterator[Engine]:
    options: dict[str, object] = {"n_ctx": 128, "n_batch": 32, "n_ubatch": 32, "device": "cpu", **changes}
    placement = Placement(n_gpu_layers=k, **options)  # type: ignore[arg-type]
    with ModelFile(path) as file, closing(Engine(file, read_spec(file), placement)) as engine:
        yield engine


def last_logits(engine: Engine, tokens: list[int]) -> np.ndarray:
    engine.evaluate(tokens)
    return engine.last_logits().copy()


def assert_invisible(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert np.abs(ours - theirs).max() <= INVISIBLE * np.abs(theirs).max()


@pytest.mark.parametrize(("model", "k"), SPLITS)
def test_all_logits_equal_llama_cpp_for_every_split(model: str, k: int, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(model)
    with Reference(path, n_ctx=128) as reference:
        expected = reference.evaluate(TOKENS)
    with engine_of(path, k) as engine, engine.scoring():
        logits = engine.evaluate(TOKENS, outputs="all")
    assert logits is not None
    assert_invisible(logits, expected)


@pytest.mark.parametrize(("model", "k"), SPLITS)
def test_a_reused_prefix_changes_nothing(model: str, k: int, request: pytest.FixtureRequest) -> None:
    other = [*TOKENS[:40], 7, 8, 9]
    with engine_of(request.getfixturevalue(model), k) as engine:
        expected = last_logits(engine, other)
        engine.trim(0)
        engine.evaluate(TOKENS[:50])
        kept = engine.reuse(other)
        assert kept in (0, 40)  # 0 where a window has moved on
        assert kept == 40 or model == "gemma3_f32"
        assert engine.tokens() == tuple(other[:kept])
        assert_invisible(last_logits(engine, other[kept:]), expected)
        assert engine.tokens() == tuple(other)


@pytest.mark.parametrize("k", [0, 2, 4])
def test_the_last_token_of_a_known_prompt_is_evaluated_again(llama_f32: Path, k: int) -> None:
    with engine_of(llama_f32, k) as engine:
        expected = last_logits(engine, TOKENS[:20])
        assert engine.reuse(TOKENS[:20]) == 19
        assert_invisible(last_logits(engine, TOKENS[19:20]), expected)


@pytest.mark.parametrize(("model", "k"), [("llama_f32", 0), ("llama_f32", 2), ("gemma3_f32", 3), ("gemma3_f32", 7)])
def test_an_interrupted_prefill_leaves_both_halves_alike(model: str, k: int, request: pytest.FixtureRequest) -> None:
    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    with engine_of(request.getfixturevalue(model), k) as engine:
        expected = last_logits(engine, TOKENS)
        engine.trim(0)
        with pytest.raises(KeyboardInterrupt):
            engine.evaluate(TOKENS, progress=interrupt)
        held = len(engine.tokens())
        assert held < len(TOKENS)
        assert held % 32 == 0
        assert engine.tail is None or engine.tail.n_tokens(0) == held
        assert_invisible(last_logits(engine, TOKENS[held:]), expected)


@pytest.mark.parametrize("when", ["in the head", "before the tail"])
def test_interrupted_decodes_leave_buffers_and_halves_as_they_were(
    llama_f32: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(llama_f32, 2) as engine:
        expected = last_logits(engine, TOKENS[:11])
        engine.trim(0)
        engine.evaluate(TOKENS[:10])
        assert engine.head is not None
        assert engine._boundary is not None
        forward = engine.head.forward

        def pressed(*args: Any) -> Any:  # on the head's thread: Ctrl-C reaches the main one
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return forward(*args)

        def lost(*args: Any) -> None:
            raise KeyboardInterrupt

        for _ in range(4):  # more often than there are buffers
            with monkeypatch.context() as patch:
                if when == "in the head":
                    patch.setattr(engine.head, "forward", pressed)
                else:
                    patch.setattr(engine, "_back", lost)
                with pytest.raises(KeyboardInterrupt):
                    engine.evaluate(TOKENS[10:11])
            assert len(engine.tokens()) == engine.tail.n_tokens(0) == 10  # type: ignore[union-attr]
            assert engine._boundary._buffers.qsize() == 2
        assert_invisible(last_logits(engine, TOKENS[10:11]), expected)


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("several", [False, True])
def test_ctrl_c_stops_the_token_that_llama_cpp_computes(
    llama_f32: Path, k: int, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine it may take seconds."""
    stopped = threading.Event()
    with engine_of(llama_f32, k, n_sequences=2) as engine:
        expected = last_logits(engine, TOKENS[:11])
        engine.trim(10)
        assert engine.tail is not None
        abort, decode = engine.tail.abort, engine.tail.decode

        def told() -> None:
            abort()
            stopped.set()

        def pressed(*args: Any) -> None:
            for _ in range(4):  # one that comes just before the caller goes to sleep does not wake it
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                if stopped.wait(5):
                    break
            decode(*args)

        with monkeypatch.context() as patch:
            patch.setattr(engine.tail, "abort", told)
            patch.setattr(engine.tail, "decode", pressed)
            step = engine.begin({0: TOKENS[10:11], 1: TOKENS[:1]}) if several else None
            with pytest.raises(KeyboardInterrupt):
                engine.evaluate(TOKENS[10:11]) if step is None else engine.complete(step)
        assert stopped.is_set()
        assert engine.reuse(TOKENS[:11]) == 10
        assert_invisible(last_logits(engine, TOKENS[10:11]), expected)


@pytest.mark.parametrize("under_way", ["a token", "a prompt", "a step", "a rollback"])
def test_what_ctrl_c_again_and_again_leaves_undone_the_next_request_does(
    llama_f32: Path, under_way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(*args: Any) -> None:
        raise KeyboardInterrupt

    with engine_of(llama_f32, 2) as engine:
        expected = last_logits(engine, TOKENS)
        engine.trim(0)
        engine.evaluate(TOKENS[:10])
        assert engine.head is not None
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_wait_until_idle", pressed)
            patch.setattr(engine.tail, "trim" if under_way == "a rollback" else "decode", pressed)
            work: dict[str, Callable[[], object]] = {
                "a token": lambda: engine.evaluate(TOKENS[10:11]),
                "a prompt": lambda: engine.evaluate(TOKENS[10:70]),
                "a step": lambda: engine.complete(engine.begin({0: TOKENS[10:11]})),
                "a rollback": lambda: engine.trim(5),
            }
            with pytest.raises(KeyboardInterrupt):
                work[under_way]()
        assert engine.head.cache.length(0) != engine.tail.n_tokens(0)  # type: ignore[attr-defined, union-attr]
        held = engine.reuse(TOKENS)
        assert held in (0, 10)
        assert engine.head.cache.length(0) == engine.tail.n_tokens(0) == held  # type: ignore[attr-defined, union-attr]
        assert_invisible(last_logits(engine, TOKENS[held:]), expected)


@pytest.mark.parametrize("k", [2, 4])
def test_an_interrupted_chunk_ends_between_two_layers(llama_f32: Path, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    attended: list[int] = []
    with engine_of(llama_f32, k) as engine:
        expected = last_logits(engine, TOKENS[:60])
        engine.trim(10)
        assert engine.head is not None
        attend = engine.head.cache.attend

        def watched(layer: int, *args: Any) -> Any:
            attended.append(layer)
            engine.interrupt()
            return attend(layer, *args)

        with monkeypatch.context() as patch:
            patch.setattr(engine.head.cache, "attend", watched)
            with pytest.raises(Cancelled):
                engine.evaluate(TOKENS[10:60])
        assert attended == [0]
        assert engine.reuse(TOKENS[:60]) == 10
        assert_invisible(last_logits(engine, TOKENS[10:60]), expected)


@pytest.mark.parametrize("k", [0, 2])
def test_one_thread_gives_llama_cpp_all_its_work(llama_f32: Path, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP has a team of threads for each that calls it, and slows all of them down where they are too many."""
    threads = []
    with engine_of(llama_f32, k, n_sequences=2) as engine:
        assert engine.tail is not None
        decode = engine.tail.decode

        def watched(*args: Any) -> None:
            threads.append(threading.get_ident())
            decode(*args)

        monkeypatch.setattr(engine.tail, "decode", watched)
        engine.evaluate(TOKENS[:70])
        engine.evaluate(TOKENS[70:71])
        engine.complete(engine.begin({0: TOKENS[71:72], 1: TOKENS[:1]}))
        assert len(threads) >= 3
        assert set(threads) == {engine.on_tail_thread(threading.get_ident)}


@pytest.mark.parametrize("half", ["head", "tail"])
@pytest.mark.parametrize("n", [1, 70])
def test_a_half_that_fails_takes_the_other_back(llama_f32: Path, half: str, n: int, monkeypatch: object) -> None:
    assert isinstance(monkeypatch, pytest.MonkeyPatch)
    with engine_of(llama_f32, 2) as engine:
        expected = last_logits(engine, TOKENS[: 10 + n])
        engine.trim(0)
        engine.evaluate(TOKENS[:10])

        def fail(*args: object) -> None:
            raise EngineError("broken on purpose")

        with monkeypatch.context() as patch:
            patch.setattr(*((engine.head, "forward") if half == "head" else (engine.tail, "decode")), fail)
            with pytest.raises(EngineError, match="on purpose"):
                engine.evaluate(TOKENS[10 : 10 + n])
        assert engine.tokens() == tuple(TOKENS[:10])
        assert_invisible(last_logits(engine, TOKENS[10 : 10 + n]), expected)


def test_sequences_do_not_see_each_other(llama_f32: Path) -> None:
    with engine_of(llama_f32, 2, n_sequences=2) as engine:
        expected = last_logits(engine, TOKENS[:30])
        engine.trim(0)
        engine.evaluate(TOKENS[50:80], seq=1)
        engine.evaluate(TOKENS[:29])
        engine.evaluate(TOKENS[80:90], seq=1)
        assert_invisible(last_logits(engine, TOKENS[29:30]), expected)
        assert engine.tokens(1) == tuple(TOKENS[50:90])


@pytest.mark.parametrize("k", [0, 2, 4])
def test_a_full_context_is_refused_with_both_numbers_and_harms_nothing(llama_f32: Path, k: int) -> None:
    with engine_of(llama_f32, k) as engine:
        engine.evaluate(TOKENS[:90])
        with pytest.raises(BadRequestError, match=r"180 tokens .* 128"):
            engine.evaluate(TOKENS[:90])
        assert engine.tokens() == tuple(TOKENS[:90])
        engine.evaluate(TOKENS[:38])
        with pytest.raises(BadRequestError):
            engine.evaluate([5])


def test_scoring_leaves_an_engine_that_still_generates(llama_f32: Path) -> None:
    with engine_of(llama_f32, 2) as engine:
        expected = last_logits(engine, TOKENS[:20])
        with engine.scoring():
            assert engine.tokens() == ()
            engine.evaluate(TOKENS[:20], outputs="all")
        assert engine.tokens() == ()
        assert_invisible(last_logits(engine, TOKENS[:20]), expected)


def test_closing_twice_and_after_a_failed_load_is_harmless(llama_f32: Path, tmp_path: Path) -> None:
    with engine_of(llama_f32, 2) as engine:
        engine.close()
        engine.close()
    with ModelFile(llama_f32) as file:
        spec = read_spec(file)
        with pytest.raises(Exception, match="nosuch"):
            Engine(file, spec, Placement(device="nosuch", n_gpu_layers=2, n_ctx=128))
        with closing(Engine(file, spec, Placement(device="cpu", n_gpu_layers=2, n_ctx=128))) as engine:
            engine.evaluate(TOKENS[:3])


def test_hidden_states_travel_without_pinned_memory_and_that_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", unpinned)
    boundary = Boundary("cuda", 4, 8)
    assert [buffer.shape for buffer in boundary._all] == [(4, 8), (4, 8)]
    assert len(boundary.notes) == 1
    assert "could not be pinned (CUDA error: out of memory)" in boundary.notes[0]
