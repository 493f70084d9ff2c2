"""The virtual file equals the concatenation of its segments, however it is read."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid._native import VirtualFile

libc = ctypes.CDLL(None, use_errno=True)
libc.fread.restype = ctypes.c_size_t
libc.fread.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
libc.fseek.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_int]
libc.ftell.restype, libc.ftell.argtypes = ctypes.c_long, [ctypes.c_void_p]
libc.ferror.argtypes = [ctypes.c_void_p]

CONTENT = bytes(range(256)) * 1024  # larger than the stream's buffer

byte_segments = st.binary(max_size=300)
ranges = st.tuples(st.integers(0, len(CONTENT)), st.integers(0, len(CONTENT))).map(lambda p: (min(p), max(p) - min(p)))
segment_lists = st.lists(st.one_of(byte_segments, ranges, st.integers(0, 5000)), max_size=8)


def build(segments: list[bytes | tuple[int, int] | int]) -> tuple[VirtualFile, bytes]:
    """The virtual file, and the bytes it should hold. Its own descriptor is closed at once."""
    with tempfile.TemporaryFile() as file:
        file.write(CONTENT)
        file.flush()
        native = [(file.fileno(), *s) if isinstance(s, tuple) else s for s in segments]
        virtual = VirtualFile(native)
    parts = [
        CONTENT[s[0] : sum(s)] if isinstance(s, tuple) else s if isinstance(s, bytes) else bytes(s) for s in segments
    ]
    return virtual, b"".join(parts)


def fread(virtual: VirtualFile, n: int) -> bytes:
    buffer = ctypes.create_string_buffer(b"\xff" * n, n)  # zeros must be written over what was there
    got = libc.fread(buffer, 1, n, virtual.pointer)
    return buffer.raw[:got]


@given(segment_lists, st.integers(0, 2 * len(CONTENT)), st.integers(0, 2 * len(CONTENT)))
def test_reads_equal_the_concatenation(segments: list, offset: int, n: int) -> None:
    virtual, expected = build(segments)
    assert virtual.size == len(expected)
    assert virtual.read(0, virtual.size) == expected
    assert virtual.read(offset, n) == expected[offset : offset + n]


@given(
    segment_lists, st.lists(st.tuples(st.integers(0, 2), st.integers(-6000, 300000), st.integers(0, 9000)), max_size=6)
)
def test_the_stream_seeks_and_reads_like_a_file(segments: list, steps: list[tuple[int, int, int]]) -> None:
    virtual, expected = build(segments)
    position = 0
    for whence, offset, n in steps:
        target = offset + (0, position, len(expected))[whence]
        moved = libc.fseek(virtual.pointer, offset, whence) == 0
        assert moved == (0 <= target <= len(expected))
        if moved:
            position = target
        else:  # where a FILE* stands after a refused seek is the C library's own business
            assert libc.fseek(virtual.pointer, position, 0) == 0
        assert libc.ftell(virtual.pointer) == position
        piece = fread(virtual, n)
        assert piece == expected[position : position + n]
        position += len(piece)
    assert not virtual.error


@pytest.mark.parametrize("whence", [0, 1, 2])
@pytest.mark.parametrize("offset", [2**63 - 1, -(2**63), 2**62])
def test_absurd_seeks_are_refused(whence: int, offset: int) -> None:
    virtual, _ = build([b"abcdef"])
    fread(virtual, 3)
    assert libc.fseek(virtual.pointer, offset, whence) != 0
    assert fread(virtual, 3) == b"def"


def test_a_truncated_file_is_an_error_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(CONTENT)
    with path.open("rb+") as file:
        virtual = VirtualFile([b"head", (file.fileno(), 0, len(CONTENT))])
        file.truncate(100)
    assert len(fread(virtual, 200_000)) < 200_000
    assert libc.ferror(virtual.pointer)
    assert "ended early" in virtual.error
    with pytest.raises(RuntimeError, match="ended early"):
        virtual.read(0, 200)


@pytest.mark.parametrize(
    ("segments", "error"),
    [
        ([(0, 0)], TypeError),
        (["text"], TypeError),
        ([-1], ValueError),
        ([2**64], ValueError),
        ([2**63 - 1, 1], ValueError),
        ([(999_999, 0, 1)], OSError),
        ([(1 << 40, 0, 1)], ValueError),
        ([(0, -1, 1)], ValueError),
    ],
)
def test_bad_segments_are_refused(segments: list, error: type[Exception]) -> None:
    with pytest.raises(error):
        VirtualFile(segments)


def test_a_range_beyond_its_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    for offset, length in ((0, 4), (4, 0), (2**64 - 1, 2), (1, 2**64 - 1)):
        with pytest.raises(ValueError, match=r"outside its file|longer than a file"):
            VirtualFile([(fd, offset, length)])
    os.close(fd)


def test_closing_twice_is_harmless_and_leaves_no_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else None
    virtual, _ = build([(0, 10), b"x"])
    virtual.close()
    virtual.close()
    assert (virtual.pointer, virtual.size, virtual.read(0, 5)) == (0, 0, b"")
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_zeros_read_into_fresh_memory_take_no_ram() -> None:
    """What an unused token embedding costs: nothing, although it is as large as its tensor."""
    size = 256 << 20
    virtual = VirtualFile([b"header", size])
    libc.fseek(virtual.pointer, 6, 0)
    with mmap.mmap(-1, size) as fresh:
        pages = (ctypes.c_char * size).from_buffer(fresh)
        before = resident_bytes()
        assert libc.fread(pages, 1, size, virtual.pointer) == size
        grown = resident_bytes() - before
        assert not any(fresh[i] for i in range(0, size, 1 << 20))
        del pages
    assert grown < size // 16


def resident_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024
