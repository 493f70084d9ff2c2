"""Claims about reading bytes as text."""

from __future__ import annotations

import pytest

from hybrid.apps.summarize.encoding import decode
from hybrid.errors import BadFileError, BadRequestError

CHINESE = "深度学习是机器学习的一个分支，它试图使用包含复杂结构的多个处理层对数据进行高层抽象。" * 5
FRENCH = "Le café où l'élève a mangé est fermé. Ça coûte 3 £, très cher à Noël. " * 5


@pytest.mark.parametrize("text", ["plain words", CHINESE, FRENCH, "🙂 👩‍👩‍👧"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-16-le", "utf-32"])
def test_unicode_is_read_with_and_without_a_byte_order_mark(text: str, encoding: str) -> None:
    if encoding in ("utf-16-be", "utf-16-le") and not text.isascii():
        text += "and much more text in plain letters, as most files have. " * 20 * (1 + len(text) // 50)
    assert decode(text.encode(encoding), "f").text == text


@pytest.mark.parametrize(
    ("encoding", "text"),
    [("gb18030", CHINESE), ("latin-1", FRENCH), ("gb18030", "标题：第一章\n" + "The plain text. " * 20 + CHINESE)],
)
def test_old_encodings_are_recognised_and_named(encoding: str, text: str) -> None:
    found = decode(text.encode(encoding), "f")
    assert found.text == text
    assert any("which it looks like" in note for note in found.notes)


def test_an_encoding_that_is_named_is_obeyed() -> None:
    assert decode("Привет, мир".encode("koi8-r"), "f", "koi8-r").text == "Привет, мир"
    with pytest.raises(BadRequestError, match="no encoding called"):
        decode(b"x", "f", "klingon")


def test_damaged_bytes_are_replaced_counted_and_said() -> None:
    data = CHINESE.encode()
    found = decode(data[:30] + b"\xff" + data[30:] + b"\xfe", "f")
    assert found.encoding == "utf-8"
    assert found.text.count("\ufffd") == 2
    assert found.text.replace("\ufffd", "") == CHINESE
    assert any("2 places" in note for note in found.notes)


def test_a_byte_that_a_named_encoding_does_not_have_is_counted() -> None:
    found = decode(b"abc\x81def", "f", "cp1252")
    assert found.text == "abc\ufffddef"
    assert any("1 place" in note for note in found.notes)


@pytest.mark.parametrize("data", [b"\x00\x01\x02\x03" * 500, bytes(range(256)) * 8, b"text\0text" * 3])
def test_binary_data_is_no_text(data: bytes) -> None:
    with pytest.raises(BadFileError, match="binary"):
        decode(data, "f")
