"""DOCX to text, with python-docx; walks the XML itself, because the library's paragraphs skip text in content controls,
text boxes and tracked insertions."""

from __future__ import annotations

import io
from typing import Any

from hybrid.apps.summarize.archive import member, open_zip
from hybrid.apps.summarize.extra import need
from hybrid.errors import BadFileError

W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
NOTES = {"word/footnotes.xml": "Footnotes", "word/endnotes.xml": "Endnotes"}
FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"


def read(data: bytes, name: str) -> tuple[str, tuple[str, ...]]:
    """(text, notes): body, tables row by row, then foot- and endnotes; headings as in Markdown."""
    docx = need("docx", "DOCX")
    with open_zip(data, name) as archive:
        names = set(archive.namelist())
        for path in names:  # limits on size before a parser sees them
            if path.startswith("word/") and path.endswith(".xml"):
                member(archive, path, name)
        try:
            document = docx.Document(io.BytesIO(data))
            levels = {style.style_id: _level(style.name) for style in document.styles}
            parts = [_text(document.element.body, levels)]
            for path, title in NOTES.items():
                if path in names:
                    text = _text(docx.oxml.parse_xml(member(archive, path, name)), levels)
                    parts += [f"# {title}\n\n{text}"] if text.strip() else []
        except Exception as e:  # lxml, KeyErrors of missing parts, …
            raise BadFileError(f"{name} is a damaged DOCX file ({type(e).__name__}).") from e
    return "\n\n".join(parts), ()


def _level(style: str | None) -> int:
    """1 to 6 for heading styles, 1 for a title, 0 for any other."""
    words = (style or "").lower().split()
    if words == ["title"]:
        return 1
    return min(6, int(words[1])) if len(words) == 2 and words[0] == "heading" and words[1].isdecimal() else 0


def _text(root: Any, levels: dict[str, int]) -> str:
    out: list[str] = []
    _walk(root, levels, out, in_table=False)
    return "".join(out).strip()


def _walk(element: Any, levels: dict[str, int], out: list[str], *, in_table: bool) -> None:
    for child in element:
        tag = child.tag
        if tag == W + "t":
            out.append(child.text or "")
        elif tag in (W + "tab", W + "ptab"):
            out.append("\t")
        elif tag in (W + "br", W + "cr"):
            out.append("\n")
        elif tag == W + "noBreakHyphen":
            out.append("-")
        elif tag == W + "p":
            style = child.find(f"{W}pPr/{W}pStyle")
            level = levels.get(style.get(W + "val"), 0) if style is not None else 0
            out.append("#" * level + " " * bool(level))
            _walk(child, levels, out, in_table=in_table)
            out.append(" " if in_table else "\n\n")
        elif tag == W + "tr":
            _walk(child, levels, out, in_table=True)
            out.append("\n")
        elif tag == W + "tc":
            _walk(child, levels, out, in_table=True)
            out.append("\t")
        elif tag == W + "tbl":
            _walk(child, levels, out, in_table=in_table)
            out.append("\n")
        elif tag not in (W + "pPr", W + "rPr", W + "del", FALLBACK):  # deleted text, and text boxes said twice
            _walk(child, levels, out, in_table=in_table)
