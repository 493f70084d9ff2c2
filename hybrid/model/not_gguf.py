"""What a file is that should be a GGUF and is none, or only a piece of one."""

from __future__ import annotations

import re

_PIECE_NAME = re.compile(r"\.gguf[.-]?(?:part|split)?[.-]?(?:\d+(?:of\d+)?|[a-z]{1,2})$", re.IGNORECASE)


def piece_hint(name: str) -> str:
    """What to do with one of the pieces that a large file was cut into (`model.gguf.part1of2`, `model.gguf-split-a`);
    empty for any other name."""
    if _PIECE_NAME.search(name) is None:
        return ""
    return "; by its name it is one of several pieces, which `cat` joins to a whole file"


def what_it_is(head: bytes) -> str | None:
    """What a file that begins with `head` is if it is not a GGUF; None for a GGUF."""
    if head[:4] == b"GGUF":
        return None
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    known = [
        (not head, "it is empty"),
        (
            head.startswith(b"version https://git-lfs"),
            "it is a Git LFS pointer, fetch the real file with `git lfs pull`",
        ),
        (text.startswith((b"<!doctype", b"<html", b"<?xml")), "it is a web page, the download link led to HTML"),
        (text.startswith(b'{"'), "it is JSON, the download link led to an error message perhaps"),
        (head[:4] in (b"lmgg", b"fmgg", b"tjgg", b"algg"), "it is a model in the old GGML format, convert it to GGUF"),
        (head[:2] == b"PK", "it is a zip archive or a PyTorch checkpoint"),
        (head[8:10] == b'{"', "it is a safetensors file, convert it to GGUF"),
        (not head.strip(b"\0"), "it begins with zeros, as an unfinished download does"),
    ]
    return next((what for found, what in known if found), "it begins with other bytes than GGUF")
