"""Small documents made by hand, for tests of the readers."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence


def pdf(pages: Sequence[str]) -> bytes:
    """A PDF with one line of Helvetica a page; an empty string is a page without text (a scan, say)."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", "", "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for text in pages:
        content = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET" if text else ""
        n = len(objects) + 1
        kids.append(f"{n} 0 R")
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {n + 1} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>"
        )
        objects.append(f"<< /Length {len(content)} >>\nstream\n{content}\nendstream")
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>"
    out, offsets = b"%PDF-1.4\n", []
    for i, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += f"{i} 0 obj\n{body}\nendobj\n".encode("latin-1")
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    n = len(objects) + 1
    end = (
        f"xref\n0 {n}\n0000000000 65535 f \n{table}trailer\n<< /Size {n} /Root 1 0 R >>\nstartxref\n{len(out)}\n%%EOF\n"
    )
    return out + end.encode()


def epub(chapters: Sequence[str], *, order: Sequence[int] | None = None) -> bytes:
    """An EPUB of XHTML chapters, read in `order`."""
    spine = order if order is not None else range(len(chapters))
    items = "".join(
        f'<item id="c{i}" href="text/c%20{i}.xhtml" media-type="application/xhtml+xml"/>' for i in range(len(chapters))
    )
    refs = "".join(f'<itemref idref="c{i}"/>' for i in spine)
    package = (
        f'<package xmlns="http://www.idpf.org/2007/opf"><manifest>{items}</manifest><spine>{refs}</spine></package>'
    )
    container = (
        '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
        '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
    )
    return zipped(
        {
            "mimetype": "application/epub+zip",
            "META-INF/container.xml": container,
            "OEBPS/book.opf": package,
            **{f"OEBPS/text/c {i}.xhtml": chapter for i, chapter in enumerate(chapters)},
        }
    )


def zipped(members: dict[str, str]) -> bytes:
    """A zip archive of text files."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return out.getvalue()
