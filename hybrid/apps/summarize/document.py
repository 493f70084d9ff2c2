"""Documents: a file (or stdin) as one text, with what was learnt on the way."""

from __future__ import annotations

import codecs
import hashlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hybrid.apps.summarize.encoding import Decoded, decode
from hybrid.errors import BadFileError, BadRequestError
from hybrid.files import read_all

STDIN = "-"
MARKUP = re.compile(r"\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*<(!doctype html|html|head|body)\b", re.I | re.S)
CUE_TIMES = re.compile(r"^\s*(\d+:)?\d+:\d+[.,]\d+\s+-->\s+(\d+:)?\d+:\d+[.,]\d+", re.M)
BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n){2,}")
DECLARED = re.compile(rb"""<(?:meta|\?xml)[^>]{0,200}?(?:charset|encoding)\s*=\s*["']?([\w-]+)""", re.I)
MAGIC = (
    (b"%PDF-", "pdf"),
    (b"\x7fELF", "a program"),
    (b"GGUF", "a GGUF model"),
    (b"\x89PNG", "a PNG picture"),
    (b"\xff\xd8\xff", "a JPEG picture"),
    (b"GIF8", "a GIF picture"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\xd0\xcf\x11\xe0", "an old Office file (save it as .docx or .pdf)"),
    (b"{\\rtf", "an RTF file (save it as .docx or .txt)"),
)


@dataclass(frozen=True)
class Document:
    """A text to summarise. `sha256` is of the file's bytes (of the text, where there is no file)."""

    name: str
    text: str
    sha256: str
    format: str = "text"
    encoding: str | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of_text(cls, text: str, name: str = "text") -> Document:
        """A document that is at hand as a string. Raises BadRequestError where it has nothing to read."""
        sha256 = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        return _document(name, text, sha256, "text", None, ())


def read_document(source: str | Path, *, encoding: str | None = None) -> Document:
    """Read a file, or stdin for "-": txt, md, html, pdf, docx, epub, srt, vtt, and whatever else is text.

    The whole file is read at once: what is summarised is one state of it. Raises BadFileError or BadRequestError with
    a sentence where there is no text to be had (empty, binary, scanned, encrypted, changing while it is read).
    """
    if str(source) == STDIN:
        name, data = "stdin", read_all(sys.stdin.buffer)
    else:
        name, data = str(source), _read(Path(source))
    if not data:
        raise BadFileError(f"{name} is empty.")
    kind = _kind(data, name)
    sha256 = hashlib.sha256(data).hexdigest()
    if kind in ("pdf", "docx", "epub"):
        if encoding is not None:
            raise BadRequestError(f"{name} is a {kind.upper()} file, which has no --encoding.")
        text, notes = _reader(kind)(data, name)
        return _document(name, text, sha256, kind, None, notes)
    found = decode(data, name, encoding or (_declared(data) if kind == "html" else None))
    kind, text, notes = _plain(found, kind)
    return _document(name, text, sha256, kind, found.encoding, (*found.notes, *notes))


def _reader(kind: str) -> Callable[[bytes, str], tuple[str, tuple[str, ...]]]:
    from hybrid.apps.summarize import docx, epub, pdf

    return {"pdf": pdf.read, "docx": docx.read, "epub": epub.read}[kind]


def _plain(found: Decoded, kind: str) -> tuple[str, str, tuple[str, ...]]:
    """(format, text, notes) of what is text already."""
    if kind == "html" or (kind == "text" and MARKUP.match(found.text)):
        from hybrid.apps.summarize.html import html_to_text

        return "html", html_to_text(found.text), ()
    if kind == "subtitles" or (kind == "text" and CUE_TIMES.search(found.text[:1000])):
        from hybrid.apps.summarize.subtitles import subtitles_to_text

        text, cues = subtitles_to_text(found.text)
        return "subtitles", text, (f"The times of {cues} cues were left out.",)
    return kind, found.text, ()


def _document(name: str, text: str, sha256: str, kind: str, encoding: str | None, notes: tuple[str, ...]) -> Document:
    """Line ends made alike, piles of blank lines made one, lone surrogates replaced; each but the first is noted."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if re.search("[\ud800-\udfff]", text):
        text, n = re.subn("[\ud800-\udfff]", "\ufffd", text)
        notes = (*notes, f"{n} characters that Unicode does not have became U+FFFD.")
    before = text.count("\n")
    text = BLANK_LINES.sub("\n\n", text)
    if left_out := before - text.count("\n"):
        notes = (*notes, f"{left_out} blank line{'s' * (left_out != 1)} in a row were left out.")
    if not text.strip("\ufeff \t\n\v\f\x00"):
        raise BadFileError(f"{name} has no text in it.")
    return Document(name, text, sha256, kind, encoding, notes)


def _read(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise BadRequestError(f"{path} is a folder; name the files in it ({path}/*).")
        with open(path, "rb") as f:
            before = os.fstat(f.fileno())
            data = read_all(f)
            after = os.fstat(f.fileno())
    except OSError as e:
        raise BadRequestError(f"{path} cannot be read: {e.strerror}.") from e
    changed = (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns)
    if path.is_file() and (changed or len(data) != after.st_size):
        raise BadFileError(f"{path} changed while it was read; try again when it is finished.")
    return data


def _declared(data: bytes) -> str | None:
    """The encoding an HTML page names, where it is one and the page is not UTF-8 after all."""
    match = DECLARED.search(data[:4096])
    if match is None:
        return None
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        pass
    else:
        return None
    try:
        return codecs.lookup(match[1].decode()).name
    except LookupError:
        return None


def _kind(data: bytes, name: str) -> str:
    """The format, by content first: names lie."""
    for magic, kind in MAGIC:
        if data.startswith(magic):
            if kind == "pdf":
                return kind
            raise BadFileError(f"{name} is {kind}, not a document that can be read.")
    if data.startswith(b"PK\x03\x04"):
        from hybrid.apps.summarize.archive import kind_of_zip

        return kind_of_zip(data, name)
    suffix = Path(name).suffix.lower()
    if suffix in (".pdf", ".docx", ".epub"):
        raise BadFileError(f"{name} is not a {suffix[1:].upper()} file, whatever its name says.")
    names = {".html": "html", ".htm": "html", ".xhtml": "html", ".srt": "subtitles", ".vtt": "subtitles"}
    return names.get(suffix, "markdown" if suffix in (".md", ".markdown") else "text")
