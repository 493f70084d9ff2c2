"""EPUB to text: the chapters in reading order."""

from __future__ import annotations

import posixpath
from urllib.parse import unquote
from xml.etree import ElementTree

from hybrid.apps.summarize.archive import member, open_zip
from hybrid.apps.summarize.encoding import decode
from hybrid.apps.summarize.html import html_to_text
from hybrid.errors import BadFileError

CONTAINER = "META-INF/container.xml"
ENCRYPTION = "META-INF/encryption.xml"
PAGES = ("application/xhtml+xml", "text/html", "application/x-dtbook+xml")


def read(data: bytes, name: str) -> tuple[str, tuple[str, ...]]:
    """(text, notes): what the spine lists, in its order. Raises BadFileError for a damaged or locked book."""
    chapters: list[str] = []
    missing: list[str] = []
    with open_zip(data, name) as archive:
        names = set(archive.namelist())
        for path in _spine(data, name):
            if path not in names:
                missing.append(path)
                continue
            try:
                text = html_to_text(decode(member(archive, path, name), path).text)
            except BadFileError as e:
                if ENCRYPTION in names:
                    raise BadFileError(f"{name} is locked (DRM): its chapters are encrypted.") from e
                raise
            if text:
                chapters.append(text)
    notes = (f"The book names parts that it does not have: {', '.join(missing)}.",) if missing else ()
    return "\n\n".join(chapters), notes


def _spine(data: bytes, name: str) -> list[str]:
    """Paths of the chapters in reading order."""
    with open_zip(data, name) as archive:
        try:
            container = ElementTree.fromstring(member(archive, CONTAINER, name))
            package = next(e.attrib["full-path"] for e in container.iter() if e.tag.endswith("}rootfile"))
            root = ElementTree.fromstring(member(archive, package, name))
            items = {e.attrib["id"]: e.attrib for e in root.iter() if e.tag.endswith("}item")}
            spine = [items[e.attrib["idref"]] for e in root.iter() if e.tag.endswith("}itemref")]
        except (ElementTree.ParseError, KeyError, StopIteration) as e:
            raise BadFileError(f"{name} is a damaged EPUB: its list of chapters cannot be read.") from e
    folder = posixpath.dirname(package)
    pages = [item for item in spine if item.get("media-type", PAGES[0]) in PAGES]
    return [posixpath.normpath(posixpath.join(folder, unquote(item["href"]))) for item in pages]
