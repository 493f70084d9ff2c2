"""One model, several requests at once: nobody gets another's text, and nobody reaches freed memory."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hybrid import Hybrid
from hybrid.errors import BadRequestError
from hybrid.runtime.turns import Turns

PROMPTS = ["Hello world", "the ring of", "an inning"]


@pytest.fixture(params=[0, 2, 4])
def model(llama_f32: Path, request: pytest.FixtureRequest) -> Iterator[Hybrid]:
    with Hybrid(llama_f32, n_gpu_layers=request.param, device="cpu", n_ctx=256, n_batch=32) as model:
        yield model


def test_requests_of_several_threads_wait_for_each_other(model: Hybrid) -> None:
    def text(prompt: str) -> str:
        return str(model.generate(prompt, max_tokens=12, temperature=0, ignore_eos=True))

    alone = [text(prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        for _ in range(3):
            assert list(threads.map(text, PROMPTS)) == alone


@pytest.mark.parametrize("between", ["generate", "stream", "logits"])
def test_a_stream_never_goes_on_with_the_text_of_another_request(model: Hybrid, between: str) -> None:
    stream = model.generate(PROMPTS[0], max_tokens=12, temperature=0, ignore_eos=True, stream=True)
    next(stream)
    if between == "logits":
        model.logits([1, 5, 6])
    elif between == "stream":
        next(model.generate(PROMPTS[1], max_tokens=12, stream=True))
    else:
        model.generate(PROMPTS[1], max_tokens=12)
    with pytest.raises(BadRequestError, match="something else"):
        list(stream)


def test_a_stream_begins_when_it_is_read(model: Hybrid) -> None:
    expected = str(model.generate(PROMPTS[0], max_tokens=12, temperature=0, ignore_eos=True))
    stream = model.generate(PROMPTS[0], max_tokens=12, temperature=0, ignore_eos=True, stream=True)
    model.generate(PROMPTS[1], max_tokens=12)
    assert "".join(stream) == expected


def test_a_stream_of_a_closed_model_says_so(llama_f32: Path) -> None:
    model = Hybrid(llama_f32, n_ctx=256)
    stream = model.generate(PROMPTS[0], max_tokens=12, ignore_eos=True, stream=True)
    next(stream)
    model.close()
    with pytest.raises(BadRequestError, match="closed"):
        next(stream)


def test_cancelling_a_stream_never_stops_another_request(model: Hybrid) -> None:
    stream = model.generate(PROMPTS[0], max_tokens=12, ignore_eos=True, stream=True)
    next(stream)
    model._progress = lambda part, done: stream.cancel()
    assert model.generate([5] * 100, max_tokens=3, ignore_eos=True).finish_reason == "length"
    model._progress = None
    model.close()
    stream.cancel()


def test_closing_ends_the_request_of_another_thread(llama_f32: Path) -> None:
    model = Hybrid(llama_f32, n_ctx=512)
    begun = threading.Event()
    model._progress = lambda part, done: begun.set()
    with ThreadPoolExecutor(1) as thread:
        job = thread.submit(model.generate, [5] * 20, ignore_eos=True)
        assert begun.wait(60)
        model.close()
        assert job.result().finish_reason in ("interrupted", "length")


def test_a_progress_callback_cannot_use_the_model_that_calls_it(model: Hybrid) -> None:
    model._progress = lambda part, done: model.generate("x", max_tokens=1) and None
    with pytest.raises(BadRequestError, match="callback"):
        model.generate([5] * 100, max_tokens=1)
    model._progress = None
    assert len(model.generate(PROMPTS[0], max_tokens=3, ignore_eos=True).tokens) == 3


def test_a_turn_that_fails_leaves_the_model_free() -> None:
    turns, request = Turns(), object()
    with pytest.raises(ZeroDivisionError), turns.queue, turns.begin(request):
        1 / (not turns.at_work(request))
    assert not turns.at_work(request)
    with turns.queue, turns.resume(request):
        pass


def test_a_model_nobody_can_reach_is_closed(llama_f32: Path) -> None:
    others = set(threading.enumerate())
    model = Hybrid(llama_f32, n_ctx=256)
    file, seen = model.engine.file, weakref.ref(model)
    model.generate(PROMPTS[0], max_tokens=1)
    del model
    gc.collect()
    assert seen() is None
    with pytest.raises(ValueError, match="closed"):
        file.data("output_norm.weight")
    assert not [t for t in threading.enumerate() if t not in others]


def test_a_forked_process_is_told_to_load_its_own(llama_f32: Path) -> None:
    global shared
    with Hybrid(llama_f32, n_ctx=256) as model:
        shared = model
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert "another process" in pool.apply_async(_use_and_close).get(timeout=60)
        assert len(model.generate(PROMPTS[0], max_tokens=3, ignore_eos=True).tokens) == 3


shared: Hybrid


def _use_and_close() -> str:
    try:
        shared.generate([5] * 20, max_tokens=1)
    except BadRequestError as e:
        shared.close()
        return str(e)
    return "it ran"


def test_a_model_is_neither_copied_nor_pickled_but_a_completion_is(model: Hybrid) -> None:
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="load it again"):
            attempt(model)
    completion = model.generate(PROMPTS[0], max_tokens=3)
    for twin in (copy.deepcopy(completion), pickle.loads(pickle.dumps(completion))):
        assert twin == completion
        assert twin.to_dict() == completion.to_dict()
