"""Whatever a file holds, opening it ends quickly in success or in one clear sentence."""

from __future__ import annotations

import contextlib
import os
import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid import Hybrid
from hybrid.errors import BadFileError
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from tests.model.raw import ARCHITECTURE, ARRAY, FLOAT32, STRING, UINT32, Row, gguf_bytes, record, text
from tests.tiny import write_tiny

HUGE = 2**62


def strings(*values: str) -> bytes:
    return struct.pack("<IQ", STRING, len(values)) + b"".join(map(text, values))


BAD = {
    "an empty file": (b"", "it is empty"),
    "three bytes": (b"GGU", "not a GGUF"),
    "only the magic": (b"GGUF", "truncated"),
    "a web page": (b"\n<!DOCTYPE html><html><body>Not found</body></html>", "web page"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
    "an error message in JSON": (b'{"error":"Repository not found"}', "it is JSON"),
    "an old ggml file": (b"tjgg" + b"\0" * 100, "old GGML"),
    "a zip": (b"PK\3\4" + b"\0" * 100, "zip"),
    "safetensors": (struct.pack("<Q", 40) + b'{"__metadata__":{}}' + b" " * 100, "safetensors"),
    "zeros": (b"\0" * 4096, "unfinished download"),
    "other bytes": (b"hello world, how are you", "other bytes"),
    "a big-endian file": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version 1": (gguf_bytes(version=1), "version 1"),
    "version 4": (gguf_bytes(version=4), "version 4"),
    "too many tensors": (gguf_bytes(n_tensors=HUGE), "more than its"),
    "too many records": (gguf_bytes(n_records=HUGE), "more than its"),
    "one record more than there is": (gguf_bytes(n_records=2), "tensor 0 is empty"),
    "a negative count": (gguf_bytes(n_tensors=2**64 - 1), "more than its"),
    "an endless key": (gguf_bytes([struct.pack("<Q", HUGE)]), "truncated or damaged"),
    "an empty key": (gguf_bytes([record("", UINT32, b"\0" * 4)]), "is empty"),
    "a key that is not UTF-8": (gguf_bytes([record(b"\xff\xfe", UINT32, b"\0" * 4)]), "not UTF-8"),
    "a key twice": (gguf_bytes([ARCHITECTURE, ARCHITECTURE]), "'general.architecture' appears twice"),
    "an unknown value type": (gguf_bytes([record("k", 13, b"\0" * 8)]), "unknown type 13"),
    "an endless string": (gguf_bytes([record("k", STRING, struct.pack("<Q", HUGE))]), "truncated or damaged"),
    "an endless array": (gguf_bytes([record("k", ARRAY, struct.pack("<IQ", FLOAT32, HUGE))]), "truncated or damaged"),
    "an endless array of strings": (gguf_bytes([record("k", ARRAY, struct.pack("<IQ", STRING, HUGE))]), "truncated"),
    "an array with an endless string": (
        gguf_bytes([record("k", ARRAY, struct.pack("<IQQ", STRING, 3, 2**64 - 1))]),
        "truncated or damaged",
    ),
    "a string that ends outside": (
        gguf_bytes([record("k", ARRAY, struct.pack("<IQQ", STRING, 1, 10**6))]),
        "truncated",
    ),
    "an array of arrays": (gguf_bytes([record("k", ARRAY, struct.pack("<IQ", ARRAY, 0))]), "array of items of type 9"),
    "an alignment of zero": (gguf_bytes([record("general.alignment", UINT32, struct.pack("<I", 0))]), "power of two"),
    "an alignment of 48": (gguf_bytes([record("general.alignment", UINT32, struct.pack("<I", 48))]), "power of two"),
    "an alignment in words": (gguf_bytes([record("general.alignment", STRING, text("32"))]), "not a uint32"),
    "a tensor name that is not UTF-8": (gguf_bytes(rows=[Row(name=b"\xff")]), "not UTF-8"),
    "a tensor without a name": (gguf_bytes(rows=[Row(name="")]), "is empty"),
    "a tensor name of 64 bytes": (gguf_bytes(rows=[Row(name="x" * 64)]), "longer than 63"),
    "a tensor twice": (gguf_bytes(rows=[Row(), Row(offset=128)], data=256), "'t' appears twice"),
    "five dimensions": (gguf_bytes(rows=[Row(ne=(1, 1, 1, 1, 1))]), "has 5 dimensions"),
    "no dimensions": (gguf_bytes(rows=[Row(ne=())]), "has 0 dimensions"),
    "four billion dimensions": (gguf_bytes(rows=[Row(n_dims=2**32 - 1)]), "dimensions"),
    "a dimension of zero": (gguf_bytes(rows=[Row(ne=(32, 0))]), "dimension of zero"),
    "dimensions that overflow": (gguf_bytes(rows=[Row(ne=(2**32, 2**32))]), "weights"),
    "an unknown tensor type": (gguf_bytes(rows=[Row(kind=4)]), "unknown type 4"),
    "half a block a row": (gguf_bytes(rows=[Row(ne=(48,), kind=2)]), "not a multiple of its type's block of 32"),
    "an unaligned tensor": (gguf_bytes(rows=[Row(offset=7)]), "not aligned"),
    "overlapping tensors": (gguf_bytes(rows=[Row(), Row("u", offset=32)], data=256), "'u' overlaps"),
    "a gap between tensors": (gguf_bytes(rows=[Row(), Row("u", offset=256)], data=512), "'u' leaves a gap"),
    "data that ends too early": (gguf_bytes(data=127), "'t' and what follows need a file of 256 bytes, but it has 255"),
    "two shards joined with cat": (gguf_bytes() * 2, "another GGUF follows"),
    "a tensor beyond the file": (gguf_bytes(rows=[Row(), Row("u", offset=128)]), "'u' and what follows"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_gets_one_clear_sentence(tmp_path: Path, case: str) -> None:
    content, message = BAD[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(BadFileError, match=message) as caught:
        ModelFile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["m.gguf.part1of2", "m.gguf-split-a", "m.gguf.001", "m.Q8_0.gguf.partaa", "m.gguf.b"])
def test_a_piece_of_a_file_is_called_one(tmp_path: Path, name: str) -> None:
    for content, what in ((gguf_bytes()[:-1], "truncated"), (b"weights" * 99, "other bytes")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadFileError, match=f"{what}.*several pieces, which `cat` joins"):
            ModelFile(tmp_path / name)
    (tmp_path / name).write_bytes(gguf_bytes())
    ModelFile(tmp_path / name).close()


def test_a_name_that_is_not_utf8_is_a_name(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xff\xe9.gguf"))
    write_tiny(path, n_layers=2, n_embd=64, n_heads=2, n_kv_heads=1, head_dim=32, n_ff=64)
    with Hybrid(path, n_gpu_layers=0, n_ctx=32) as model:
        assert len(model.generate("a", max_tokens=1, ignore_eos=True).tokens) == 1
    path.write_bytes(b"GGUF")
    run = subprocess.run([sys.executable, "-m", "hybrid.cli", "inspect", path], capture_output=True, check=False)
    assert run.returncode == 2
    assert b"truncated" in run.stderr


def test_the_sound_file_of_these_tests_opens(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf_bytes([ARCHITECTURE, record("k", ARRAY, strings("", "a", "é" * 300))]))
    with ModelFile(tmp_path / "m.gguf") as file:
        assert file.metadata["k"] == ["", "a", "é" * 300]


def test_a_file_without_an_architecture_says_so(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf_bytes([]))
    with ModelFile(tmp_path / "m.gguf") as file, pytest.raises(BadFileError, match=r"general\.architecture"):
        read_spec(file)


def make_directory(path: Path) -> None:
    path.mkdir()


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_directory, "is a directory"),
        (make_fifo, "not a regular file"),
        (make_loop, "cannot be opened"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (lambda path: None, "does not exist"),
    ],
    ids=["directory", "fifo", "symlink loop", "device", "nothing"],
)
def test_what_is_no_file_is_refused_without_blocking(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / "m.gguf"
    make(path)
    with pytest.raises(BadFileError, match=message):
        ModelFile(path)


def test_a_path_that_no_system_takes_is_refused() -> None:
    for path in ("a\0b.gguf", "x" * 5000 + ".gguf"):
        with pytest.raises(BadFileError, match="cannot be opened"):
            ModelFile(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_one_may_not_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes())
    path.chmod(0)
    with pytest.raises(BadFileError, match="permission"):
        ModelFile(path)


def test_a_denied_open_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes())

    def denied(*args: object, **kwargs: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(BadFileError, match="permission"):
        ModelFile(path)


def test_a_sparse_terabyte_of_empty_strings_costs_neither_time_nor_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes([record("k", ARRAY, struct.pack("<IQ", STRING, 2**35))]))
    with path.open("r+b") as file:
        file.truncate(2**40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadFileError, match="strings"):
        ModelFile(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


@pytest.fixture(scope="module")
def sound_files(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Small whole models, so that a mutation may hit anything."""
    folder = tmp_path_factory.mktemp("sound")
    small = {"n_layers": 2, "n_embd": 32, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "n_ff": 32}
    paths = [
        write_tiny(folder / "llama.gguf", "llama", rope_freqs=True, **small),
        write_tiny(folder / "gemma3.gguf", "gemma3", metadata={"gemma3.attention.head_count": [2, 2]}, **small),
    ]
    return [path.read_bytes() for path in paths]


def data_start(content: bytes) -> int:
    """Where the tensor data begins: what lies before is worth mutating."""
    return content.index(b"blk.1.ffn_down.weight") + 64


@settings(max_examples=1000, deadline=None)
@given(data=st.data())
def test_random_damage_ends_in_success_or_bad_file_error(
    tmp_path_factory: pytest.TempPathFactory, sound_files: list[bytes], data: st.DataObject
) -> None:
    content = bytearray(data.draw(st.sampled_from(sound_files)))
    end = data_start(content)
    # The vocabulary is most of the header; damage aims at the rest of it twice as often.
    interesting = st.one_of(st.integers(0, 900), st.integers(end - 2500, end), st.integers(0, end))
    for at in data.draw(st.lists(interesting, max_size=4)):
        damage = data.draw(st.one_of(st.binary(min_size=1, max_size=1), st.binary(min_size=8, max_size=8)))
        content[at : at + len(damage)] = damage
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    path = tmp_path_factory.mktemp("damaged") / "m.gguf"
    path.write_bytes(content)
    with contextlib.suppress(BadFileError), ModelFile(path) as file:
        for key in file.metadata:
            assert file.metadata[key] is not None
        for name in file.tensors:
            assert file.data(name).nbytes == file.tensors[name].n_bytes
        spec = read_spec(file)
        assert len(spec.layers) == spec.n_layers
    path.unlink()
