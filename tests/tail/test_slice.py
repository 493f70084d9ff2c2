"""The slice is a sound GGUF with the right layers, the right rewrites, and nothing else changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from gguf import GGUFReader, dequantize

from hybrid.errors import UnsupportedError
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.model.splits import allowed_n_gpu_layers, find_splits
from hybrid.tail.copy import write_f32_copy
from hybrid.tail.slice import tail_slice
from tests.tail.shards import write_shards
from tests.tiny import write_tiny


def fields(reader: GGUFReader) -> dict[str, Any]:
    return {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}


def slice_to_disk(path: Path, k: int) -> GGUFReader:
    with ModelFile(path) as file:
        return GGUFReader(tail_slice(file, read_spec(file), k).write(path.with_name(f"slice-{k}.gguf")))


@pytest.mark.parametrize("k", [1, 3, 5])
def test_layers_are_renumbered_and_every_byte_kept(k: int, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", kind=[T.Q4_0, T.F16], embd_kind=T.Q8_0, rope_freqs=True)
    original, cut = GGUFReader(path), slice_to_disk(path, k)
    want = {t.name: t for t in original.tensors if not t.name.startswith("blk.") or int(t.name.split(".")[1]) >= k}
    names = {}
    for t in cut.tensors:
        block = t.name.split(".")
        names[t.name if block[0] != "blk" else ".".join(["blk", str(int(block[1]) + k), *block[2:]])] = t
    assert list(names) == list(want)
    for name, tensor in names.items():
        assert tensor.tensor_type == want[name].tensor_type
        assert np.array_equal(tensor.data, want[name].data)
    assert fields(cut) == {**fields(original), "llama.block_count": 6 - k}


def test_the_same_file_opens_with_our_reader(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "gemma3", n_layers=7)
    slice_to_disk(path, 2)
    with ModelFile(path.with_name("slice-2.gguf")) as file, ModelFile(path) as whole:
        spec = read_spec(file)
        assert spec.n_layers == 5
        assert [layer.window for layer in spec.layers] == [layer.window for layer in read_spec(whole).layers][2:]


def test_an_implicit_window_pattern_is_written_out(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "gemma3", n_layers=8)
    assert fields(slice_to_disk(path, 3))["gemma3.attention.sliding_window_pattern"] == [True, True, False, True, True]


def test_a_window_without_layers_is_removed(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "gemma3", n_layers=6)
    cut = fields(slice_to_disk(path, 5))
    assert cut["gemma3.attention.sliding_window"] == 0
    assert "gemma3.attention.sliding_window_pattern" not in cut


def test_arrays_with_one_item_a_layer_are_cut_and_others_kept(tmp_path: Path) -> None:
    arrays = {
        "llama.attention.head_count_kv": [2] * 6,
        "llama.feed_forward_length": [512] * 6,
        "llama.rope.dimension_sections": [1, 2, 3, 4, 5, 6],
        "llama.some.list": [1, 2, 3],
        "other.list": [1, 2, 3, 4, 5, 6],
    }
    cut = fields(slice_to_disk(write_tiny(tmp_path / "m.gguf", metadata=arrays), 4))
    assert {key: cut[key] for key in arrays} == {
        **arrays,
        "llama.attention.head_count_kv": [2] * 2,
        "llama.feed_forward_length": [512] * 2,
    }


@pytest.mark.parametrize(("n_embd", "kind"), [(256, T.Q1_0), (96, T.Q4_0), (80, T.F16)])
def test_an_untied_embedding_becomes_the_cheapest_zeros(n_embd: int, kind: T, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", tied=False, n_embd=n_embd, n_ff=128)
    with ModelFile(path) as file:
        virtual = tail_slice(file, read_spec(file), 2)
        embedding = next(t for t in virtual.tensors if t.name == "token_embd.weight")
        assert embedding.type == kind
        assert embedding.data == embedding.n_bytes  # a run of zeros
        assert virtual.stored_bytes == sum(t.n_bytes for t in virtual.tensors) - embedding.n_bytes


def test_shards_become_one_file(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    first = write_shards(path, 3)
    with ModelFile(first) as file, ModelFile(path) as whole:
        assert len(file.shards) == 3
        a = tail_slice(file, read_spec(file), 2)
        b = tail_slice(whole, read_spec(whole), 2)
        assert a.write(tmp_path / "a.gguf").read_bytes() == b.write(tmp_path / "b.gguf").read_bytes()


def test_the_f32_copy_holds_the_dequantised_weights(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", kind=[T.Q4_K, T.IQ4_XS, T.F16, T.Q8_0], embd_kind=T.Q6_K)
    with ModelFile(path) as file:
        copy = GGUFReader(write_f32_copy(file, tmp_path / "copy.gguf"))
    original = GGUFReader(path)
    assert fields(copy) == fields(original)
    for ours, theirs in zip(copy.tensors, original.tensors, strict=True):
        assert ours.name == theirs.name
        assert ours.tensor_type == T.F32
        want = theirs.data if theirs.tensor_type == T.F32 else dequantize(theirs.data, theirs.tensor_type)
        assert np.array_equal(ours.data, want)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", kind=T.Q8_0)

    def fail(fraction: float) -> None:
        if fraction > 0.5:
            raise KeyboardInterrupt

    with ModelFile(path) as file, pytest.raises(KeyboardInterrupt):
        write_f32_copy(file, tmp_path / "copy.gguf", fail)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_allowed_splits_say_why_others_are_refused(tmp_path: Path) -> None:
    with ModelFile(write_tiny(tmp_path / "m.gguf")) as file:
        spec = read_spec(file)
        assert allowed_n_gpu_layers(spec) == [0, 1, 2, 3, 4, 5, 6]
        assert find_splits(spec).refused == ()
        for k in (6, 7, -1):
            with pytest.raises(UnsupportedError, match=f"n_gpu_layers = {k}"):
                tail_slice(file, spec, k)
    with ModelFile(write_tiny(tmp_path / "b.gguf", "bloom")) as file:
        spec = read_spec(file)
        assert allowed_n_gpu_layers(spec) == [0]
        assert "bloom" in (find_splits(spec).refusal(3) or "")
        with pytest.raises(UnsupportedError, match="bloom"):
            tail_slice(file, spec, 3)


def test_a_27b_split_is_announced_as_inexact(tmp_path: Path) -> None:
    small = {"n_embd": 32, "n_heads": 1, "n_kv_heads": 1, "head_dim": 32, "n_ff": 32}
    for n_layers, expected in ((61, 0), (62, 1), (64, 1)):
        with ModelFile(write_tiny(tmp_path / "m.gguf", "gemma3", n_layers=n_layers, **small)) as file:
            assert len(find_splits(read_spec(file)).notes) == expected
