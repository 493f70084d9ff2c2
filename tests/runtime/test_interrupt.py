"""Ctrl-C at any moment of a generation: the model can be used again at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from hybrid import Hybrid
from hybrid.errors import Cancelled
from hybrid.runtime.curve import BatchCurve
from hybrid.runtime.engine import Engine

MOMENTS = 60


@pytest.mark.parametrize("prompt", [[5, 6, 7], [5, 6, 7, 8] * 6], ids=["short", "chunks"])
@pytest.mark.parametrize("k", [0, 2, 4])
def test_an_interruption_at_any_moment_leaves_the_model_as_usable_as_before(
    k: int, prompt: list[int], llama_f32: Path
) -> None:
    with Hybrid(llama_f32, n_gpu_layers=k, device="cpu", n_ctx=64, n_batch=16, n_threads=1) as model:

        def text(tokens: list[int]) -> list[int]:
            return model.generate(tokens, max_tokens=3, temperature=0, ignore_eos=True).tokens

        interrupt_all_the_way(model, lambda: text(prompt), lambda: text([*prompt, 8]))


@pytest.mark.parametrize("k", [0, 2])
def test_an_interruption_of_several_requests_leaves_the_model_as_usable_as_before(
    k: int, llama_f32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid.runtime.api.curve_of", lambda engine: BatchCurve((1, 8), (1.0, 1.5)))
    prompts = [[5, 6, 7, 8] * 3 + [9] * n for n in range(3)]
    options: dict[str, Any] = {"n_ctx": 64, "n_batch": 16, "n_threads": 1, "n_sequences": 2, "n_draft": 3}
    with Hybrid(llama_f32, n_gpu_layers=k, device="cpu", **options) as model:

        def texts(max_tokens: int) -> list[list[int]]:
            many = dict(model.generate_many(prompts, max_tokens=max_tokens, temperature=0, ignore_eos=True))
            return [many[i].tokens for i in range(len(prompts))]

        interrupt_all_the_way(model, lambda: texts(5), lambda: texts(3))


def interrupt_all_the_way(model: Hybrid, work: Callable[[], object], check: Callable[[], object]) -> None:
    """Interrupt `work` at MOMENTS moments of the time it takes; `check` must then give what it gives now."""
    expected = check()
    model.engine.trim(0)
    start = time.perf_counter()
    work()
    whole = time.perf_counter() - start
    interruptions = []
    for moment in range(MOMENTS):
        model.engine.trim(0)
        try:
            with interrupted_after((moment + 1) / MOMENTS * whole):
                work()
            whole *= 0.9  # it was quicker than what was measured
        except KeyboardInterrupt as interruption:
            interruptions.append(interruption)  # its traceback keeps what was under way alive
        assert check() == expected, f"interrupted at moment {moment} of {MOMENTS}"
    assert len(interruptions) > 20


@pytest.mark.parametrize("part", ["_load_head", "_load_tail"])
def test_an_interrupted_load_stops_both_halves(part: str, llama_f32: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half that takes for ever to load ends all the same: it is told to, before it is waited for."""
    polls = 0

    def never_done(engine: Engine, progress: object) -> None:
        nonlocal polls
        while not engine._stopping:
            polls += 1
            threading.Event().wait(0.001)
        raise Cancelled("stopped")

    monkeypatch.setattr(Engine, part, never_done)
    with pytest.raises(KeyboardInterrupt), interrupted_after(0.3):
        Hybrid(llama_f32, n_gpu_layers=2, device="cpu", n_ctx=64, n_threads=1)
    assert polls > 0


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """What Ctrl-C does, in `seconds` from now."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
