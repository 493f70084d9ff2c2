"""`from hybrid import Hybrid`: what a script relies on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid import Completion, Hybrid
from hybrid.errors import BadRequestError, EngineError, HostMemoryError, HybridError, UnsupportedError
from hybrid.model.file import ModelFile
from hybrid.tail.reference import Reference
from tests.tiny import write_tiny

PROMPT = "Hello world, the ring of"


@pytest.fixture(params=[0, 2, 4])
def model(llama_f32: Path, request: pytest.FixtureRequest) -> Iterator[Hybrid]:
    with Hybrid(llama_f32, n_gpu_layers=request.param, device="cpu", n_ctx=256, n_batch=32) as model:
        yield model


def greedy_by_llama_cpp(path: Path, tokens: list[int], n: int) -> list[int]:
    made: list[int] = []
    with Reference(path, n_ctx=256) as reference:
        row = reference.evaluate(tokens)[-1]
        for _ in range(n):
            made.append(int(row.argmax()))
            row = reference.evaluate(made[-1:])[-1]
    return made


def test_greedy_text_is_llama_cpps_at_every_split(model: Hybrid, llama_f32: Path) -> None:
    done = model.generate(PROMPT, max_tokens=24, temperature=0, ignore_eos=True)
    expected = greedy_by_llama_cpp(llama_f32, model.tokenize(PROMPT), 24)
    assert done.tokens == expected
    assert done == model.detokenize(expected)
    assert done.n_prompt_tokens == len(model.tokenize(PROMPT))


def test_a_completion_is_text_with_its_record(model: Hybrid) -> None:
    done = model.generate(PROMPT, max_tokens=5, temperature=0, ignore_eos=True)
    assert isinstance(done, str)
    assert isinstance(done, Completion)
    record = done.to_dict()
    assert record["text"] == done
    assert record["placement"]["n_gpu_layers"] == model.placement.n_gpu_layers
    assert record["finish_reason"] == "length"
    assert len(record["tokens"]) == 5
    assert record["timings"]["ttft_s"] > 0
    assert record["timings"]["decode_tok_per_s"] > 0
    assert (record["memory"]["device_bytes"] > 0) == (model.placement.n_gpu_layers > 0)


def test_rates_are_null_where_there_is_nothing_to_measure(model: Hybrid) -> None:
    one = model.generate(PROMPT, max_tokens=1, ignore_eos=True)
    assert one.timings.decode_tok_per_s is None
    none = model.generate(PROMPT, max_tokens=0)
    assert none == ""
    assert none.tokens == []
    assert none.timings.ttft_s is None


def test_a_stream_gives_the_same_text_in_pieces(model: Hybrid) -> None:
    whole = model.generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True)
    stream = model.generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True, stream=True)
    assert stream.completion is None
    assert "".join(stream) == whole
    assert stream.completion is not None
    assert stream.completion.tokens == whole.tokens


def test_a_dropped_stream_leaves_the_model_usable(model: Hybrid) -> None:
    whole = model.generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True)
    for _ in model.generate(PROMPT, temperature=0, ignore_eos=True, stream=True):
        break
    assert model.generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True) == whole


def test_a_cancelled_stream_keeps_what_was_made(model: Hybrid) -> None:
    stream = model.generate(PROMPT, temperature=0, ignore_eos=True, stream=True)
    first = next(stream)
    stream.cancel()
    rest = "".join(stream)
    assert stream.completion is not None
    assert stream.completion.finish_reason == "interrupted"
    assert stream.completion == first + rest
    assert model.generate(PROMPT, max_tokens=3, ignore_eos=True).finish_reason == "length"


def test_a_stream_cancelled_while_the_prompt_is_read_ends_without_text(model: Hybrid) -> None:
    prompt = np.random.default_rng(0).integers(5, 300, 120).tolist()
    fresh = model.generate(prompt, max_tokens=3, temperature=0, ignore_eos=True)
    model.engine.trim(0)
    stream = model.generate(prompt, temperature=0, stream=True)
    model._progress = lambda part, done: stream.cancel()
    assert list(stream) == []
    model._progress = None
    assert stream.completion is not None
    assert stream.completion.finish_reason == "interrupted"
    assert stream.completion.timings.ttft_s is None
    assert model.n_used < 120
    assert model.generate(prompt, max_tokens=3, temperature=0, ignore_eos=True) == fresh


def test_a_stream_cancelled_before_it_begins_ends_without_text(model: Hybrid) -> None:
    stream = model.generate(PROMPT, temperature=0, ignore_eos=True, stream=True)
    stream.cancel()
    assert list(stream) == []
    assert stream.completion is not None
    assert (stream.completion.finish_reason, stream.completion.tokens) == ("interrupted", [])
    assert model.n_used == 0


def test_a_stream_cancelled_as_its_prompt_begins_ends_without_text(
    model: Hybrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = model.generate(PROMPT, temperature=0, ignore_eos=True, stream=True)
    evaluate = model.engine.evaluate

    def late(*args: Any, **options: Any) -> Any:  # the engine forgets interruptions of before an evaluation
        stream.cancel()
        return evaluate(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(model.engine, "evaluate", late)
        assert list(stream) == []
    assert stream.completion is not None
    assert stream.completion.finish_reason == "interrupted"
    assert model.generate(PROMPT, max_tokens=3, temperature=0, ignore_eos=True).finish_reason == "length"


def test_a_continued_prompt_is_reused_and_a_repeated_one_all_but_its_last_token(model: Hybrid) -> None:
    first = model.generate(PROMPT, max_tokens=6, temperature=0, ignore_eos=True)
    prompt = model.tokenize(PROMPT)
    again = model.generate(prompt + first.tokens, max_tokens=1, temperature=0)
    assert again.n_cached_tokens == len(prompt) + 5  # the sixth was sampled, not evaluated
    assert model.generate(prompt, max_tokens=1).n_cached_tokens == len(prompt) - 1


def test_stop_strings_end_the_text_and_are_not_part_of_it(model: Hybrid) -> None:
    whole = model.generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True)
    stop = whole[5:8]
    cut = model.generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True, stop=[stop])
    assert cut == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    assert model.generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True, stop=stop) == cut


def test_a_full_context_ends_the_text_with_reason_length(model: Hybrid) -> None:
    done = model.generate(PROMPT, temperature=0, ignore_eos=True)
    assert done.finish_reason == "length"
    assert done.n_prompt_tokens + len(done.tokens) == model.n_ctx + 1  # the last one needs no room
    assert model.n_used == model.n_ctx


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(model: Hybrid) -> None:
    with pytest.raises(BadRequestError, match=r"300 tokens.*256"):
        model.generate([5] * 300)
    assert model.generate(PROMPT, max_tokens=2, ignore_eos=True).tokens


def test_a_prompt_that_fills_the_context_exactly_gives_one_token(model: Hybrid) -> None:
    assert len(model.generate([5] * 256, ignore_eos=True).tokens) == 1


def test_logits_are_llama_cpps(model: Hybrid, llama_f32: Path) -> None:
    tokens = np.random.default_rng(0).integers(5, 300, 80).tolist()
    with Reference(llama_f32, n_ctx=256) as reference:
        expected = reference.evaluate(tokens)
    model.generate(PROMPT, max_tokens=3)
    logits = model.logits(tokens)
    assert logits.dtype == np.float32
    assert logits.shape == expected.shape
    assert np.abs(logits - expected).max() <= 5e-3 * np.abs(expected).max()


@pytest.mark.parametrize("k", [0, 2])
def test_logits_for_which_there_is_no_room_leave_a_model_that_still_generates(
    llama_f32: Path, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Hybrid(llama_f32, n_gpu_layers=k, device="cpu", n_ctx=64, n_batch=32) as model:
        expected = model.generate(PROMPT, max_tokens=4, temperature=0, ignore_eos=True)
        tail = model.engine.tail
        assert tail is not None
        opened = tail._open

        def small(params: Any) -> None:
            if params.n_outputs_max > 1:
                raise HostMemoryError("There is no room for so many logits.")
            opened(params)

        monkeypatch.setattr(tail, "_open", small)
        for ask in (lambda: model.logits([5, 6, 7]), lambda: model.score([5, 6, 7], lambda i, row: None)):
            with pytest.raises(HostMemoryError, match="no room"):
                ask()
            assert model.n_used == 0
            assert model.generate(PROMPT, max_tokens=4, temperature=0, ignore_eos=True) == expected


def test_text_that_spells_a_control_token_stays_text(model: Hybrid) -> None:
    control = model.tokenize("<|user|>", parse_special=True, add_special=False)
    assert len(control) == 1
    assert control[0] not in model.tokenize("<|user|>")
    model.chat([{"role": "user", "content": "<|user|> x"}], max_tokens=1)
    assert list(model.engine.tokens()).count(control[0]) == 2  # the user's turn and the assistant's, by the template


def test_a_chat_prompt_begins_with_exactly_one_bos(model: Hybrid) -> None:
    model.chat([{"role": "user", "content": "hi"}], max_tokens=1)
    tokens = model.engine.tokens()
    assert tokens[0] == 1
    assert tokens.count(1) == 1


def test_the_next_turn_of_a_chat_reuses_the_one_before(model: Hybrid) -> None:
    turns = [{"role": "user", "content": "hi"}]
    answer = model.chat(turns, max_tokens=4, temperature=0, ignore_eos=True)
    turns += [{"role": "assistant", "content": str(answer)}, {"role": "user", "content": "more"}]
    assert model.chat(turns, max_tokens=1).n_cached_tokens >= answer.n_prompt_tokens - 1


@pytest.mark.parametrize("bad", [{"max_tokens": -1}, {"temperature": -0.5}, {"stop": [""]}, {"top_p": 2}])
def test_senseless_options_are_refused(model: Hybrid, bad: dict[str, object]) -> None:
    with pytest.raises(BadRequestError):
        model.generate(PROMPT, **bad)  # type: ignore[call-overload]


def test_token_ids_of_a_bias_may_be_text_as_in_json(model: Hybrid) -> None:
    assert model.generate(PROMPT, max_tokens=2, logit_bias={"300": 1000.0}).tokens == [300, 300]
    for bad in ({"x": 1.0}, {3: "x"}, [1]):
        with pytest.raises(BadRequestError, match="logit_bias"):
            model.generate(PROMPT, logit_bias=bad)  # type: ignore[arg-type]


def test_a_look_back_of_minus_one_is_the_whole_context(llama_f32: Path) -> None:
    with Hybrid(llama_f32, n_gpu_layers=0, n_ctx=128, n_threads=1) as model:

        def text(n: int) -> str:
            model.engine.trim(0)
            return model.generate(
                PROMPT, repeat_last_n=n, repeat_penalty=1.3, max_tokens=80, temperature=0, ignore_eos=True
            )

        assert text(-1) == text(128)
        assert text(-1) not in (text(0), text(32))


def test_text_may_be_bytes(model: Hybrid) -> None:
    assert model.tokenize("Grüße".encode()) == model.tokenize("Grüße")
    with pytest.raises(BadRequestError, match="not UTF-8"):
        model.tokenize(b"\xff")
    with pytest.raises(BadRequestError, match="not int"):
        model.tokenize(5)  # type: ignore[arg-type]


def test_unknown_options_are_errors(model: Hybrid, llama_f32: Path) -> None:
    with pytest.raises(TypeError):
        model.generate(PROMPT, temprature=1)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        model.chat([{"role": "user", "content": "hi"}], temprature=1)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        Hybrid(llama_f32, n_gpu_layer=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("prompt", ["", [], [10**6], [-1]])
def test_prompts_that_are_none_are_refused(llama_f32: Path, prompt: str | list[int]) -> None:
    with Hybrid(llama_f32, n_gpu_layers=0, n_ctx=64) as model:
        if prompt == "":
            assert model.tokenize("") == [1]  # BOS alone is a prompt
        else:
            with pytest.raises(BadRequestError):
                model.generate(prompt)


@pytest.mark.parametrize("prompt", [b"bytes", [1.5], ["a"], None, 5, {1: 2}])
def test_prompts_of_another_kind_are_refused_and_not_read_as_tokens(llama_f32: Path, prompt: Any) -> None:
    with Hybrid(llama_f32) as model, pytest.raises(BadRequestError, match="text or a list of token ids"):
        model.generate(prompt)


@pytest.mark.parametrize("stop", [3, [3], [b"x"]])
def test_a_stop_that_is_no_text_is_refused_and_none_is_none(llama_f32: Path, stop: Any) -> None:
    with Hybrid(llama_f32) as model:
        with pytest.raises(BadRequestError, match="stop must be"):
            model.generate(PROMPT, stop=stop)
        assert model.generate(PROMPT, stop=None, max_tokens=2, ignore_eos=True).finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_threads": 100_000}, "between 1 and 512"),  # beyond what ggml has room for it would crash
        ({"n_ctx": 10**12}, "between 1 and"),
        ({"n_gpu_layers": 1.5}, "n_gpu_layers"),
        ({"n_gpu_layers": None}, "n_gpu_layers"),
        ({"n_gpu_layers": "²"}, "n_gpu_layers"),
        ({"n_gpu_layers": "--5"}, "n_gpu_layers"),
        ({"device": 3}, "device"),
        ({"device": "cuda:99"}, "'cuda:99' is not available"),
        ({"device": "cuda:x"}, "'cuda:x' is not available"),
    ],
)
def test_a_senseless_placement_is_one_sentence(llama_f32: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(HybridError, match=words):
        Hybrid(llama_f32, **options)


@pytest.mark.parametrize("k", [0, 2, 4])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_an_error(tmp_path: Path, k: int, value: float) -> None:
    path = write_tiny(tmp_path / "bad.gguf", n_layers=4)
    with ModelFile(path) as file:
        norm = file.tensors["output_norm.weight"]
    with path.open("r+b") as f:
        f.seek(norm.offset)
        f.write(np.full(norm.n_values, value, np.float32).tobytes())
    with Hybrid(path, n_gpu_layers=k, device="cpu") as model, pytest.raises(EngineError, match="not numbers"):
        model.generate(PROMPT, max_tokens=3, temperature=0)


def test_a_closed_model_says_so(llama_f32: Path) -> None:
    model = Hybrid(llama_f32, n_gpu_layers=0, n_ctx=64)
    model.close()
    model.close()
    with pytest.raises(HybridError, match="closed"):
        model.generate(PROMPT)


def test_gpu_layers_without_a_gpu_are_an_error_that_names_the_emulation(
    llama_f32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid.schedule.scheduler.default_device", lambda: None)
    with pytest.raises(UnsupportedError, match="--device cpu"):
        Hybrid(llama_f32, n_gpu_layers=2)


def test_auto_without_a_gpu_is_zero_and_says_so(llama_f32: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid.schedule.scheduler.default_device", lambda: None)
    with Hybrid(llama_f32, n_ctx=64) as model:
        assert model.placement.n_gpu_layers == 0
        assert sum("No GPU" in note for note in model.notes) == 1


@pytest.mark.parametrize("k", ["all", 99, "4"])
def test_more_layers_than_there_are_means_all(llama_f32: Path, k: int | str) -> None:
    with Hybrid(llama_f32, n_gpu_layers=k, device="cpu", n_ctx=64) as model:
        assert model.placement.n_gpu_layers == 4
        assert model.engine.tail is None


@pytest.mark.parametrize("k", ["many", -2, "-3"])
def test_a_number_of_layers_that_is_none_is_refused(llama_f32: Path, k: int | str) -> None:
    with pytest.raises(BadRequestError, match="n_gpu_layers"):
        Hybrid(llama_f32, n_gpu_layers=k, device="cpu", n_ctx=64)


def test_a_context_nobody_asked_for_is_modest_and_said(llama_f32: Path) -> None:
    with Hybrid(llama_f32, n_gpu_layers=0) as model:
        assert model.n_ctx == 512  # what it was trained for
        assert any("512" in note for note in model.notes)


def test_a_context_beyond_training_is_warned_about(llama_f32: Path) -> None:
    with Hybrid(llama_f32, n_gpu_layers=0, n_ctx=1024) as model:
        assert any("1024" in note and "512" in note for note in model.notes)


def test_k_0_never_imports_torch(llama_f32: Path) -> None:
    code = (
        "import sys; from hybrid import Hybrid\n"
        f"with Hybrid({str(llama_f32)!r}, n_gpu_layers=0, n_ctx=64) as m: m.generate('hi', max_tokens=2)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
