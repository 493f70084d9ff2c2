"""PDF to text, with pypdf."""

from __future__ import annotations

import io
import itertools
import logging
from collections.abc import Sequence

from hybrid.apps.summarize.extra import need
from hybrid.errors import BadFileError


def read(data: bytes, name: str) -> tuple[str, tuple[str, ...]]:
    """(text, notes). Raises BadFileError for a damaged, encrypted or scanned file."""
    pypdf = need("pypdf", "PDF")
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it warns about every oddity it copes with
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        locked = reader.is_encrypted and not reader.decrypt("")
        pages = [] if locked else [page.extract_text() for page in reader.pages]
    except Exception as e:  # a PDF is a program: its reader fails in every way there is
        raise BadFileError(f"{name} is a damaged PDF, or one pypdf cannot read ({type(e).__name__}).") from e
    if locked:
        raise BadFileError(f"{name} is encrypted; save it without a password first.")
    empty = [i for i, text in enumerate(pages, 1) if not text.strip()]
    if len(empty) == len(pages):
        raise BadFileError(
            f"{name} has no text on its {len(pages)} page{'s' * (len(pages) != 1)}: it is probably a scan; "
            "run it through OCR first (ocrmypdf, for example)."
        )
    notes = (f"No text on page {_ranges(empty)} (pictures?).",) if empty else ()
    return "\n\n".join(text for text in pages if text.strip()), notes


def _ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 as `1-3, 7`."""
    groups = [[n for _, n in group] for _, group in itertools.groupby(enumerate(numbers), lambda p: p[1] - p[0])]
    return ", ".join(f"{g[0]}-{g[-1]}" if len(g) > 1 else str(g[0]) for g in groups)
