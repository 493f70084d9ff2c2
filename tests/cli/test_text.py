"""Claims about TextStream: chunking is invisible, characters stay whole, stop strings never leak."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hybrid.errors import BadRequestError
from hybrid.runtime.text import TextStream

# A small alphabet makes stop strings and their near misses frequent; é and 🦊 take 2 and 4 bytes.
LETTERS = st.sampled_from("abé🦊")
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4)


def cut(data: bytes, points: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(p % (len(data) + 1) for p in points)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def collect(chunks: list[bytes], stop: list[str]) -> tuple[list[str], TextStream]:
    stream = TextStream(stop)
    return [*(stream.push(c) for c in chunks), stream.finish()], stream


def reference(text: str, stop: list[str]) -> str:
    """The definition: everything before the first place where any stop string begins."""
    return text[: min((i for i in map(text.find, stop) if i >= 0), default=len(text))]


@given(st.text(LETTERS, max_size=40), STOPS, st.lists(st.integers(0, 200), max_size=30))
@example("aab", ["aabb", "ab"], list(range(10)))
@example("aabb", ["aabb", "ab"], list(range(10)))
def test_any_chunking_gives_the_text_before_the_first_stop_string(
    text: str, stop: list[str], points: list[int]
) -> None:
    pieces, stream = collect(cut(text.encode(), points), stop)
    assert "".join(pieces) == reference(text, stop)
    assert stream.stopped == (reference(text, stop) != text)


@given(st.binary(max_size=40), STOPS, st.lists(st.integers(0, 200), max_size=30))
def test_invalid_bytes_become_replacement_characters_however_they_arrive(
    data: bytes, stop: list[str], points: list[int]
) -> None:
    pieces, _ = collect(cut(data, points), stop)
    assert "".join(pieces) == reference(data.decode("utf-8", "replace"), stop)


@given(st.text(LETTERS, max_size=40), STOPS)
def test_output_never_contains_a_stop_string(text: str, stop: list[str]) -> None:
    pieces, _ = collect([bytes([b]) for b in text.encode()], stop)
    assert not any(s in "".join(pieces) for s in stop)


def test_text_is_released_as_soon_as_it_cannot_belong_to_a_stop_string() -> None:
    stream = TextStream(["</end>"])
    assert stream.push(b"hello </e") == "hello "
    assert stream.push(b"x") == "</ex"
    assert stream.push(b"bye</end> more") == "bye"
    assert stream.stopped
    assert stream.push(b"ignored") == stream.finish() == ""


def test_a_character_waits_for_its_last_byte_and_a_truncated_one_is_replaced_at_the_end() -> None:
    stream = TextStream()
    fox = "🦊".encode()
    assert [stream.push(bytes([b])) for b in fox] == ["", "", "", "🦊"]
    assert stream.push(fox[:2]) == ""
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize("stop", [[""], ["a", ""], "abc"])
def test_an_empty_or_bare_stop_string_is_refused(stop: list[str]) -> None:
    with pytest.raises(BadRequestError):
        TextStream(stop)
