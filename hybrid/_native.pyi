"""Native parts of hybrid: the virtual file llama.cpp loads from, and the callbacks it may call."""

from collections.abc import Iterable
from typing import ClassVar

class VirtualFile:
    """A read-only `FILE*` over the concatenation of segments.

    A segment is `bytes`, a tuple `(fd, offset, length)` or an int: that many zeros. Descriptors are duplicated.
    Raises ValueError for a range outside its file, OSError from the system.
    """

    def __init__(self, segments: Iterable[bytes | int | tuple[int, int, int]]) -> None: ...
    @property
    def pointer(self) -> int:
        """The `FILE*`; 0 once closed. It belongs to this object."""

    @property
    def size(self) -> int:
        """Bytes in all."""

    @property
    def error(self) -> str:
        """Why the last read through the `FILE*` failed; empty if none did."""

    def read(self, offset: int, n: int) -> bytes:
        """Up to n bytes from offset on; fewer only at the end. RuntimeError if a file fails."""

    def close(self) -> None:
        """Close the stream and the descriptors. Harmless when repeated."""

class Interrupt:
    """A flag that stops a load or an evaluation from another thread, and how far a load has come (0 to 1)."""

    on_abort: ClassVar[int]
    """Address of a `ggml_abort_callback` whose user data is `pointer`."""
    on_progress: ClassVar[int]
    """Address of a `llama_progress_callback` whose user data is `pointer`."""

    def __init__(self) -> None: ...
    def set(self, stop: bool = True) -> None: ...
    @property
    def is_set(self) -> bool: ...
    @property
    def progress(self) -> float: ...
    @property
    def pointer(self) -> int: ...

def log_callback() -> int:
    """Address of a `ggml_log_callback` that keeps llama.cpp's latest lines."""

def log_count() -> int:
    """Lines logged so far: a mark for `log_since`."""

def log_since(mark: int) -> list[tuple[int, int, bytes]]:
    """(ggml_log_level, thread, line) of the lines logged since the mark, as far as they are still kept."""
