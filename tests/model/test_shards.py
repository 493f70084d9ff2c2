"""A model in several files opens like one in a single file, from whichever of them one points at."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest

from hybrid.errors import BadFileError
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from tests.tiny import write_tiny

N = 3


def write_shards(whole: Path, folder: Path, n_shards: int = N, said_tensors: int | None = None) -> list[Path]:
    """Split `whole` as llama-gguf-split does: all metadata in the first file, tensors dealt out in order."""
    folder.mkdir(exist_ok=True)
    with ModelFile(whole) as file:
        names = list(file.tensors)
        paths = []
        for i in range(n_shards):
            path = folder / f"tiny-{i + 1:05d}-of-{n_shards:05d}.gguf"
            writer = gguf.GGUFWriter(path, "llama")
            if i == 0:
                for key, value in file.metadata.items():
                    if key == "general.architecture" or value == "":
                        continue
                    vtype = gguf.GGUFValueType(file.fields[key].type)
                    if vtype == gguf.GGUFValueType.ARRAY:
                        writer.add_array(key, value)
                    else:
                        writer.add_key_value(key, value, vtype)
            writer.add_uint16("split.no", i)
            writer.add_uint16("split.count", n_shards)
            writer.add_int32("split.tensors.count", len(names) if said_tensors is None else said_tensors)
            for name in names[i * len(names) // n_shards : (i + 1) * len(names) // n_shards]:
                info = file.tensors[name]
                writer.add_tensor(name, np.array(file.data(name)).view(np.float32).reshape(info.shape))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            paths.append(path)
    return paths


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "whole.gguf", n_layers=3)


@pytest.fixture
def shards(whole: Path, tmp_path: Path) -> list[Path]:
    return write_shards(whole, tmp_path / "shards")


def test_shards_give_the_tensors_and_the_spec_of_the_whole_file(whole: Path, shards: list[Path]) -> None:
    with ModelFile(whole) as one, ModelFile(shards[0]) as many:
        assert [s.path for s in many.shards] == shards
        assert list(many.tensors) == list(one.tensors)
        for name in one.tensors:
            assert np.array_equal(many.data(name), one.data(name)), name
        assert {t.shard for t in many.tensors.values()} == set(range(N))
        a, b = read_spec(one), read_spec(many)
        assert (a.n_layers, a.n_vocab, a.layers[2].rope) == (b.n_layers, b.n_vocab, b.layers[2].rope)
        assert [layer.weight_bytes for layer in a.layers] == [layer.weight_bytes for layer in b.layers]


def test_any_shard_finds_the_first(shards: list[Path]) -> None:
    for path in shards:
        with ModelFile(path) as file:
            assert file.path == shards[0]
            assert len(file.shards) == N


def test_links_to_shards_keep_their_own_names(shards: list[Path], tmp_path: Path) -> None:
    """Download caches keep files under their hashes and link to them."""
    links = tmp_path / "links"
    links.mkdir()
    for i, path in enumerate(shards):
        stored = path.rename(path.with_name(f"hash{i}"))
        (links / path.name).symlink_to(stored)
    with ModelFile(links / shards[0].name) as file:
        assert len(file.shards) == N


def test_a_missing_shard_is_named(shards: list[Path]) -> None:
    shards[1].unlink()
    with pytest.raises(BadFileError, match=r"tiny-00002-of-00003\.gguf is missing"):
        ModelFile(shards[0])


def test_a_missing_first_shard_is_named(shards: list[Path]) -> None:
    shards[0].unlink()
    with pytest.raises(BadFileError, match=r"first file tiny-00001-of-00003\.gguf is missing"):
        ModelFile(shards[2])


def test_a_shard_under_another_shards_name_is_refused(shards: list[Path]) -> None:
    shutil.copy(shards[2], shards[1])
    with pytest.raises(BadFileError, match=r"00002-of-00003\.gguf says it is shard 3 of 3, but its name says 2 of 3"):
        ModelFile(shards[0])


def test_the_second_shard_alone_is_refused(shards: list[Path], tmp_path: Path) -> None:
    renamed = shards[1].rename(tmp_path / "second.gguf")
    with pytest.raises(BadFileError, match="shard 2 of 3; give the first one"):
        ModelFile(renamed)


def test_a_renamed_first_shard_is_told_the_name_it_needs(shards: list[Path], tmp_path: Path) -> None:
    renamed = shards[0].rename(tmp_path / "first.gguf")
    with pytest.raises(BadFileError, match=r"must end in -00001-of-00003\.gguf"):
        ModelFile(renamed)


def test_a_truncated_shard_is_named(shards: list[Path]) -> None:
    shards[2].write_bytes(shards[2].read_bytes()[:-200])
    with pytest.raises(BadFileError, match=r"tiny-00003-of-00003\.gguf is truncated"):
        ModelFile(shards[0])


def test_tensors_missing_from_the_set_are_noticed(whole: Path, tmp_path: Path) -> None:
    paths = write_shards(whole, tmp_path / "said", said_tensors=1000)
    with pytest.raises(BadFileError, match="but it says 1000"):
        ModelFile(paths[0])


def test_a_tensor_in_two_shards_is_refused(whole: Path, tmp_path: Path) -> None:
    paths = write_shards(whole, tmp_path / "shards")
    other = write_shards(whole, tmp_path / "other", n_shards=1)
    content = bytearray(other[0].read_bytes())
    for key, value in ((b"split.no", 1), (b"split.count", N)):
        at = content.index(key) + len(key) + 4
        content[at : at + 2] = value.to_bytes(2, "little")
    paths[1].write_bytes(content)
    with pytest.raises(BadFileError, match="is in both"):
        ModelFile(paths[0])
