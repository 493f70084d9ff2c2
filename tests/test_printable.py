"""What is shown of words that a file brought along."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\nlines\r\n", "two lines  "),
        ("a\tb\u2028c", "a b c"),
        ("\x1b[2J\x9b0m\x07", "?[2J?0m?"),
        ("abc\u202edcba\u2066", "abc?dcba?"),
        ("a\u00a0b  c\u2009d\u3000e", "a\u00a0b  c\u2009d\u3000e"),
        ("می\u200cخواهم 👩\u200d🚀 soft\u00adhyphen", "می\u200cخواهم 👩\u200d🚀 soft\u00adhyphen"),
        ("\udc80", "?"),
    ],
)
def test_spaces_and_letters_stay_and_what_a_terminal_obeys_does_not(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text())
def test_what_is_shown_is_one_line_and_stays_as_it_is(text: str) -> None:
    shown = printable(text)
    assert len(shown.splitlines()) <= 1
    assert printable(shown) == shown
