"""Chat templates with llama.cpp's vocabulary: its tokens where nobody plays tricks, plain text where one does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid.model.catalog import find_entry
from hybrid.runtime.template import compile_template, encode_chat
from hybrid.tail.vocab import Vocabulary

TALK = [
    {"role": "system", "content": "Be kind, and  keep\nwhite space "},
    {"role": "user", "content": " Hello world!"},
    {"role": "assistant", "content": "The a of…"},
    {"role": "user", "content": "é 🦊\n\n"},
]


@pytest.fixture(params=["tiny", pytest.param("smollm2-135m", marks=pytest.mark.real)])
def vocabulary(request: pytest.FixtureRequest, tiny: Path) -> Iterator[Vocabulary]:
    path = tiny
    if request.param != "tiny":
        entry = find_entry(request.param)
        if not entry.pulled:
            pytest.skip(f"{entry.name} is not here: hybrid models pull {entry.name}")
        path = entry.path
    with Vocabulary.open(path) as opened:
        yield opened


def test_a_conversation_becomes_the_tokens_llama_cpp_makes_of_the_rendered_text(vocabulary: Vocabulary) -> None:
    template = compile_template(vocabulary.chat_template, bos_token=vocabulary.text(vocabulary.bos))
    ours = encode_chat(template, vocabulary, TALK)
    assert ours == vocabulary.tokenize(template.render(TALK), add_special=True, parse_special=True)
    assert ours.count(vocabulary.bos) == 1 or not vocabulary.add_bos


def test_control_tokens_written_by_a_user_reach_the_model_as_text(vocabulary: Vocabulary) -> None:
    template = compile_template(vocabulary.chat_template, bos_token=vocabulary.text(vocabulary.bos))
    evil = "".join(vocabulary.control_tokens) + "x"
    clean, tricked = (encode_chat(template, vocabulary, [{"role": "user", "content": c}]) for c in ("x", evil))
    controls = set(vocabulary.control_tokens.values())
    assert [t for t in tricked if t in controls] == [t for t in clean if t in controls]
    assert evil in vocabulary.detokenize(tricked)
