"""Telling what a model thinks aloud (`<think>…</think>` before the answer) from what it says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Piece:
    """A piece of what comes while an answer is made: its text, the reasoning before it, or a word of the program's."""

    kind: Literal["text", "think", "note"]
    text: str


class Reasoning:
    """Cuts a stream of text into pieces. White space around the reasoning, and before the answer, is left out."""

    def __init__(self, begun: bool = False) -> None:
        """`begun`: the prompt itself ended with the opening tag, as some templates have it."""
        self._state: Literal["start", "think", "answer start", "answer"] = "think" if begun else "start"
        self._held = ""
        self._thought = False

    def push(self, text: str) -> Iterator[Piece]:
        """The pieces that are certain now."""
        self._held += text
        while self._held and (piece := self._next()) is not None:
            if piece.text:
                yield piece

    def finish(self) -> Iterator[Piece]:
        """No more will come: what was held back."""
        held, self._held = self._held, ""
        if self._state == "think":
            if held.rstrip():
                yield Piece("think", held.rstrip())
        elif held.strip():
            yield Piece("text", held if self._state == "answer" else held.lstrip())

    def _next(self) -> Piece | None:
        """A piece of what is held, perhaps without text; None where more must come first."""
        if self._state == "answer":
            return Piece("text", self._take(len(self._held)))
        if self._state == "think":
            return self._think()
        rest = self._held.lstrip()
        if self._state == "start" and OPEN.startswith(rest[: len(OPEN)]):
            if len(rest) < len(OPEN):
                return None
            self._state, self._held = "think", rest[len(OPEN) :]
            return Piece("think", "")
        if not rest:
            return None
        self._state, self._held = "answer", rest
        return Piece("text", "")

    def _think(self) -> Piece | None:
        if not self._thought:
            self._held = self._held.lstrip()
            self._thought = bool(self._held)
        end = self._held.find(CLOSE)
        if end >= 0:
            text = self._take(end).rstrip()
            self._state, self._held = "answer start", self._held[len(CLOSE) :]
            return Piece("think", text)
        # White space may turn out to be the last, and a beginning of the tag to be the tag.
        keep = next((n for n in range(len(CLOSE) - 1, 0, -1) if self._held.endswith(CLOSE[:n])), 0)
        certain = len(self._held[: len(self._held) - keep].rstrip())
        return Piece("think", self._take(certain)) if certain else None

    def _take(self, n: int) -> str:
        text, self._held = self._held[:n], self._held[n:]
        return text
