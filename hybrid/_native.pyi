"""Native parts of hybrid: the virtual file llama.cpp loads from, the callbacks it may call, attention on the CPU."""

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

def decode(function: int, context: int, batch: int) -> int:
    """`llama_decode`, which is at the address `function`, of a context and of the `llama_batch` at an address.

    Raises MemoryError for a std::bad_alloc, RuntimeError for any other C++ exception: both would end the process if
    ctypes had made the call.
    """

def attend(
    q: int,
    out: int,
    lse: int,
    n: int,
    n_heads: int,
    n_kv_heads: int,
    dim_k: int,
    dim_v: int,
    runs: Iterable[tuple[int, ...]],
    scale: float,
    window: int,
    softcap: float,
    sinks: int,
    n_threads: int,
    instruction_set: str,
) -> None:
    """Attention over host memory; see `hybrid.head.kv.cpu_attention`, which checks the tensors behind the addresses.

    A run is (start, n, position, n_slots, first, end, then address, slot stride, head stride and type of K, then of V):
    strides in bytes, types 0 f32, 1 f16, 2 bf16, 3 q8_0. `sinks` may be 0, `instruction_set` empty for the best.
    Releases the interpreter lock. Raises ValueError for numbers that cannot be right.
    """

def instruction_sets() -> list[str]:
    """What `attend` can use here, best first: avx512, avx2, neon, portable."""

def read_bandwidth(n_bytes: int, n_threads: int, seconds: float) -> float:
    """Bytes a second from the quickest of the passes over n_bytes of fresh memory that fit into `seconds` (two at
    least). Releases the interpreter lock, and what a signal's handler raises ends it. Raises ValueError for numbers
    out of range, MemoryError without the memory.
    """
