"""Zip files that are documents: which kind, and their members, with a limit on what they may grow to."""

from __future__ import annotations

import io
import zipfile
import zlib

from hybrid.errors import BadFileError

MAX_MEMBER_BYTES = 256 << 20
"""A document's text is never larger; a zip bomb is."""


def open_zip(data: bytes, name: str) -> zipfile.ZipFile:
    """The archive. Raises BadFileError for a damaged one."""
    try:
        return zipfile.ZipFile(io.BytesIO(data))
    except (zipfile.BadZipFile, ValueError) as e:
        raise BadFileError(f"{name} is damaged: its zip directory cannot be read.") from e


def member(archive: zipfile.ZipFile, path: str, name: str) -> bytes:
    """One member's bytes. Raises BadFileError where it is missing, damaged, encrypted or absurdly large."""
    try:
        info = archive.getinfo(path)
        if info.file_size > MAX_MEMBER_BYTES:
            raise BadFileError(f"{name} holds a part of {info.file_size >> 20} MiB ({path}), too large for a document.")
        return archive.read(info)
    except KeyError as e:
        raise BadFileError(f"{name} is damaged: it lacks {path}.") from e
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as e:
        raise BadFileError(f"{name} is damaged or encrypted: {path} cannot be read.") from e


def kind_of_zip(data: bytes, name: str) -> str:
    """ "docx" or "epub". Raises BadFileError for any other archive."""
    with open_zip(data, name) as archive:
        names = set(archive.namelist())
        if "word/document.xml" in names:
            return "docx"
        if "META-INF/container.xml" in names:
            return "epub"
    raise BadFileError(f"{name} is a zip archive, but neither a DOCX nor an EPUB document.")
