"""Bytes to text: which encoding a file is in, and what could not be read as that."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass

from hybrid.errors import BadFileError, BadRequestError

BOMS = (  # the longer first: UTF-32-LE begins like UTF-16-LE
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
SAMPLE = 1 << 20
"""Bytes that are looked at to guess an encoding."""
MOSTLY = 0.9
"""The share of a guess's evidence that decides."""
CONTROLS = bytes(set(range(32)) - {8, 9, 10, 11, 12, 13, 26, 27})
"""What no text has: controls other than white space, backspace, end-of-file and escape."""
MAX_CONTROLS = 0.01


@dataclass(frozen=True)
class Decoded:
    """Text, the name of its encoding, and one line for each thing a reader should know."""

    text: str
    encoding: str
    notes: tuple[str, ...] = ()


def decode(data: bytes, name: str, encoding: str | None = None) -> Decoded:
    """The text in `data`, in `encoding` or in what it looks like.

    Bytes that cannot be read become U+FFFD, and a note counts them. Raises BadFileError for what is not text,
    BadRequestError for an encoding Python does not know.
    """
    if encoding is not None:
        try:
            codec = codecs.lookup(encoding)
            data[:0].decode(encoding)
        except (LookupError, ValueError) as e:
            raise BadRequestError(f"There is no encoding called {encoding!r}.") from e
        bom = next((b for b, e in BOMS if data.startswith(b) and codec.name.startswith(e[:6])), b"")
        return _decoded(data if codec.name in ("utf-16", "utf-32") else data[len(bom) :], codec.name, ())
    for bom, found in BOMS:
        if data.startswith(bom):
            return _decoded(data[len(bom) :], found, ())
    wide = _wide(data)
    if wide:
        return _decoded(data, wide, (f"Read as {wide.upper()}, which it looks like.",))
    if b"\0" in data or _binary(data):
        raise BadFileError(f"{name} is not text: it looks like a binary file.")
    try:
        return Decoded(data.decode("utf-8"), "utf-8")
    except UnicodeDecodeError:
        found = _guess(data)
    note = () if found == "utf-8" else (f"Read as {found.upper()}, which it looks like (--encoding sets another).",)
    return _decoded(data, found, note)


def _decoded(data: bytes, encoding: str, notes: tuple[str, ...]) -> Decoded:
    try:
        return Decoded(data.decode(encoding), encoding, notes)
    except UnicodeDecodeError:
        text = data.decode(encoding, "replace")
    bad = text.count("\ufffd")
    many = "1 place that is" if bad == 1 else f"{bad} places that are"
    return Decoded(text, encoding, (*notes, f"{many} not valid {encoding.upper()} became U+FFFD."))


def _wide(data: bytes) -> str | None:
    """UTF-16 or UTF-32 without a byte order mark: most characters have zero bytes in the same places."""
    sample = data[:SAMPLE]
    for width in (4, 2):
        if len(sample) < 2 * width or len(data) % width:
            continue
        zeros = [sample[i::width].count(0) / len(sample[i::width]) for i in range(width)]
        low = [zeros[0] < 0.1, *(z > 0.5 for z in zeros[1:])]
        if all(low) and (width == 2 or zeros[3] == 1):
            return f"utf-{8 * width}-le"
        if zeros[-1] < 0.1 and all(z > 0.5 for z in zeros[:-1]) and (width == 2 or zeros[0] == 1):
            return f"utf-{8 * width}-be"
    return None


def _binary(data: bytes) -> bool:
    sample = data[:SAMPLE]
    return len(sample) - len(sample.translate(None, CONTROLS)) > MAX_CONTROLS * len(sample)


def _guess(data: bytes) -> str:
    """An 8-bit or multi-byte encoding for data that is not valid UTF-8."""
    sample = data[:SAMPLE]
    high = len(re.findall(rb"[\x80-\xff]", sample))
    utf8 = len(
        b"".join(re.findall(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}", sample))
    )
    if utf8 >= MOSTLY * high:
        return "utf-8"  # damaged here and there
    if _looks_gb(sample, high):
        return "gb18030"
    guess = _charset_normalizer(sample)
    if guess:
        return guess
    return "cp1252" if not re.search(rb"[\x81\x8d\x8f\x90\x9d]", data) else "latin-1"


def _looks_gb(sample: bytes, high: int) -> bool:
    """Pairs of GB2312 bytes throughout, and mostly the 3755 common characters: Cyrillic in 8 bits makes rare ones."""
    pairs = re.findall(rb"[\xa1-\xf7][\xa1-\xfe]", sample)
    hanzi = [p for p in pairs if p[0] >= 0xB0]
    common = sum(p[0] <= 0xD7 for p in hanzi)
    return 2 * len(pairs) >= MOSTLY * high and bool(hanzi) and common >= 0.8 * len(hanzi)


def _charset_normalizer(sample: bytes) -> str | None:
    """What charset-normalizer thinks, where it is installed and sure; it also knows languages."""
    try:
        from charset_normalizer import from_bytes
    except ImportError:
        return None
    best = from_bytes(sample[: 1 << 16]).best()
    if best is None or best.encoding in ("ascii", "utf_8") or best.encoding.startswith("utf_"):
        return None
    name: str = codecs.lookup(best.encoding).name
    western = {"iso8859-1", "cp1250", "cp1252", "iso8859-15", "cp1254", "iso8859-2", "cp1257", "cp437", "cp850"}
    return None if name in western and not best.languages else name
