"""Code written for `llama_cpp.Llama` runs with `Hybrid`: the same calls go to both, and what comes back is compared."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid import Hybrid
from hybrid.errors import BadRequestError, HybridError, UnsupportedError
from tests.tiny import write_tiny

PROMPT = "Hello world, the ring of"
MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [1, 2]}},
    "required": ["name", "age"],
}
TOOL = {"type": "function", "function": {"name": "set_age", "description": "x", "parameters": SCHEMA}}
NO_BYTES = dict.fromkeys(range(5, 261), -1000.0)
"""A random model says bytes that are no UTF-8, which that class drops and miscounts."""
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "logit_bias": NO_BYTES}
LONG: dict[str, Any] = {**GREEDY, "max_tokens": 60}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = (
        "{{ bos_token }}{% for m in messages %}<|user|>{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}<|user|>assistant: "
    )
    return write_tiny(tmp_path_factory.mktemp("tiny") / "chat.gguf", n_layers=4, template=template)


@pytest.fixture(scope="module")
def theirs(tiny: Path) -> Iterator[Any]:
    from llama_cpp import Llama

    # Flash attention is what ours takes wherever it can: so that logits are the same to the bit.
    model = Llama(model_path=str(tiny), n_ctx=512, n_threads=1, logits_all=True, flash_attn=True, verbose=False)
    yield model
    model.close()


@pytest.fixture(scope="module")
def ours(tiny: Path) -> Iterator[Hybrid]:
    with Hybrid(model_path=str(tiny), n_ctx=512, n_threads=1, logits_all=True, verbose=False, n_gpu_layers=0) as m:
        yield m


@pytest.fixture(scope="module", params=[2, 4])
def split(tiny: Path, request: pytest.FixtureRequest) -> Iterator[Hybrid]:
    with Hybrid(tiny, n_ctx=512, n_gpu_layers=request.param, device="cpu", n_threads=1) as model:
        yield model


def shape(value: Any) -> Any:
    """Keys and types, all the way down; of a list, the distinct shapes of its items."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [item for i, item in enumerate(map(shape, value)) if item not in list(map(shape, value))[:i]]
    return "float" if isinstance(value, np.floating) else type(value).__name__


def without_tokens(answer: Any) -> Any:
    """`top_logprobs` has tokens for keys; what is compared is that it maps them to numbers."""
    choice = answer["choices"][0]
    found = choice.get("logprobs")
    if found is None or "top_logprobs" not in found:
        return answer
    top = [None if t is None else list(t.values()) for t in found["top_logprobs"]]
    return {**answer, "choices": [{**choice, "logprobs": {**found, "top_logprobs": top}}]}


def criteria(*each: Callable[[Any, Any], bool]) -> Any:
    from llama_cpp import StoppingCriteriaList

    return StoppingCriteriaList(each)


CALLS: dict[str, Callable[[Any], Any]] = {
    "completion": lambda m: m.create_completion(PROMPT, **GREEDY),
    "called": lambda m: m(PROMPT, seed=3, **GREEDY),
    "tokens": lambda m: m.create_completion([1, 270, 300], **GREEDY),
    "control tokens": lambda m: m.create_completion("<|user|>x<|end|>", **GREEDY),
    "echo": lambda m: m.create_completion(PROMPT, echo=True, **GREEDY),
    "logprobs": lambda m: m.create_completion(PROMPT, logprobs=3, **GREEDY),
    "echo and logprobs": lambda m: m.create_completion(PROMPT, logprobs=2, echo=True, **GREEDY),
    "named": lambda m: m.create_completion(PROMPT, model="other", **GREEDY),
    "biased": lambda m: m.create_completion(PROMPT, logit_bias={"300": 1000.0}, temperature=0),
    "chat": lambda m: m.create_chat_completion(MESSAGES, **GREEDY),
    "chat with logprobs": lambda m: m.create_chat_completion(MESSAGES, logprobs=True, top_logprobs=2, **GREEDY),
    "json": lambda m: m.create_chat_completion(MESSAGES, response_format={"type": "json_object"}, **GREEDY),
    "schema": lambda m: m.create_chat_completion(
        MESSAGES, response_format={"type": "json_object", "schema": SCHEMA}, **LONG
    ),
    "tool": lambda m: m.create_chat_completion(
        MESSAGES, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "set_age"}}, **GREEDY
    ),
    "tool if it likes": lambda m: m.create_chat_completion(MESSAGES, tools=[TOOL], tool_choice="auto", **GREEDY),
    "function": lambda m: m.create_chat_completion(
        MESSAGES, functions=[TOOL["function"]], function_call={"name": "set_age"}, **GREEDY
    ),
    "stopping criteria": lambda m: m.create_completion(
        PROMPT, stopping_criteria=criteria(lambda ids, logits: len(ids) > 20), **GREEDY
    ),
}
STREAMS: dict[str, Callable[[Any], Any]] = {
    "completion": lambda m: m.create_completion(PROMPT, stream=True, **GREEDY),
    "logprobs": lambda m: m.create_completion(PROMPT, logprobs=2, stream=True, **GREEDY),
    "chat": lambda m: m.create_chat_completion(MESSAGES, stream=True, **GREEDY),
    "schema": lambda m: m.create_chat_completion(
        MESSAGES, response_format={"type": "json_object", "schema": SCHEMA}, stream=True, **LONG
    ),
    "tool": lambda m: m.create_chat_completion(MESSAGES, tools=[TOOL], tool_choice=CHOICE, stream=True, **LONG),
}
CHOICE = {"type": "function", "function": {"name": "set_age"}}


@pytest.mark.parametrize("name", CALLS)
def test_an_answer_has_the_same_keys_types_and_text(name: str, ours: Hybrid, theirs: Any) -> None:
    mine, other = without_tokens(CALLS[name](ours)), without_tokens(CALLS[name](theirs))
    assert shape(mine) == shape(other)
    assert list(mine) == list(other)
    text = [dict(c.get("message") or {"text": c["text"]}) for c in (mine["choices"][0], other["choices"][0])]
    for message in text:
        for call in message.get("tool_calls", []):
            assert call.pop("id").startswith("call__0_set_age_cmpl-")
    assert text[0] == text[1]
    assert mine["choices"][0]["finish_reason"] == other["choices"][0]["finish_reason"]
    assert mine["usage"] == other["usage"]


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_has_the_same_chunks(name: str, ours: Hybrid, theirs: Any) -> None:
    mine, other = ([without_tokens(c) for c in STREAMS[name](m)] for m in (ours, theirs))
    assert shape(mine) == shape(other)
    assert len({c["id"] for c in mine}) == 1
    reasons = [[c["choices"][0]["finish_reason"] for c in chunks][-1] for chunks in (mine, other)]
    assert reasons[0] == reasons[1]
    first = [chunks[0]["choices"][0].get("delta") for chunks in (mine, other)]
    assert first[0] == first[1]


def test_the_pieces_of_a_stream_are_the_text(ours: Hybrid) -> None:
    whole = ours.create_completion(PROMPT, **GREEDY)["choices"][0]["text"]
    assert "".join(c["choices"][0]["text"] for c in ours.create_completion(PROMPT, stream=True, **GREEDY)) == whole
    said = ours.create_chat_completion(MESSAGES, **GREEDY)["choices"][0]["message"]["content"]
    deltas = [c["choices"][0]["delta"] for c in ours.create_chat_completion(MESSAGES, stream=True, **GREEDY)]
    assert "".join(delta.get("content", "") for delta in deltas) == said


def test_log_probabilities_are_llama_cpps(ours: Hybrid, theirs: Any) -> None:
    for echo in (False, True):
        mine, other = (m.create_completion(PROMPT, logprobs=2, echo=echo, **GREEDY) for m in (ours, theirs))
        found, expected = mine["choices"][0]["logprobs"], other["choices"][0]["logprobs"]
        assert found["tokens"] == expected["tokens"]
        assert found["text_offset"][0] == expected["text_offset"][0]
        assert found["token_logprobs"][1:] == pytest.approx(expected["token_logprobs"][1:], abs=5e-3)
        assert [None if t is None else len(t) for t in found["top_logprobs"]] == [
            None if t is None else len(t) for t in expected["top_logprobs"]
        ]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8},
        {"temperature": 0, "repeat_penalty": 1.8},  # the penalties do not see the prompt
        {"temperature": 0.7, "presence_penalty": 1.0, "frequency_penalty": 0.5, "top_p": 0.8, "top_k": 20},
        {"temperature": 0.3, "mirostat_mode": 1},  # the temperature counts for nothing
        {"temperature": 0.3, "mirostat_mode": 2, "mirostat_tau": 3.0},
        {"temperature": 1.2, "typical_p": 0.5, "min_p": 0.1},
    ],
)
def test_a_seed_draws_the_same_text(options: dict[str, Any], ours: Hybrid, theirs: Any) -> None:
    call = {"max_tokens": 24, "seed": 11, "logit_bias": NO_BYTES, **options}
    ours.engine.trim(0)  # the same batches, so that not even the last bit of a logit differs
    theirs.reset()
    mine, other = (m.create_completion("the a of the ring a he in", **call) for m in (ours, theirs))
    assert mine["choices"][0]["text"] == other["choices"][0]["text"]


def test_a_streams_logprobs_are_all_of_its_tokens(ours: Hybrid) -> None:
    silent: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "logit_bias": {3: 1000.0}}  # a control token: no text
    whole = ours.create_completion(PROMPT, logprobs=1, **silent)["choices"][0]["logprobs"]
    assert len(whole["tokens"]) == 3
    parts = [c["choices"][0]["logprobs"] for c in ours.create_completion(PROMPT, logprobs=1, stream=True, **silent)]
    assert [token for part in parts if part for token in part["tokens"]] == whole["tokens"]
    chunks = ours.create_chat_completion(MESSAGES, logprobs=True, stream=True, **silent)
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert sum(len(part["content"]) for part in found if part) == 3


@pytest.mark.parametrize("method", ["create_completion", "create_chat_completion", "__call__", "create_embedding"])
def test_arguments_have_the_same_names_order_and_defaults(method: str) -> None:
    from llama_cpp import Llama

    mine, other = (inspect.signature(getattr(c, method)).parameters.values() for c in (Hybrid, Llama))
    assert [(p.name, p.default, p.kind) for p in mine] == [(p.name, p.default, p.kind) for p in other]


def test_a_schema_holds_at_every_split(split: Hybrid) -> None:
    for seed in range(3):
        answer = split.create_chat_completion(
            MESSAGES, response_format={"type": "json_object", "schema": SCHEMA}, seed=seed, temperature=1.5
        )
        value = json.loads(answer["choices"][0]["message"]["content"])
        assert set(value) == {"name", "age"}
        assert value["age"] in (1, 2)


def test_logprobs_are_the_same_at_every_split(split: Hybrid, ours: Hybrid) -> None:
    mine, other = (m.create_completion(PROMPT, logprobs=1, echo=True, **GREEDY) for m in (split, ours))
    found, expected = mine["choices"][0]["logprobs"], other["choices"][0]["logprobs"]
    assert found["tokens"] == expected["tokens"]
    assert found["token_logprobs"][1:] == pytest.approx(expected["token_logprobs"][1:], abs=5e-3)


def test_a_logits_processor_changes_what_is_sampled(ours: Hybrid, split: Hybrid) -> None:
    seen: list[int] = []

    def only_300(ids: Any, logits: Any) -> Any:
        seen.append(len(ids))
        logits[:] = -100.0
        logits[300] = 1.0
        return logits

    for model in (ours, split):
        seen.clear()
        answer = model.create_completion([1, 5], max_tokens=3, logits_processor=[only_300])
        assert answer["choices"][0]["text"] == 3 * model.detokenize([300])
        assert seen == [2, 3, 4]


def test_a_seed_repeats_a_text_and_the_constructors_is_the_default(llama_f32: Path) -> None:
    with Hybrid(llama_f32, n_gpu_layers=0, n_ctx=128, seed=7) as model:
        texts = [model.create_completion(PROMPT, seed=seed)["choices"][0]["text"] for seed in (7, None, 8)]
        assert texts[0] == texts[1] != texts[2]
        assert model.generate(PROMPT, max_tokens=16) == model.generate(PROMPT, max_tokens=16, seed=7)


@pytest.fixture(scope="module")
def infill(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ids = {f"tokenizer.ggml.fim_{name}_token_id": 300 + i for i, name in enumerate(("pre", "suf", "mid"))}
    return write_tiny(tmp_path_factory.mktemp("fim") / "fim.gguf", n_layers=1, metadata=ids)


def test_a_suffix_is_put_around_the_middle_in_either_order(infill: Path) -> None:
    with Hybrid(infill, n_gpu_layers=0, n_ctx=64) as model:
        model.create_completion("ab", suffix="cd", max_tokens=1)
        a, b = model.tokenize("ab", add_special=False), model.tokenize("cd", add_special=False)
        assert list(model.engine.tokens()) == [1, 300, *a, 301, *b, 302]
    with Hybrid(infill, n_gpu_layers=0, n_ctx=64, spm_infill=True) as model:
        model.create_completion("ab", suffix="cd", max_tokens=1)
        assert list(model.engine.tokens()) == [1, 301, *b, 300, *a, 302]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m.create_completion("a", suffix="b"), "fill in a middle"),
        (lambda m: m.create_completion("a", tfs_z=0.5), "tail-free"),
        (lambda m: m.create_completion("a", logprobs=-1), "logprobs"),
        (lambda m: m.create_completion("a", grammar="root ::= x"), "does not define"),
        (lambda m: m.create_completion("a", logit_bias={"x": 1}), "logit_bias"),
        (lambda m: m.create_completion("a", mirostat_mode=3), "mirostat"),
        (lambda m: m.create_completion("a", logits_processor=[1]), "logits_processor"),
        (lambda m: m.create_completion(None), "prompt"),
        (lambda m: m.create_chat_completion(MESSAGES, response_format={"type": "yaml"}), "response_format"),
        (
            lambda m: m.create_chat_completion(
                MESSAGES, response_format={"type": "json_object", "schema": {"type": "no such"}}
            ),
            "JSON schema",
        ),
        (lambda m: m.create_chat_completion(MESSAGES, tools=[TOOL], tool_choice="other"), "tool_choice"),
        (lambda m: m.create_chat_completion(MESSAGES, tools=[{}]), "A tool is"),
        (lambda m: m.create_chat_completion([{"role": "user", "content": [{"type": "image_url"}]}]), "only text"),
        (lambda m: m.embed("x"), "no embeddings"),
        (lambda m: m.create_embedding("x"), "no embeddings"),
    ],
)
def test_what_cannot_be_done_is_an_error(call: Callable[[Any], Any], words: str, ours: Hybrid) -> None:
    with pytest.raises(HybridError, match=words):
        call(ours)


def test_openais_spelling_of_a_schema_works(ours: Hybrid) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [7]}}}
    answer = ours.create_chat_completion(MESSAGES, response_format=form, temperature=0)
    assert json.loads(answer["choices"][0]["message"]["content"]) == 7


def test_a_required_tool_is_called(ours: Hybrid) -> None:
    answer = ours.create_chat_completion(MESSAGES, tools=[TOOL], tool_choice="required", temperature=0)
    call = answer["choices"][0]["message"]["tool_calls"][0]["function"]
    assert call["name"] == "set_age"
    assert set(json.loads(call["arguments"])) == {"name", "age"}


def test_mirostat_and_typical_sampling_make_text(ours: Hybrid) -> None:
    for options in ({"mirostat_mode": 1}, {"mirostat_mode": 2}, {"typical_p": 0.5}):
        assert ours.create_completion(PROMPT, max_tokens=4, seed=1, **options)["usage"]["completion_tokens"] > 0


def test_constructor_arguments_that_change_nothing_are_taken(llama_f32: Path) -> None:
    from llama_cpp import Llama

    same = {
        name: p.default
        for name, p in inspect.signature(Llama.__init__).parameters.items()
        if p.default is not inspect.Parameter.empty and name != "n_gpu_layers"
    }
    with Hybrid(model_path=str(llama_f32), n_gpu_layers=0, **same) as model:
        assert model.n_ctx == 512
    with Hybrid(llama_f32, n_gpu_layers=-1, device="cpu", n_ctx=64, type_k=30, type_v=30) as model:
        assert model.placement.n_gpu_layers == 4
        assert model.placement.kv_dtype == "bf16"
    with Hybrid(
        llama_f32, n_ctx=64, type_k=None, type_v=None, kv_dtype="q8_0", n_threads=1, n_threads_batch=1
    ) as model:
        assert model.placement.kv_dtype == "q8_0"


@pytest.mark.parametrize(
    "argument",
    [
        {"embedding": True},
        {"lora_path": "x"},
        {"chat_format": "chatml"},
        {"draft_model": object()},
        {"offload_kqv": False},
        {"rope_freq_base": 1e6},
        {"vocab_only": True},
        {"n_threads_batch": 2},
        {"type_k": 8},
        {"tensor_split": [0.5, 0.5]},
        {"last_n_tokens_size": -1},
    ],
)
def test_constructor_arguments_it_cannot_honour_are_refused(llama_f32: Path, argument: dict[str, Any]) -> None:
    with pytest.raises((UnsupportedError, BadRequestError), match=next(iter(argument))):
        Hybrid(llama_f32, n_gpu_layers=0, n_ctx=64, **argument)


def test_a_constructor_argument_nobody_knows_is_a_type_error(llama_f32: Path) -> None:
    with pytest.raises(TypeError, match="n_gpu_layer'"):
        Hybrid(llama_f32, n_gpu_layer=3)
    with pytest.raises(BadRequestError, match="once"):
        Hybrid(llama_f32, model_path=llama_f32)


def test_the_constructors_look_back_is_that_of_every_request(llama_f32: Path) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "temperature": 0, "ignore_eos": True}
    with Hybrid(llama_f32, n_ctx=128, last_n_tokens_size=0) as model:
        free = model.generate(PROMPT, **options)
        assert model.generate(PROMPT, repeat_penalty=1.8, **options) == free
        assert dict(model.generate_many([PROMPT], repeat_penalty=1.8, **options))[0] == free
        assert model.generate(PROMPT, repeat_penalty=1.8, repeat_last_n=64, **options) != free


def test_verbose_prints_the_notes(llama_f32: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Hybrid(llama_f32, n_gpu_layers=0, verbose=True) as model:
        assert capsys.readouterr().err.splitlines() == model.notes


SCRIPT = """
llm = Llama(model_path=path, n_gpu_layers=0, n_ctx=256, n_threads=1, seed=1, verbose=False)
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
said = llm.create_chat_completion(messages, max_tokens=8, temperature=0.0, logit_bias=no_bytes)
stream = list(llm.create_chat_completion(messages, max_tokens=8, stream=True, logit_bias=no_bytes))
form = {"type": "json_object", "schema": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}}
data = llm.create_chat_completion(messages, response_format=form, temperature=0.0)
parsed = json.loads(data["choices"][0]["message"]["content"])
done = llm("Hello world", max_tokens=4, stop=["xyz"], echo=True, logit_bias=no_bytes)
llm.close()
"""


def test_a_script_written_for_that_class_runs_with_this_one(tiny: Path) -> None:
    from llama_cpp import Llama

    found = []
    for kind in (Hybrid, Llama):
        names: dict[str, Any] = {"Llama": kind, "path": str(tiny), "json": json, "no_bytes": NO_BYTES}
        exec(SCRIPT, names)
        assert names["parsed"]["n"] in (1, 2)
        found.append([shape(names[name]) for name in ("said", "stream", "data", "parsed", "done")])
    assert found[0] == found[1]
