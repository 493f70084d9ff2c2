"""Long pastes: on the line they are a few words that stand for them, in the message all of what they are."""

from __future__ import annotations

from hybrid.prefix import common_prefix

MOST_CHARACTERS, MOST_LINES = 2000, 15
"""What an editor of lines shows with ease; more would fill the screen, and a megabyte would take it seconds to draw."""


class Pastes:
    """The pastes of a session."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def shorten(self, data: str) -> str:
        """What to show of a paste: itself, with line ends made alike, or words that stand for it."""
        text = data.replace("\r\n", "\n").replace("\r", "\n")
        n_lines = text.count("\n") + 1
        if len(text) <= MOST_CHARACTERS and n_lines <= MOST_LINES:
            return text
        lines = f"{n_lines:,} lines, " if n_lines > 1 else ""
        words = f"[paste {len(self._texts) + 1}: {lines}{len(text):,} characters]"
        self._texts[words] = text
        return words

    def expand(self, line: str) -> str:
        """The line with every paste in the place of its words, or of what an edit left of their beginning."""
        for words, text in self._texts.items():
            line = line.replace(words, text)
            sign = words[: words.index(":") + 1]
            while (at := line.find(sign)) >= 0 and sign not in text:
                line = line[:at] + text + line[at + common_prefix(line[at:], words) :]
        return line

    def ending(self, line: str) -> int:
        """How many characters at the end of `line` stand for a paste."""
        return next((len(words) for words in self._texts if line.endswith(words)), 0)
