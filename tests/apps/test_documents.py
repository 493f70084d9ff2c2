"""Claims about the readers: what a person sees in a document is in its text, and what is not is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hybrid.apps.summarize.document import Document, read_document
from hybrid.errors import BadFileError, BadRequestError, UnsupportedError
from tests.apps.files import epub, pdf, zipped

SRT = "1\n00:00:01,000 --> 00:00:02,500\n<i>Hello</i> there.\n\n2\n00:00:03,000 --> 00:00:04,000\n42\nis the answer.\n"
VTT = (
    "WEBVTT - title\n\nNOTE a comment\nof two lines\n\nSTYLE\n::cue { color: red }\n\nintro\n"
    "00:01.000 --> 00:02.000 align:left\n"
    "<v Ada>We begin &amp; end.\n\n00:02.000 --> 00:03.000\nWe end.\n"
)


def read(folder: Path, name: str, data: bytes) -> Document:
    path = folder / name
    path.write_bytes(data)
    return read_document(path)


def test_html_keeps_what_a_reader_sees_and_its_structure(tmp_path: Path) -> None:
    page = (
        "<!DOCTYPE html><head><title>T</title><style>p {}</style><script>var x = '<p>no</p>'</script></head>"
        "<h2>Head</h2><p>One\n  two&nbsp;&amp; three<br>four<ul><li>item</ul>"
        "<table><tr><td>a<td>b</table><pre>x\n  y</pre>"
    )
    document = read(tmp_path, "page.html", page.encode())
    assert document.format == "html"
    for part in ("## Head\n\nOne two & three\nfour", "- item", "a\tb", "x\n  y"):
        assert part in document.text
    assert "var x" not in document.text
    assert read(tmp_path, "without-suffix", page.encode()).text == document.text


def test_a_page_is_read_in_the_encoding_it_names(tmp_path: Path) -> None:
    page = '<html><meta charset="koi8-r"><p>Привет, мир</p></html>'
    assert "Привет, мир" in read(tmp_path, "page.html", page.encode("koi8-r")).text


def test_subtitles_are_what_was_said(tmp_path: Path) -> None:
    assert read(tmp_path, "a.srt", SRT.encode()).text == "Hello there.\n42\nis the answer."
    document = read(tmp_path, "b.vtt", VTT.replace("\n", "\r\n").encode())
    assert document.text == "Ada: We begin & end.\nWe end."
    assert document.notes == ("The times of 2 cues were left out.",)


def test_an_epub_is_read_in_the_order_of_its_spine(tmp_path: Path) -> None:
    chapters = [f"<html><head/><body><h1>C{i}</h1><script/><p>Text {i}.</p></body></html>" for i in range(3)]
    document = read(tmp_path, "book.epub", epub(chapters, order=[2, 0, 1]))
    assert document.text == "# C2\n\nText 2.\n\n# C0\n\nText 0.\n\n# C1\n\nText 1."


def test_a_docx_gives_headings_tables_footnotes_and_insertions(tmp_path: Path) -> None:
    docx = pytest.importorskip("docx")
    from docx.oxml import parse_xml

    w = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
    document = docx.Document()
    document.add_heading("Report", 1)
    document.add_paragraph("A first paragraph.")
    table = document.add_table(1, 2)
    table.cell(0, 0).text, table.cell(0, 1).text = "left", "right"
    body = document.element.body
    body.insert(2, parse_xml(f"<w:p {w}><w:ins><w:r><w:t>inserted</w:t></w:r></w:ins></w:p>"))
    body.insert(
        3, parse_xml(f"<w:sdt {w}><w:sdtContent><w:p><w:r><w:t>controlled</w:t></w:r></w:p></w:sdtContent></w:sdt>")
    )
    document.save(tmp_path / "a.docx")
    text = read_document(tmp_path / "a.docx").text
    assert "# Report\n\nA first paragraph." in text
    assert "inserted" in text
    assert "controlled" in text
    assert "left \tright" in text


def test_a_pdf_gives_its_text_and_says_which_pages_have_none(tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    document = read(tmp_path, "a.pdf", pdf(["First page.", "", "", "Fourth page."]))
    assert "First page." in document.text
    assert "Fourth page." in document.text
    assert document.notes == ("No text on page 2-3 (pictures?).",)


def test_a_scanned_pdf_is_an_error_that_says_so(tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    with pytest.raises(BadFileError, match="scan"):
        read(tmp_path, "scan.pdf", pdf(["", ""]))


@pytest.mark.parametrize(("name", "module"), [("a.pdf", "pypdf"), ("a.docx", "docx")])
def test_a_missing_reader_is_one_sentence_with_the_command(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    data = pdf(["x"]) if module == "pypdf" else zipped({"word/document.xml": "<x/>"})
    with pytest.raises(UnsupportedError, match="pip install"):
        read(tmp_path, name, data)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("empty.txt", b"", "is empty"),
        ("blank.txt", b" \n\t\r\n \xef\xbb\xbf\n", "no text"),
        ("bom.txt", b"\xef\xbb\xbf", "no text"),
        ("prog", b"\x7fELF\x02\x01" + bytes(99), "program"),
        ("noise.txt", bytes(range(256)) * 20, "binary"),
        ("model.txt", b"GGUF\x03\0\0\0", "GGUF"),
        ("other.zip", zipped({"a.txt": "x"}), "neither"),
        ("broken.docx", b"PK\x03\x04 and then nothing", "damaged"),
        ("broken.epub", zipped({"META-INF/container.xml": "<container/>"}), "damaged"),
        ("broken.docx", zipped({"word/document.xml": "<x/>"}), "damaged"),
        ("broken.pdf", b"%PDF-1.7 and then nothing", "damaged"),
        ("fake.pdf", b"plain words", "not a PDF"),
        ("page.html", b"<html><script>x</script></html>", "no text"),
    ],
)
def test_what_is_no_document_is_one_sentence_that_names_the_file(
    name: str, data: bytes, words: str, tmp_path: Path
) -> None:
    with pytest.raises((BadFileError, BadRequestError), match=words) as caught:
        read(tmp_path, name, data)
    assert name in str(caught.value)
    assert str(caught.value).count("\n") == 0


def test_folders_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="folder"):
        read_document(tmp_path)
    with pytest.raises(BadRequestError, match="No such file"):
        read_document(tmp_path / "none.txt")


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.txt"
    path.write_text("first line\n")
    true_fstat = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        found = true_fstat(descriptor)
        with open(path, "a") as f:
            f.write("another line\n")
        return found

    monkeypatch.setattr("hybrid.apps.summarize.document.os.fstat", fstat)
    with pytest.raises(BadFileError, match="changed while"):
        read_document(path)


def test_piles_of_blank_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    document = read(tmp_path, "a.txt", b"a" + b"\r\n" * 50_000 + b"  b")
    assert document.text == "a\n\n  b"
    assert document.notes == ("49998 blank lines in a row were left out.",)
