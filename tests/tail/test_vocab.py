"""The vocabulary: text to tokens and back, the same from a whole model, a slice, or a file alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid.errors import BadRequestError, EngineError
from hybrid.tail.llama import lib
from hybrid.tail.tail import Tail
from hybrid.tail.vocab import Vocabulary


@pytest.fixture
def vocabulary(tiny_llama: Path) -> Vocabulary:
    return Vocabulary.open(tiny_llama)


def test_it_knows_its_special_tokens(vocabulary: Vocabulary) -> None:
    assert (vocabulary.bos, vocabulary.eos) == (1, 2)
    assert vocabulary.add_bos
    assert vocabulary.control_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2, "<|user|>": 3, "<|end|>": 4}
    assert vocabulary.is_control(3)
    assert not vocabulary.is_control(300)
    assert vocabulary.is_eog(2)
    assert 2 in vocabulary.eog_tokens
    assert "<|user|>" in (vocabulary.chat_template or "")


def test_control_tokens_come_from_templates_only(vocabulary: Vocabulary) -> None:
    assert 3 in vocabulary.tokenize("<|user|>hi", parse_special=True)
    assert 3 not in vocabulary.tokenize("<|user|>hi")
    assert vocabulary.tokenize("a")[0] == 1
    assert vocabulary.tokenize("a", add_special=False)[0] != 1


@given(st.text(max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_text_survives_the_round_trip(vocabulary: Vocabulary, text: str) -> None:
    tokens = vocabulary.tokenize(text, add_special=False)
    assert vocabulary.detokenize(tokens) == text
    joined = b"".join(vocabulary.piece(t) for t in tokens)
    assert joined.decode().removeprefix(" ") == text.removeprefix(" ") or joined.decode() == " " + text


def test_lone_surrogates_and_zero_bytes_are_text_too(vocabulary: Vocabulary) -> None:
    assert (
        vocabulary.detokenize(vocabulary.tokenize("a\0b\ud800c", add_special=False)) == "a\0b\N{REPLACEMENT CHARACTER}c"
    )


def test_control_tokens_have_no_text_unless_asked(vocabulary: Vocabulary) -> None:
    assert vocabulary.piece(3) == b""
    assert vocabulary.piece(3, special=True) == b"<|user|>"
    tokens = vocabulary.tokenize("<|user|>", parse_special=True, add_special=False)
    assert "<|user|>" in vocabulary.detokenize(tokens, special=True)
    assert vocabulary.detokenize(vocabulary.tokenize("hi"), special=True).startswith("<s>")
    assert vocabulary.detokenize(vocabulary.tokenize("hi"), special=True, remove_special=True).strip() == "hi"


def test_ids_that_are_no_tokens_are_refused(vocabulary: Vocabulary) -> None:
    for token in (-1, vocabulary.n_vocab, 2**31 - 1):
        for use in (vocabulary.piece, vocabulary.is_eog, vocabulary.is_control, vocabulary.attributes, vocabulary.text):
            with pytest.raises(BadRequestError, match="not a token"):
                use(token)
        with pytest.raises(BadRequestError, match="not a token"):
            vocabulary.detokenize([5, token])
    assert vocabulary.detokenize([]) == ""


def test_a_slice_has_the_same_vocabulary(
    vocabulary: Vocabulary, tiny_llama: Path, open_tails: Callable[..., Tail]
) -> None:
    text = "Hello world, the thing is: äöü \N{SNOWMAN}"
    for k in (0, 3):
        tail = open_tails(tiny_llama, k)
        assert tail.vocabulary.tokenize(text) == vocabulary.tokenize(text)
        assert tail.vocabulary.chat_template == vocabulary.chat_template


def test_a_closed_vocabulary_refuses(vocabulary: Vocabulary) -> None:
    vocabulary.close()
    vocabulary.close()
    with pytest.raises(EngineError, match="closed"):
        vocabulary.tokenize("x")


def test_closing_waits_for_who_is_inside_llama_cpp(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory may be freed then: another thread's tokenizing ended the process."""
    inside, leave = threading.Event(), threading.Event()

    class Slow:
        def __getattr__(self, name: str) -> object:
            inside.set()
            assert leave.wait(60)
            return getattr(lib(), name)

    expected = vocabulary.tokenize("Hello")
    monkeypatch.setattr(vocabulary, "_lib", Slow())
    got: list[list[int]] = []
    user = threading.Thread(target=lambda: got.append(vocabulary.tokenize("Hello")))
    closer = threading.Thread(target=vocabulary.close)
    user.start()
    assert inside.wait(60)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive()
    leave.set()
    user.join(60)
    closer.join(60)
    assert got == [expected]
    with pytest.raises(EngineError, match="closed"):
        vocabulary.tokenize("Hello")
