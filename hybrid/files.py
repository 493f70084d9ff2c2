"""Files read to an end, and written whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

MOST_BYTES, CHUNK_BYTES = 512 << 20, 1 << 20
"""What a person may give to read at once: more is no text, but a device that never ends or a slip of the hand."""


def read_all(file: IO[bytes]) -> bytes:
    """What `file` holds. Raises OSError, for more than MOST_BYTES too: that would take all memory first."""
    chunks = []
    while chunk := file.read(CHUNK_BYTES):
        chunks.append(chunk)
        if len(chunks) * CHUNK_BYTES > MOST_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return b"".join(chunks)


@contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """A file, open for writing ("w", UTF-8, or "wb"), that takes the place of `path` when the block ends, and is gone
    if it fails. Only its owner may read it. Raises OSError."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that `path` holds all of it or what it held before, whatever happens; it is on the disk then, and
    whoever may read the folder's other files may read it."""
    if path.exists() and not path.is_file():  # /dev/stdout, a pipe: there is nothing to replace
        path.write_text(text, "utf-8")
        return
    path = path.resolve()  # a link stays one
    with replacing(path) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
        os.fchmod(file.fileno(), path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
