"""HTML to text: headings, paragraphs, lists and tables keep their lines; scripts and styles are no text."""

from __future__ import annotations

import re
from html.parser import HTMLParser

LINE_IN_PRE = "\x1e"
"""Stands for a line end whose following spaces count, until the others are tidied."""
SILENT = {"script", "style", "template", "svg", "noscript"}
PARAGRAPHS = frozenset(
    "p div section article header footer main aside nav ul ol dl table hr blockquote figure form".split()  # noqa: SIM905
)
LINES = frozenset(["br", "li", "tr", "dt", "dd", "figcaption", "option", "caption", "title", "address", "summary"])
HEADINGS = {f"h{i}": "#" * i + " " for i in range(1, 7)}


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._silent: list[str] = []
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in SILENT:
            self._silent.append(tag)
        elif tag in HEADINGS:
            self.parts.append("\n\n" + HEADINGS[tag])
        elif tag == "pre":
            self._pre += 1
            self.parts.append("\n\n")
        elif tag in PARAGRAPHS:
            self.parts.append("\n\n")
        elif tag in LINES:
            self.parts.append("\n- " if tag == "li" else "\n")
        elif tag in ("td", "th"):
            self.parts.append("\t")
        elif tag == "img" and (alt := dict(attrs).get("alt")):
            self.parts.append(f" {alt} ")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in SILENT:  # <script/> in XHTML has no end tag to wait for
            self.handle_starttag(tag, attrs)
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._silent:
            del self._silent[self._silent.index(tag) :]
        elif tag == "pre":
            self._pre = max(0, self._pre - 1)
            self.parts.append("\n\n")
        elif tag in PARAGRAPHS or tag in HEADINGS:
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.parts.append(data.replace("\n", LINE_IN_PRE) if self._pre else re.sub(r"\s+", " ", data))


def html_to_text(source: str) -> str:
    """The text of a page, headings written as in Markdown. Broken markup is read as browsers do: as far as it goes."""
    parser = _Text()
    parser.feed(source)
    parser.close()
    text = "".join(parser.parts).replace("\xa0", " ")
    text = re.sub(r"[ \t]*\n[ ]*", "\n", text)
    text = re.sub(r"\n(- )?\n*\t", r"\n\1", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip().replace(LINE_IN_PRE, "\n")
