"""What a model thinks is told from what it says, however its text is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.apps.chat.reasoning import Reasoning


def told(pieces: list[str], begun: bool = False) -> tuple[str, str]:
    """(thought, said)."""
    reasoning = Reasoning(begun)
    found = [piece for text in pieces for piece in reasoning.push(text)]
    found += reasoning.finish()
    assert all(piece.text for piece in found)
    return tuple("".join(p.text for p in found if p.kind == kind) for kind in ("think", "text"))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("text", "begun", "thought", "said"),
    [
        ("\n\nHello.", False, "", "Hello."),
        ("<think>\nwell\n\nyes\n</think>\n\nHello.", False, "well\n\nyes", "Hello."),
        ("well</think>Hello", True, "well", "Hello"),
        ("<think></think>\n\nHello", False, "", "Hello"),
        ("<think>never ending </thin", False, "never ending </thin", ""),
        ("<thin", False, "", "<thin"),
        ("I say <think>not</think>.", False, "", "I say <think>not</think>."),
        ("a < b </think>", False, "", "a < b </think>"),
        ("  \n", False, "", ""),
    ],
)
def test_thought_and_answer(text: str, begun: bool, thought: str, said: str) -> None:
    assert told([text], begun) == (thought, said)
    assert told(list(text), begun) == (thought, said)


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "think", ">", " ", "\n", "so", "</"]), max_size=12))
def test_how_text_is_cut_changes_nothing(parts: list[str]) -> None:
    whole = "".join(parts)
    thought, said = told([whole])
    assert told(parts) == told(list(whole)) == (thought, said)
    kept = whole.strip()
    if kept.startswith("<think>"):
        kept = kept.removeprefix("<think>").replace("</think>", "", 1)
    assert "".join((thought + said).split()) == "".join(kept.split())
