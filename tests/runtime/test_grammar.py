"""Grammars: what llama.cpp would print, crash or hang on is one sentence; what it takes holds at every split."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid import Hybrid
from hybrid.errors import BadRequestError, EngineError
from hybrid.runtime.gbnf import check_grammar
from hybrid.runtime.grammar import Grammar, any_json, schema_grammar
from hybrid.runtime.sampling import NOTHING, Sampler, SamplingParams
from hybrid.tail.llama import lib
from hybrid.tail.vocab import Vocabulary

PROMPT = "Hello world"
LIST = 'root ::= item{2,4}\nitem ::= "- " [a-z]{1,5} "\\n"'


@pytest.fixture(scope="module")
def vocabulary(llama_f32: Path) -> Iterator[Vocabulary]:
    with Vocabulary.open(llama_f32) as vocabulary:
        yield vocabulary


@pytest.fixture(scope="module", params=[0, 2, 4])
def model(llama_f32: Path, request: pytest.FixtureRequest) -> Iterator[Hybrid]:
    with Hybrid(llama_f32, n_gpu_layers=request.param, device="cpu", n_ctx=256, n_threads=1) as model:
        yield model


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_text_follows_the_grammar_at_every_split(model: Hybrid, temperature: float) -> None:
    for seed in range(3):
        done = model.generate(PROMPT, grammar=LIST, temperature=temperature, seed=seed)
        assert done.finish_reason == "stop"
        assert re.fullmatch(r"(- [a-z]{1,5}\n){2,4}", done)


def test_the_grammar_neither_sees_the_prompt_nor_survives_its_request(model: Hybrid) -> None:
    first = model.generate("- abc\n", grammar=LIST, temperature=0)
    assert model.generate("- abc\n", grammar=LIST, temperature=0) == first
    assert re.fullmatch(r"(- [a-z]{1,5}\n){2,4}", first)
    free = model.generate(PROMPT, temperature=0, max_tokens=8, ignore_eos=True)
    assert len(free.tokens) == 8


def test_a_text_that_fits_the_grammar_anyway_is_the_one_without_it(model: Hybrid) -> None:
    free = model.generate(PROMPT, temperature=0, max_tokens=3, ignore_eos=True)
    spelled = "".join(f'"\\x{b:02X}"' if b < 128 else "." for b in str(free).encode())
    if spelled.isascii() and "\ufffd" not in free:
        assert model.generate(PROMPT, temperature=0, max_tokens=3, grammar=f"root ::= {spelled} .*") == free


def test_a_cut_text_is_a_beginning_and_says_so(model: Hybrid) -> None:
    done = model.generate(PROMPT, grammar='root ::= "abcdefgh"', max_tokens=3, temperature=0)
    assert done.finish_reason == "length"
    assert "abcdefgh".startswith(done)


def test_a_complete_grammar_ends_the_text_even_where_its_end_token_is_banned(model: Hybrid) -> None:
    done = model.generate(PROMPT, grammar='root ::= "ab"', ignore_eos=True, temperature=0)
    assert done == "ab"
    assert done.finish_reason == "stop"


def test_a_grammar_that_cannot_go_on_is_an_error_not_a_crash(model: Hybrid) -> None:
    banned = {token: float("-inf") for token in model.tokenize("b", add_special=False)}
    every_b = {i: float("-inf") for i in range(366) if b"b" in model.engine.vocabulary.piece(i)}
    with pytest.raises(EngineError, match="cannot spell"):
        model.generate(PROMPT, grammar='root ::= "ab"', logit_bias={**banned, **every_b}, temperature=0.7)
    assert model.generate(PROMPT, grammar='root ::= "ab"') == "ab"


def test_a_control_token_is_not_the_text_that_spells_it(model: Hybrid) -> None:
    token = model.tokenize("<|user|>", add_special=False, parse_special=True)[0]
    done = model.generate(PROMPT, grammar='root ::= "<|user|>"', logit_bias={token: 1000.0}, temperature=0)
    assert done == "<|user|>"
    assert token not in done.tokens


SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}, "b": {"enum": [1, 2]}}},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"const": "x"}, {"type": "integer"}]},
]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_json_is_valid_and_of_the_schema(model: Hybrid, schema: dict[str, Any]) -> None:
    for seed in range(2):
        done = model.generate(PROMPT, json_schema=schema, seed=seed, temperature=1.2)
        value = json.loads(done)
        assert isinstance(value, {"object": dict, "array": list}.get(schema.get("type", ""), (str, int)))
    as_text = model.generate(PROMPT, json_schema=json.dumps(schema), temperature=0)
    assert json.loads(as_text) is not None


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("", "no rule `root`"),
        ('a ::= "x"', "no rule `root`"),
        ('root ::= "a', "closing quote"),
        ('root ::= "\\q"', "escape"),
        ("root ::= [a", "closing bracket"),
        ("root = x", "`::=` is expected after `root`"),
        ("root ::= a b\na ::= [x]", r"`b` \(line 1\)"),
        ('root ::= "x"\n\nother ::= ) x', "Line 3"),
        ('root ::= ("a"', r"`\)` is expected"),
        ("root ::= *", "nothing before"),
        ('root ::= ""+', "nothing before"),
        ('root ::= "x"{5,3}', "before it begins"),
        ('root ::= "x"{a}', "repetition is written"),
        ('root ::= "x"{9999999999999999999999}', "2000 times"),
        ('root ::= (("a"{0,100}){0,100})', "2000 times"),
        ('root ::= root "x" | "y"', "left recursion"),
        ('root ::= "x" a\na ::= b a\nb ::= c\nc ::= ""', "nothing but itself"),
        ('root ::= b root "x" | "q"\nb ::= d\nd ::= ""', "left recursion"),
        ("root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000, "parentheses"),
        ("root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(9999)) + '\nr9999 ::= "a"', "too many"),
        (
            "root ::= r0\n" + "\n".join(f'r{i} ::= r{i + 1} "x" | r{i + 1}' for i in range(40)) + '\nr40 ::= "a"',
            "too m",
        ),
        ('root ::= "' + "a" * 10_000 + '"{0,2000}', "too large"),
        ("root ::= <think>", r"at `<think>`: a token's name"),
        ('root ::= "A" !<[3]>*', r"at `!<\[3\]>\*`: a token's name"),
        ('root ::= "\x00"', "no text"),
        ('root ::= "x"' + " " * (1 << 20), "KiB"),
    ],
)
def test_what_llama_cpp_would_not_survive_is_one_sentence(vocabulary: Vocabulary, grammar: str, words: str) -> None:
    with pytest.raises(BadRequestError, match=words) as caught:
        Grammar(grammar, vocabulary)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "grammar",
    [
        any_json(),
        LIST,
        'root ::= (ws)* "a"\nws ::= " "?',
        'root ::= "a" |\n "b" # or\n',
        'root ::= (\n"a"\n|\n"b")+ # c\n',
        'root ::= "a"{2}{3} [^a-z\\]]? . [a-] [-a] [^] []',
        'root ::= "a" root | "b"',
        'root ::= "\\x41\\u00e9\\U0001F600\\t" "é"\r\nb ::= root',
    ],
)
def test_sound_grammars_are_taken(vocabulary: Vocabulary, grammar: str) -> None:
    with closing(Grammar(grammar, vocabulary)):
        pass


PARTS = ['"a"', '""', "[a-z]", "[^b]", "(", ")", "|", "*", "+", "?", "{2}", "{1,3}", "{2,}", ".", " ", "\n", "# x\n"]
PARTS += ["root", "b", "root ::= ", "b ::= ", '"', "[", "]", "\\", "<[1]>", "!", "{", "é"]


@given(st.lists(st.sampled_from(PARTS), max_size=14))
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_grammar_is_sound_to_us_only_if_it_is_to_llama_cpp(vocabulary: Vocabulary, parts: list[str]) -> None:
    text = 'b ::= "x"\nroot ::= ' + "".join(parts)
    refusal = _refusal(text)
    if refusal is None:
        assert _taken(vocabulary, text) or _left_recursive(vocabulary, text)
    elif not re.search(
        "left recursion|nothing but itself|no rule|before it begins|token's name", refusal
    ):  # llama.cpp might not return from those
        assert not _taken(vocabulary, text), refusal


def _refusal(text: str) -> str | None:
    try:
        check_grammar(text)
    except BadRequestError as e:
        return str(e)
    return None


def _taken(vocabulary: Vocabulary, text: str) -> bool:
    sampler = lib().llama_sampler_init_grammar(vocabulary.handle, text.encode(), b"root")
    if sampler:
        lib().llama_sampler_free(sampler)
    return bool(sampler)


def _left_recursive(vocabulary: Vocabulary, text: str) -> bool:
    """Whether llama.cpp sees left recursion; ours, which would let the harmless kind pass, hands on its sentence."""
    with pytest.raises(BadRequestError, match="left recursion"):
        Grammar(text, vocabulary)
    return True


@pytest.mark.parametrize(
    "schema",
    [
        "{",
        "[]",
        {"type": "no such"},
        {"type": "string", "maxLength": 10**9},
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
        {"type": "string", "pattern": "^a{99999999}$"},
        {"type": "string", "pattern": "a"},
        {"type": "string", "pattern": r"^\d$"},
        {"type": "string", "pattern": "^a{9_999_999}$"},
        {"type": "string", "pattern": r"^\\{2,1001}$"},
        {"type": "string", "pattern": "^" + r"\n" * 50_000 + "{999}$"},
        {"type": "string", "pattern": "^a]$"},  # the converter would not come back
        {"type": "string", "pattern": "^a}$"},
        {"type": "string", "pattern": "^" + "[" * 100_000 + "$"},
        {"$ref": "https://example.com/x"},
        {"$ref": "#/no/such"},
        {"$ref": "#"},
        {"properties": 7},
        json.dumps({"items": 1}) * 2,
        "[" * 100_000,
    ],
)
def test_a_schema_that_cannot_be_a_grammar_is_one_sentence(schema: Any) -> None:
    with pytest.raises(BadRequestError, match="JSON schema"):
        schema_grammar(schema)


@pytest.mark.parametrize("pattern", ["^code 20240101$", r"^\{5000\}$", "^[{5000}]$", "^[0-9]{4}-1500$", "^a{0,1000}$"])
def test_numbers_in_a_pattern_that_are_no_repetitions_are_text(pattern: str, vocabulary: Vocabulary) -> None:
    with closing(Grammar(schema_grammar({"type": "string", "pattern": pattern}), vocabulary)):
        pass


def test_masking_changes_nothing_for_tokens_the_grammar_allows(vocabulary: Vocabulary) -> None:
    logits = np.random.default_rng(0).standard_normal(vocabulary.n_vocab).astype(np.float32)
    with (
        closing(Grammar("root ::= .*", vocabulary)) as anything,
        Sampler(SamplingParams(temperature=0), vocabulary.n_vocab, anything) as sampler,
    ):
        allowed = [i for i in range(vocabulary.n_vocab) if anything.allows(i)]
        assert sampler.sample(logits) == max(allowed, key=lambda i: logits[i])
    with (
        closing(Grammar('root ::= "q"', vocabulary)) as one,
        Sampler(SamplingParams(temperature=0, logit_bias=dict.fromkeys(range(366), -np.inf)), 366, one) as sampler,
    ):
        assert sampler.sample(logits) == NOTHING


@pytest.mark.parametrize("text", ['root ::= "q"', "root ::= [a-f]", "root ::= [^a-z]", 'root ::= "\\n" | "he"'])
def test_the_next_best_token_is_the_best_of_all_that_are_allowed(
    vocabulary: Vocabulary, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, repeat_penalty=1.5, logit_bias={300: 3.0, 310: -3.0})
    for seed in range(8):
        logits = np.random.default_rng(seed).standard_normal(vocabulary.n_vocab).astype(np.float32)
        found = []
        for n in (0, 4, 64, 256):
            monkeypatch.setattr("hybrid.runtime.sampling.N_NEXT_BEST", max(n, 1))
            with (
                closing(Grammar(text, vocabulary)) as grammar,
                Sampler(params, vocabulary.n_vocab, grammar) as sampler,
            ):
                sampler._greedy = n > 0
                sampler.accept([5, 6, 300])
                found.append(sampler.sample(logits))
        assert len(set(found)) == 1


def test_the_converter_does_not_take_llama_cpps_log() -> None:
    code = (
        "import sys; from hybrid.runtime.grammar import schema_grammar; schema_grammar('{}'); "
        "sys.exit('llama_cpp.llama' in sys.modules or 'llama_cpp._logger' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
