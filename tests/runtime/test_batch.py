"""Claims about several requests at once: nobody sees the others, and guesses change nothing but the speed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid import Completion, Hybrid
from hybrid.errors import BadRequestError, EngineError
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.runtime import curve as curves
from hybrid.runtime.batch import Batch, Finished, Task
from hybrid.runtime.curve import BatchCurve
from hybrid.runtime.engine import Engine, State, Step, _mixed
from hybrid.runtime.reply import Options
from hybrid.runtime.sampling import Sampler, SamplingParams
from hybrid.schedule.placement import Placement

TOKENS = np.random.default_rng(1).integers(5, 300, 96).tolist()
SPLITS = [("llama_f32", 0), ("llama_f32", 2), ("llama_f32", 4), ("gemma3_f32", 0), ("gemma3_f32", 3), ("gemma3_f32", 7)]
INVISIBLE = 5e-3
FLAT = BatchCurve((1, 8), (1.0, 1.5))


@contextmanager
def engine_of(path: Path, k: int, **changes: object) -> Iterator[Engine]:
    options: dict[str, object] = {
        "n_ctx": 128, "n_batch": 32, "n_ubatch": 32, "device": "cpu", "n_sequences": 4, "n_draft": 7, **changes
    }  # fmt: skip
    placement = Placement(n_gpu_layers=k, **options)  # type: ignore[arg-type]
    with ModelFile(path) as file, closing(Engine(file, read_spec(file), placement)) as engine:
        yield engine


def assert_invisible(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert np.abs(ours - theirs).max() <= INVISIBLE * np.abs(theirs).max()


def alone(engine: Engine, tokens: Sequence[int]) -> np.ndarray:
    """The logits after `tokens`, with no other sequence in the engine."""
    for seq in range(engine.placement.n_sequences):
        engine.trim(0, seq)
    engine.evaluate(tokens)
    out = engine.last_logits().copy()
    engine.trim(0)
    return out


def held_alike(engine: Engine) -> bool:
    """Whether both halves hold what the engine says."""
    for seq in range(engine.placement.n_sequences):
        n = len(engine.tokens(seq))
        if engine.tail is not None and engine.tail.n_tokens(seq) != n:
            return False
        if engine.head is not None and engine.head.cache.length(seq) != n:  # type: ignore[attr-defined]
            return False
    return engine._boundary is None or engine._boundary._buffers.qsize() == 2


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "k"), SPLITS)
def test_other_sequences_in_a_batch_are_invisible(model: str, k: int, request: pytest.FixtureRequest) -> None:
    texts = {0: TOKENS[:40], 1: TOKENS[40:45], 3: TOKENS[50:90]}
    rows = {0: [7], 1: [8, 9, 10], 3: [11, 12]}
    with engine_of(request.getfixturevalue(model), k) as engine:
        expected = [alone(engine, texts[seq] + more[: i + 1]) for seq, more in rows.items() for i in range(len(more))]
        for seq, text in texts.items():
            engine.evaluate(text, seq)
        engine.complete(engine.begin(rows))
        for i, logits in enumerate(expected):
            assert_invisible(engine.logits(i), logits)
        first, second = engine.begin({0: [5], 1: [6]}, alone=False), engine.begin({3: [7]}, alone=False)
        engine.complete(first)
        got = [engine.logits(0).copy(), engine.logits(1).copy()]
        engine.complete(second)
        got.append(engine.logits(0).copy())
        held = [engine.tokens(seq) for seq in (0, 1, 3)]
        assert held == [(*texts[seq], *rows[seq], last) for seq, last in ((0, 5), (1, 6), (3, 7))]
        assert held_alike(engine)
        for logits, text in zip(got, held, strict=True):
            assert_invisible(logits, alone(engine, text))


@pytest.mark.parametrize(("model", "k"), SPLITS)
def test_a_saved_prefix_goes_on_in_any_sequence(model: str, k: int, request: pytest.FixtureRequest) -> None:
    with engine_of(request.getfixturevalue(model), k) as engine:
        expected = alone(engine, TOKENS[:60])
        engine.evaluate(TOKENS[:40], 1)
        state = engine.save(1)
        engine.evaluate(TOKENS[40:90], 1)  # a window moves on
        engine.evaluate([9, 9, 9], 2)
        engine.load(state, 2)
        assert engine.tokens(2) == tuple(TOKENS[:40])
        engine.evaluate(TOKENS[40:60], 2)
        assert_invisible(engine.last_logits(), expected)
        assert held_alike(engine)


@pytest.mark.parametrize("half", ["head", "tail"])
def test_a_half_that_fails_amid_two_steps_takes_the_other_back(
    llama_f32: Path, half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(llama_f32, 2) as engine:
        expected = alone(engine, [*TOKENS[:20], 7])
        engine.evaluate(TOKENS[:20], 0)
        engine.evaluate(TOKENS[20:30], 1)

        def fail(*args: object) -> None:
            raise EngineError("broken on purpose")

        for _ in range(3):  # more often than there are buffers
            with monkeypatch.context() as patch:
                patch.setattr(
                    engine.head if half == "head" else engine.tail, {"head": "forward", "tail": "decode"}[half], fail
                )
                steps = [engine.begin({0: [5]}, alone=False), engine.begin({1: [6]}, alone=False)]
                with pytest.raises(EngineError):
                    engine.complete(steps[0])
                engine.abandon()
            assert held_alike(engine)
        engine.complete(engine.begin({0: [7], 1: [8]}))
        assert_invisible(engine.logits(0), expected)


def test_a_step_without_room_is_refused_before_anything_happens(llama_f32: Path) -> None:
    with engine_of(llama_f32, 2, n_ctx=32) as engine:
        engine.evaluate(TOKENS[:32], 1)
        with pytest.raises(BadRequestError, match="33 tokens do not fit the context of 32"):
            engine.begin({0: [5], 1: [6]})
        assert held_alike(engine)


# -- requests, exactly: an engine without noise ------------------------------------------------------------------------


class Exact:
    """A stand-in for Engine: the logits depend on the last two tokens of their sequence and on nothing else."""

    head = tail = None
    can_go_back = True
    n_vocab = 24

    def __init__(self, n_sequences: int = 4, n_draft: int = 7, lossy: bool = False) -> None:
        self.placement = Placement(
            device="cpu", n_gpu_layers=0, n_ctx=400, n_batch=64, n_sequences=n_sequences, n_draft=n_draft
        )
        self.vocabulary: Any = self
        self.eog_tokens = [0]
        self._held: list[list[int]] = [[] for _ in range(n_sequences)]
        self._logits: list[np.ndarray] = []
        self.lossy = lossy
        self.n_steps = self.n_evaluated = 0

    def is_eog(self, token: int) -> bool:
        return token == 0

    def piece(self, token: int) -> bytes:
        return b"%c" % (96 + token)

    def tokens(self, seq: int = 0) -> tuple[int, ...]:
        return tuple(self._held[seq])

    def trim(self, n: int, seq: int = 0) -> int:
        if self.lossy and 0 < n < len(self._held[seq]):
            n = 0
        del self._held[seq][n:]
        return n

    def reuse(self, tokens: Sequence[int], seq: int = 0) -> int:
        return self.trim(0, seq)

    def save(self, seq: int = 0) -> State:
        return State(self.tokens(seq), None, b"")

    def load(self, state: State, seq: int = 0) -> None:
        self._held[seq] = list(state.tokens)

    def evaluate(self, tokens: Sequence[int], seq: int = 0, progress: object = None, cancelled: object = None) -> None:
        self.n_evaluated += len(tokens)
        self._held[seq] += tokens
        self._logits = [self._after(self._held[seq])]

    def begin(self, rows: Mapping[int, Sequence[int]], *, alone: bool = True) -> Step:
        assert sum(map(len, rows.values())) <= self.placement.n_outputs
        return Step(rows, _mixed(rows, [len(self._held[seq]) for seq in rows]), None, alone)

    def complete(self, step: Step) -> None:
        self.n_steps += 1
        self._logits = []
        for seq, tokens in step.rows.items():
            for token in tokens:
                self._held[seq].append(token)
                self._logits.append(self._after(self._held[seq]))

    def abandon(self) -> None: ...

    def settle(self) -> None: ...

    def sample(self, sampler: Sampler, i: int = -1) -> int:
        return sampler.sample(self._logits[i])

    def _after(self, tokens: Sequence[int]) -> np.ndarray:
        a, b = tokens[-2:]
        logits = np.random.default_rng(1000 * a + b).standard_normal(self.n_vocab).astype(np.float32)
        logits[0] += 12 if (a + 2 * b) % 23 == 0 else -9
        logits[(7 * a + b) % 20 + 1] += 7  # what comes next is mostly the same: the text repeats itself
        return logits


def tasks(n: int = 9, seed: int = 3, **sampling: Any) -> list[Task]:
    rng = np.random.default_rng(seed)
    return [
        Task(
            prompt=tuple(rng.integers(1, 24, rng.integers(2, 60)).tolist()),
            options=Options(
                sampling=SamplingParams(seed=i, **sampling), max_tokens=int(rng.integers(0, 80)), stop=("aca",)
            ),
            index=i,
        )
        for i in range(n)
    ]


def outcome(
    engine: Any, n_parallel: int, asked: Sequence[Task], curve: BatchCurve | None = None
) -> dict[int, Finished]:
    left = iter(asked)
    batch = Batch(engine, n_parallel, curve=curve, n_draft=7)
    return {done.task.index: done for done in batch.run(lambda: next(left, None))}


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1, "repeat_penalty": 1.3},
    ],
)
@pytest.mark.parametrize("lossy", [False, True])
def test_guesses_and_neighbours_change_no_token(sampling: dict[str, Any], lossy: bool) -> None:
    asked = tasks(**sampling)
    plain = outcome(Exact(), 1, asked)
    reasons = {done.completion.finish_reason for done in plain.values()}
    assert reasons == {"stop", "length"}
    for n_parallel, curve in ((1, FLAT), (4, None), (4, FLAT), (3, FLAT)):
        engine = Exact(lossy=lossy)
        got = outcome(engine, n_parallel, asked, curve)
        for i, done in plain.items():
            assert got[i].completion.tokens == done.completion.tokens
            assert got[i].completion == done.completion
            assert got[i].completion.finish_reason == done.completion.finish_reason
        assert (sum(done.n_accepted for done in got.values()) > 0) == (curve is not None)
        assert all(done.n_accepted <= done.n_drafted for done in got.values())


def test_guesses_that_are_right_save_steps_and_a_run_can_be_repeated() -> None:
    asked = tasks(temperature=0)
    plain, once, again = Exact(), Exact(), Exact()
    outcome(plain, 1, asked)
    first, second = outcome(once, 1, asked, FLAT), outcome(again, 1, asked, FLAT)
    assert once.n_steps == again.n_steps < 0.7 * plain.n_steps
    assert [(d.n_drafted, d.n_accepted) for d in first.values()] == [
        (d.n_drafted, d.n_accepted) for d in second.values()
    ]


def test_a_finished_sequences_place_is_taken_by_the_next_request() -> None:
    engine, asked = Exact(n_sequences=3), tasks(12, temperature=0)
    done = outcome(engine, 3, asked)
    tokens = [max(0, len(d.completion.tokens) - 1) for d in done.values()]
    assert engine.n_steps < sum(tokens) / 2  # with one request after the other, or three by three, it were more
    assert list(done) != sorted(done)  # and results come as they are finished


def test_a_common_prefix_is_evaluated_once() -> None:
    prefix = tuple(range(1, 21))
    asked = [
        Task(
            prompt=(*prefix, 3 + i, 5),
            options=Options(sampling=SamplingParams(temperature=0), max_tokens=4),
            n_prefix=20,
        )
        for i in range(8)
    ]
    engine = Exact(lossy=True)
    outcome(engine, 4, asked)
    assert engine.n_evaluated == 20 + 8 * 2


def test_more_can_be_asked_because_of_an_answer() -> None:
    left, seen = tasks(3, temperature=0), []
    batch = Batch(Exact(), 2)  # type: ignore[arg-type]
    extra = tasks(5, seed=9, temperature=0)[3:]
    for done in batch.run(lambda: left.pop() if left else None):
        seen.append(done.task.index)
        if extra:
            left.append(extra.pop())
    assert sorted(seen) == [0, 1, 2, 3, 4]


def test_a_request_can_be_ended_by_who_reads_it() -> None:
    seen: list[str] = []

    def watch(piece: str) -> bool:
        seen.append(piece)
        return len(seen) == 3

    options = Options(sampling=SamplingParams(temperature=0), max_tokens=50)
    (done,) = outcome(Exact(), 1, [Task(prompt=(1, 2), options=options, on_text=watch)], FLAT).values()
    assert done.completion.finish_reason == "interrupted"
    assert done.completion == "".join(seen)


@pytest.mark.parametrize("n", [0, 5, True, "2", None])
def test_a_number_of_sequences_that_is_not_there_is_refused(n: Any) -> None:
    with pytest.raises(BadRequestError, match="between 1 and 4"):
        Batch(Exact(), n if n is not True else 5)  # type: ignore[arg-type]


# -- requests to a model -----------------------------------------------------------------------------------------------

PROMPTS = [f"Hello world the house of man {i} and then he is here, Hello world the house{' of' * i}" for i in range(6)]


@pytest.fixture(autouse=True)
def fixed_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses that always pay; nothing is measured and nothing written."""
    monkeypatch.setattr("hybrid.runtime.api.curve_of", lambda engine: FLAT)


def assert_greedy(model: Hybrid, prompt: str, ours: Sequence[int], theirs: Sequence[int]) -> None:
    """The same tokens, but for a first difference between two that are equal to within the noise of a batch."""
    i = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if i is None:
        assert len(ours) == len(theirs)
        return
    logits = model.logits([*model.tokenize(prompt), *theirs[:i]])[-1]
    assert abs(logits[ours[i]] - logits[theirs[i]]) <= INVISIBLE * np.abs(logits).max()


@pytest.mark.parametrize(("model", "k"), SPLITS)
def test_generate_many_gives_what_generate_gives(model: str, k: int, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(model)
    options: dict[str, Any] = {"device": "cpu", "n_gpu_layers": k, "n_ctx": 256, "n_batch": 64, "n_threads": 1}
    with Hybrid(path, n_sequences=3, n_draft=7, **options) as loaded:
        one = [loaded.generate(prompt, max_tokens=24, temperature=0) for prompt in PROMPTS]
        for n_parallel in (1, 3):
            many = dict(loaded.generate_many(PROMPTS, n_parallel=n_parallel, max_tokens=24, temperature=0))
            assert sorted(many) == list(range(len(PROMPTS)))
            for i, prompt in enumerate(PROMPTS):
                assert_greedy(loaded, prompt, many[i].tokens, one[i].tokens)
                assert many[i].n_prompt_tokens == one[i].n_prompt_tokens
            assert sum(c.n_cached_tokens > 0 for c in many.values()) >= len(PROMPTS) - 1  # what all begin with
            assert held_alike(loaded.engine)


@pytest.fixture(scope="module")
def loaded(llama_f32: Path) -> Iterator[Hybrid]:
    with Hybrid(llama_f32, device="cpu", n_gpu_layers=2, n_ctx=256, n_batch=64, n_threads=1, n_sequences=3) as model:
        yield model


def test_the_head_is_at_work_on_one_group_while_the_tail_decodes_the_other(
    loaded: Hybrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loaded.engine
    assert engine.head is not None
    assert engine.tail is not None
    forward, decode = engine.head.forward, engine.tail.decode
    change, n_begun, n_decoded, beside = threading.Condition(), 0, 0, 0

    def front(tokens: Any, *args: Any) -> Any:
        nonlocal n_begun
        if len(tokens) < 3:  # a step of decode
            with change:
                n_begun += 1
                change.notify()
        return forward(tokens, *args)

    def back(inputs: Any, *args: Any) -> None:
        nonlocal n_decoded, beside
        if len(inputs) < 3:
            n_decoded += 1
            if beside == n_decoded - 1 < 10:  # not once it has failed
                with change:
                    beside += change.wait_for(lambda: n_begun > n_decoded, timeout=20)
        decode(inputs, *args)

    monkeypatch.setattr(engine.head, "forward", front)
    monkeypatch.setattr(engine.tail, "decode", back)
    options = Options(sampling=SamplingParams(temperature=0), max_tokens=20, ignore_eos=True)
    asked = [Task(prompt=tuple(TOKENS[i : i + 9]), options=options, index=i) for i in range(3)]
    done = outcome(engine, 3, asked)  # two groups: two sequences and one
    assert all(len(d.completion.tokens) == 20 for d in done.values())
    assert beside == 10


def test_one_long_prompt_is_refused_before_anything_runs(loaded: Hybrid) -> None:
    held = loaded.engine.tokens()
    with pytest.raises(BadRequestError, match="holds 256"):
        loaded.generate_many(["Hello", "a" * 300])
    assert loaded.engine.tokens() == held
    assert list(loaded.generate_many([])) == []


def test_dropped_half_way_it_leaves_the_model_usable(loaded: Hybrid) -> None:
    expected = loaded.generate(PROMPTS[0], max_tokens=8, temperature=0)
    results = loaded.generate_many(PROMPTS, max_tokens=12, temperature=0)
    next(results)
    del results
    assert held_alike(loaded.engine)
    assert loaded.generate(PROMPTS[0], max_tokens=8, temperature=0).tokens == expected.tokens


def test_another_request_in_between_ends_it_with_a_sentence(loaded: Hybrid) -> None:
    results = loaded.generate_many(PROMPTS, max_tokens=12, temperature=0)
    next(results)
    loaded.generate("Hello", max_tokens=1)
    with pytest.raises(BadRequestError, match="cannot go on"):
        next(results)


def test_an_interruption_in_a_step_leaves_both_halves_alike(loaded: Hybrid, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = dict(loaded.generate_many(PROMPTS, max_tokens=12, temperature=0))
    engine, n = loaded.engine, 0
    complete = engine.complete

    def pressed(step: Step) -> None:
        nonlocal n
        n += 1
        if n == 6:
            raise KeyboardInterrupt
        complete(step)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "complete", pressed)
        with pytest.raises(KeyboardInterrupt):
            list(loaded.generate_many(PROMPTS, max_tokens=12, temperature=0))
    assert held_alike(engine)
    again = dict(loaded.generate_many(PROMPTS, max_tokens=12, temperature=0))
    for i, prompt in enumerate(PROMPTS):
        assert_greedy(loaded, prompt, again[i].tokens, expected[i].tokens)


def test_closing_from_another_thread_ends_it_with_what_there_is(llama_f32: Path) -> None:
    model = Hybrid(llama_f32, n_gpu_layers=2, device="cpu", n_ctx=512, n_batch=64, n_threads=1, n_sequences=2)
    begun = threading.Event()
    got: list[Completion] = []

    def work() -> None:
        results = model.generate_many(["Hello", "world", "he"], max_tokens=400, ignore_eos=True)
        got.append(next(results)[1])
        with pytest.raises((BadRequestError, StopIteration)):  # closed between two results, or with the last one
            next(results)

    forward = model.engine.head.forward  # type: ignore[union-attr]

    def noticed(*args: Any) -> Any:
        begun.set()
        return forward(*args)

    model.engine.head.forward = noticed  # type: ignore[method-assign, union-attr]
    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(60)
    model.close()
    thread.join(60)
    assert not thread.is_alive()
    assert [completion.finish_reason for completion in got] == ["interrupted"]


# -- the curve ---------------------------------------------------------------------------------------------------------


def test_the_curve_is_measured_once_and_kept_as_numbers(
    llama_f32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(llama_f32, 0) as engine:
        first = curves.curve_of(engine, tmp_path)
        assert first.sizes[:2] == (1, 2)
        assert first.sizes[-1] <= engine.placement.n_outputs
        assert list(first.costs) == sorted(first.costs)
        assert engine.tokens() == ()
        monkeypatch.setattr(curves, "measure", lambda engine: pytest.fail("measured again"))
        assert curves.curve_of(engine, tmp_path) == first
    with engine_of(llama_f32, 2) as other, pytest.raises(pytest.fail.Exception):
        curves.curve_of(other, tmp_path)


def test_a_damaged_curve_is_measured_again(llama_f32: Path, tmp_path: Path) -> None:
    with engine_of(llama_f32, 0) as engine:
        curves.curve_of(engine, tmp_path)
        (kept,) = tmp_path.iterdir()
        kept.write_text("{")
        curves.curve_of(engine, tmp_path)
        assert kept.read_text() != "{"
