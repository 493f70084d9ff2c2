"""Markdown on a terminal while it is being written."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Heading, Markdown
from rich.style import Style

from hybrid.cli.terminal.live import LiveLines, Pace

_PARSER = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table").disable("reference")
"""Text that looks like HTML (`List<String>`) stays text, and so does `[1]: https://…`, which would be left out."""


class MarkdownStream:
    """Draws Markdown as it comes. Of what has come, the last block (paragraph, list, table, code) may still change and
    is drawn anew; those before it stay as they are."""

    def __init__(self, live: LiveLines, width: Callable[[], int], color_system: str | None) -> None:
        self._live, self._width, self._colors = live, width, color_system
        self._source = ""
        self._begun = False
        self._pace = Pace()

    def push(self, text: str) -> None:
        """More of it."""
        self._source += text
        if self._pace.due():
            self._draw()

    def finish(self) -> None:
        """That was all."""
        self._draw()
        self._live.keep()
        self._source = ""

    def _draw(self) -> None:
        start = time.perf_counter()
        tokens = _PARSER.parse(self._source)
        begins = [token.map[0] for token in tokens if token.level == 0 and token.map and token.nesting >= 0]
        lines = self._source.split("\n")
        for begin, next_begin in pairwise(begins):
            self._show("\n".join(lines[begin:next_begin]))
            self._live.keep()
            self._begun = True
        self._source = "\n".join(lines[begins[-1] :]) if begins else self._source
        self._show(self._source)
        self._pace.drawn(start)

    def _show(self, source: str) -> None:
        lines = render(source, self._width(), self._colors)
        if lines:
            self._live.show([""] * self._begun + lines)


def render(source: str, width: int, color_system: str | None) -> list[str]:
    """Markdown as lines for a terminal, none of them `width` cells wide, so that none makes it wrap."""
    console = Console(
        file=io.StringIO(),
        force_terminal=True,
        width=max(2, width - 1),
        color_system=color_system,  # type: ignore[arg-type]
        legacy_windows=False,
        highlight=False,
    )
    with console.capture() as capture:
        console.print(_ChatMarkdown(source))
    lines = [line.rstrip() for line in capture.get().split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    while lines and not lines[0]:
        lines.pop(0)
    return lines


class _Heading(Heading):
    """On the left, in bold; rich centres headings and puts boxes around them."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        self.text.stylize(Style(bold=True, underline=self.tag == "h1"))
        yield self.text


class _ChatMarkdown(Markdown):
    """As people chat: line ends stay where they are, and an address is shown, not hidden behind a word."""

    elements: ClassVar = {**Markdown.elements, "heading_open": _Heading}

    def __init__(self, source: str) -> None:
        super().__init__("", code_theme="ansi_dark", hyperlinks=False)
        self.markup = source
        self.parsed = _PARSER.parse(source)
        _break_lines(self.parsed)


def _break_lines(tokens: Iterable[Token]) -> None:
    for token in tokens:
        if token.type == "softbreak":
            token.type = "hardbreak"
        _break_lines(token.children or ())
