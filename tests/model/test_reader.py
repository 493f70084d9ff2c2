"""ModelFile gives what gguf.GGUFReader gives, without decoding what nobody asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.model.file import ModelFile
from hybrid.model.ggml_types import GGML_TYPES
from tests.model import raw
from tests.tiny import write_tiny

KINDS = [T.F32, T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q8_0, T.Q4_K, T.Q6_K, T.IQ4_XS]


def assert_equals_gguf_reader(path: Path) -> None:
    reader = gguf.GGUFReader(path)
    with ModelFile(path) as file:
        theirs = {k: f for k, f in reader.fields.items() if not k.startswith("GGUF.")}
        assert list(file.fields) == list(theirs) == list(file.metadata)
        for key, field in theirs.items():
            # Of a long array the bytes (below) are compared whole and the values in samples: contents() is slow.
            step = 1 if len(field.data) < 10_000 else 997
            value = file.metadata[key]
            assert (value[::step] if isinstance(value, list) else value) == field.contents(slice(None, None, step)), key
            assert file.fields[key].type == field.types[0], key
            assert bytes(file.fields[key].raw) == b"".join(part.tobytes() for part in field.parts), key
        assert list(file.tensors) == [t.name for t in reader.tensors]
        for t in reader.tensors:
            info = file.tensors[t.name]
            assert info.shape == tuple(reversed(t.shape.tolist()))
            assert (info.type, info.n_bytes, info.offset) == (t.tensor_type, t.n_bytes, t.data_offset)
            assert info.n_values == t.n_elements
            assert np.array_equal(file.data(t.name), t.data.reshape(-1).view(np.uint8)), t.name


@pytest.mark.parametrize(
    "options",
    [
        {"architecture": "llama", "kind": KINDS},
        {"architecture": "gemma3", "tied": False},
        {"architecture": "llama", "biases": True, "rope_freqs": True, "n_layers": 2},
        {"architecture": "gemma3", "metadata": {"gemma3.attention.sliding_window_pattern": [True, False] * 3}},
    ],
    ids=["quantised", "gemma3 untied", "biases and factors", "boolean array"],
)
def test_fields_and_tensors_equal_gguf_reader(tmp_path: Path, options: dict[str, Any]) -> None:
    assert_equals_gguf_reader(write_tiny(tmp_path / "m.gguf", **options))


@pytest.mark.real
def test_fields_and_tensors_of_real_models_equal_gguf_reader(real_model: Path) -> None:
    assert_equals_gguf_reader(real_model)


def test_version_2_is_read_like_version_3(tmp_path: Path) -> None:
    for version in (2, 3):
        path = tmp_path / f"{version}.gguf"
        path.write_bytes(raw.gguf_bytes(version=version))
        with ModelFile(path) as file:
            assert file.version == version
            assert file.architecture == "llama"
            assert file.tensors["t"].shape == (32,)


def test_every_tensor_type_has_the_block_and_bytes_gguf_says() -> None:
    ours = {kind: (t.block, t.n_bytes) for kind, t in GGML_TYPES.items()}
    theirs = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    del theirs[int(T.Q8_1)]  # gguf says 40 bytes, ggml 36; no file stores it
    assert theirs.items() <= ours.items()
    for kind in theirs:
        assert GGML_TYPES[kind].name == T(kind).name


def test_every_tensor_type_has_the_block_and_bytes_ggml_says() -> None:
    """ggml knows types that the gguf package does not know yet."""
    import ctypes
    import importlib.util

    package = importlib.util.find_spec("llama_cpp")  # not imported: it would take llama.cpp's log from the tail
    assert package is not None
    assert package.origin is not None
    lib = ctypes.CDLL(str(next((Path(package.origin).parent / "lib").glob("libggml-base.*"))))
    lib.ggml_blck_size.restype = ctypes.c_int64
    lib.ggml_type_size.restype = ctypes.c_size_t
    for kind, t in GGML_TYPES.items():
        assert (lib.ggml_blck_size(kind), lib.ggml_type_size(kind)) == (t.block, t.n_bytes), t.name


def test_strings_of_arrays_are_decoded_only_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hybrid.model import gguf_values

    decoded: list[str] = []
    real = gguf_values.decode
    monkeypatch.setattr(gguf_values, "decode", lambda field: decoded.append(field.key) or real(field))
    with ModelFile(write_tiny(tmp_path / "m.gguf", n_layers=1)) as file:
        assert "tokenizer.ggml.tokens" not in decoded
        assert file.array_length("tokenizer.ggml.tokens") == len(file.metadata["tokenizer.ggml.tokens"])
        assert file.metadata["tokenizer.ggml.tokens"] is file.metadata["tokenizer.ggml.tokens"]
        assert decoded.count("tokenizer.ggml.tokens") == 1
        assert file.array_length("general.architecture") is None
        assert file.array_length("no such key") is None


def test_tensor_data_is_read_only_and_outlives_the_file(tmp_path: Path) -> None:
    file = ModelFile(write_tiny(tmp_path / "m.gguf", n_layers=1))
    data = file.data("output_norm.weight")
    before = data.copy()
    file.close()
    assert np.array_equal(data, before)
    assert not data.flags.writeable
    with pytest.raises(ValueError, match="closed"):
        file.data("output_norm.weight")
    file.close()


def test_closing_gives_every_descriptor_back(tmp_path: Path) -> None:
    import os

    path = write_tiny(tmp_path / "m.gguf", n_layers=1)
    fds = Path(f"/proc/{os.getpid()}/fd")
    if not fds.exists():
        pytest.skip("no /proc here")
    before = len(list(fds.iterdir()))
    for _ in range(3):
        with ModelFile(path) as file:
            assert len(list(fds.iterdir())) > before
            assert file.shards[0].size == path.stat().st_size
    (tmp_path / "bad.gguf").write_bytes(raw.gguf_bytes(data=1))
    with pytest.raises(Exception, match="truncated"):
        ModelFile(tmp_path / "bad.gguf")
    assert len(list(fds.iterdir())) == before


def test_opening_a_model_imports_neither_torch_nor_llama_cpp_nor_gguf(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", n_layers=1)
    code = (
        "import sys; from hybrid.model.architectures import read_spec; from hybrid.model.file import ModelFile\n"
        f"with ModelFile({str(path)!r}) as f: read_spec(f)\n"
        "print([m for m in ('torch', 'llama_cpp', 'gguf', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


SCALARS = {
    "uint8": st.integers(0, 2**8 - 1),
    "int8": st.integers(-(2**7), 2**7 - 1),
    "uint16": st.integers(0, 2**16 - 1),
    "int16": st.integers(-(2**15), 2**15 - 1),
    "uint32": st.integers(0, 2**32 - 1),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "uint64": st.integers(0, 2**64 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "float32": st.floats(width=32, allow_nan=False),
    "float64": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "string": st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
}
VALUES = st.one_of(
    *[st.tuples(st.just(kind), values) for kind, values in SCALARS.items()],
    st.tuples(st.just("array"), st.lists(SCALARS["string"], min_size=1, max_size=8)),
    st.tuples(st.just("array"), st.lists(SCALARS["int32"], min_size=1, max_size=8)),
    st.tuples(st.just("array"), st.lists(SCALARS["float32"], min_size=1, max_size=8)),
    st.tuples(st.just("array"), st.lists(SCALARS["bool"], min_size=1, max_size=8)),
)
KEYS = st.text("abcdefghij._é", min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    fields=st.dictionaries(KEYS, VALUES, max_size=8),
    shapes=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), max_size=4),
)
def test_whatever_gguf_writer_writes_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, fields: dict[str, tuple[str, Any]], shapes: list[list[int]]
) -> None:
    path = tmp_path_factory.mktemp("round") / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, (kind, value) in fields.items():
        getattr(writer, f"add_{kind}")("x." + key, value)
    arrays = {f"t{i}": np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for i, shape in enumerate(shapes)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with ModelFile(path) as file:
        written = {key: value for key, (_, value) in fields.items() if value != ""}  # GGUFWriter leaves "" out
        assert list(file.metadata) == ["general.architecture", *("x." + key for key in written)]
        for key, value in written.items():
            assert file.metadata["x." + key] == value
        assert list(file.tensors) == list(arrays)
        for name, array in arrays.items():
            assert file.tensors[name].shape == array.shape
            assert np.array_equal(file.data(name).view(np.float32), array.ravel())
