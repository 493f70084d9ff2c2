"""Claims about cutting a text: nothing is lost, nothing is too long, and the cuts are where they hurt least."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.apps.summarize.chunking import chunked, tokenized
from hybrid.apps.summarize.segments import MAX_CHARS, segments
from hybrid.apps.summarize.tokens import Tokenizer
from hybrid.errors import BadRequestError
from hybrid.tail.vocab import Vocabulary

TEXTS = st.text(
    st.one_of(st.sampled_from("ab .!?\n\n#。，深度👩\u200d👧\u0301\ud7ff"), st.characters(exclude_categories=("Cs",))),
    max_size=2000,
)
HARD = {
    "one word": "A" * 200_000,
    "json": '{"key":[1,2,3],"text":"value"},' * 32_000,
    "short lines": "a\n" * 50_000,
    "CJK": "深度学习" * 5000,
    "dots": "." * 100_000,
    "dots and quotes": '."' * 50_000,
    "spaces": "a" + " " * 100_000 + "b",
    "headings": "# x\n" * 20_000,
    "emoji": "👩‍👩‍👧‍👦é मिश्रित text 🇩🇪 " * 3000,
}


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Iterator[Tokenizer]:
    with Vocabulary.open(tiny) as vocabulary:
        yield Tokenizer(vocabulary)


@given(TEXTS)
def test_segments_are_the_text_and_none_is_long(text: str) -> None:
    found = list(segments(text))
    assert "".join(s.text for s in found) == text
    assert all(0 < len(s.text) <= MAX_CHARS or len(s.text.strip("\n")) <= MAX_CHARS for s in found)


@settings(deadline=None)
@given(TEXTS, st.integers(24, 300), st.integers(0, 10))
def test_chunks_hold_every_character_once_within_their_capacity(
    tokenizer: Tokenizer, text: str, capacity: int, overlap: int
) -> None:
    chunks = chunked(tokenized(text, tokenizer), capacity, overlap, tokenizer)
    assert "".join(chunk.text[chunk.overlap_chars :] for chunk in chunks) == text
    for before, chunk in zip([None, *chunks], chunks, strict=False):
        assert tokenizer.spelled(list(chunk.tokens)) == chunk.text.encode()
        assert len(chunk.tokens) <= capacity
        assert chunk.n_overlap <= overlap
        assert chunk.n_new > 0
        if chunk.overlap_chars and before:
            assert before.text.endswith(chunk.text[: chunk.overlap_chars])


@pytest.mark.parametrize("name", HARD)
def test_hard_texts_are_cut_into_about_as_few_chunks_as_possible(name: str, tokenizer: Tokenizer) -> None:
    calls = 0

    def counted(text: str) -> list[int]:
        nonlocal calls
        calls += len(text)
        return tokenizer(text)

    text = HARD[name]
    chunks = chunked(tokenized(text, counted), 1500, 0, counted)
    assert "".join(chunk.text for chunk in chunks) == text
    total = sum(len(chunk.tokens) for chunk in chunks)
    assert len(chunks) <= 1.5 * total / 1500 + 1
    assert calls <= 8 * len(text)  # each character is tokenized a few times, not once for every chunk


def test_cuts_are_before_headings_then_paragraphs_then_sentences(tokenizer: Tokenizer) -> None:
    sentence = "The quick brown fox jumps over the lazy dog of the old man who lives here. "
    section = ("# Heading\n\n" + (sentence * 4 + "\n\n") * 3) * 2
    text = section + "深度学习是机器学习的分支。" * 60
    chunks = chunked(tokenized(text, tokenizer), 1200, 0, tokenizer)
    assert chunks[1].text.startswith("# Heading")
    assert all(chunk.text.startswith("深") for chunk in chunks[3:])
    assert all(chunk.text.rstrip()[-1] in ".。" for chunk in chunks)


def test_a_heading_stays_with_its_text(tokenizer: Tokenizer) -> None:
    text = "".join(f"# Title {i}\n\n{'Some words about it. ' * 6}\n\n" for i in range(20))
    for chunk in chunked(tokenized(text, tokenizer), 420, 0, tokenizer):
        assert chunk.text.startswith("# Title")
        assert not chunk.text.rstrip().split("\n")[-1].startswith("#")


def test_families_and_accents_are_not_cut_apart(tokenizer: Tokenizer) -> None:
    family = "👩\u200d👩\u200d👧"
    for segment in segments(family * 300):
        assert not segment.text.startswith("\u200d")
        assert not segment.text.endswith("\u200d")


def test_a_space_before_the_text_is_not_invented(tokenizer: Tokenizer) -> None:
    assert tokenizer.spelled(tokenizer("world")) == b"world"
    assert tokenizer.spelled(tokenizer(" world")) == b" world"


def test_control_token_text_stays_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer("</s><|user|>")
    assert 2 not in ids
    assert 3 not in ids
    assert tokenizer.spelled(ids) == b"</s><|user|>"


def test_room_for_less_than_a_character_is_an_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRequestError, match="-c"):
        chunked(tokenized("深", tokenizer), 2, 0, tokenizer)
