"""Loading, memory and failures of the head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as T

from hybrid.errors import BadRequestError, Cancelled, HostMemoryError, OutOfMemoryError, UnsupportedError
from hybrid.head.dequant import SUPPORTED
from hybrid.head.device import Compute, allocating, open_device
from hybrid.head.memory import LiveBytes
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from tests.head.heads import open_head, relative, run, some_tokens
from tests.tiny import write_tiny

CPU = torch.device("cpu")
MIXED = [T(kind) for kind in sorted(SUPPORTED)]


def kept(dtype: torch.dtype = torch.float32) -> Compute:
    """The policy of an accelerator, on the CPU; small tiles, so that every matrix is several."""
    return Compute(CPU, dtype, expand=False, tile_values=100 * 256)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every type that stays quantised, cycled over the matrices; embeddings in Q6_K."""
    path = tmp_path_factory.mktemp("mixed") / "m.gguf"
    return write_tiny(path, n_layers=4, kind=MIXED, embd_kind=T.Q6_K, biases=True)


def test_weights_kept_quantised_give_what_expanded_ones_give(mixed: Path, heads: Any) -> None:
    tokens = some_tokens(40)
    expanded, quantised = heads(mixed), heads(mixed, compute=kept())
    want, got = run(expanded, tokens), run(quantised, tokens)
    assert relative(got, want) < 1e-5
    logits = [head.logits(torch.from_numpy(want)).numpy() for head in (quantised, expanded)]
    assert relative(*logits) < 1e-5


@pytest.mark.parametrize(("dtype", "eps"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_precision_products_cost_what_their_rounding_explains(
    mixed: Path, heads: Any, dtype: torch.dtype, eps: float
) -> None:
    """Each of four layers rounds weights and activations of its products once: a few eps in all, not tens."""
    tokens = some_tokens(40)
    assert eps / 10 < relative(run(heads(mixed, compute=kept(dtype)), tokens), run(heads(mixed), tokens)) < 4 * eps


def test_weight_bytes_are_the_file_s_where_kept_and_4_a_value_where_expanded(mixed: Path, heads: Any) -> None:
    """At k = L the tied output head (and its norm) are on the device; before, no embeddings are."""
    with ModelFile(mixed) as file:
        spec = read_spec(file)
        for k in (1, 3, 4):
            held = [info for layer in spec.layers[:k] for info in layer.weights.values()]
            if k == spec.n_layers:
                held += [spec.weights["output_norm.weight"], spec.output_tensor]
            head = heads(mixed, k, compute=kept())
            assert head.weight_bytes == sum(info.n_bytes for info in held)
            assert head.nbytes == head.weight_bytes + head.cache.nbytes
            assert heads(mixed, k).weight_bytes == sum(4 * info.n_values for info in held)


def test_types_without_device_dequantisation_are_expanded_counted_and_told(tmp_path: Path, heads: Any) -> None:
    path = write_tiny(tmp_path / "m.gguf", n_layers=2, kind=[T.TQ2_0, T.Q4_K], n_ff=256)
    with ModelFile(path) as file:
        infos = [info for layer in read_spec(file).layers for info in layer.weights.values()]
        values = {
            name: gguf.dequantize(file.data(info.name).reshape(info.shape[0], -1), T(info.type))
            for name, info in file.tensors.items()
            if info.type == T.TQ2_0
        }
    assert values
    head = heads(path, 2, compute=kept())
    layers = sum(4 * info.n_values if info.type == T.TQ2_0 else info.n_bytes for info in infos)
    with ModelFile(path) as file:
        spec = read_spec(file)
        outside = spec.output_tensor.n_bytes + spec.weights["output_norm.weight"].n_bytes
    assert head.weight_bytes == layers + outside
    assert len(head.notes) == 1
    assert "TQ2_0" in head.notes[0]
    plain = heads(path, 2)
    assert relative(run(head, some_tokens(20)), run(plain, some_tokens(20))) < 1e-5
    assert heads(write_tiny(tmp_path / "q.gguf", n_layers=1, kind=T.Q4_K), 1, compute=kept()).notes == []


@pytest.mark.parametrize("kind", [T.F32, T.Q4_0, T.TQ2_0], ids=lambda kind: kind.name)
def test_embeddings_are_read_row_by_row_from_the_file(kind: T, tmp_path: Path, heads: Any) -> None:
    """Scaled as the spec says; a token outside the vocabulary is an error, not a crash or another row."""
    path = write_tiny(tmp_path / "m.gguf", "gemma3", n_layers=2, embd_kind=kind)
    with ModelFile(path) as file:
        info = file.tensors["token_embd.weight"]
        table = gguf.dequantize(file.data(info.name).reshape(info.shape[0], -1), kind)
    head = heads(path, 1)
    got = head._embedding(np.array([5, 300, 5])).numpy()
    assert np.array_equal(got, table[[5, 300, 5]] * np.float32(16.0))
    for bad in (-1, len(table)):
        with pytest.raises(BadRequestError, match=f"{len(table)} tokens"):
            head.forward(np.array([bad]), np.array([0]), np.array([0]))


@pytest.mark.parametrize("name", ["mps", "banana", "meta", *([] if torch.cuda.is_available() else ["cuda", "cuda:0"])])
def test_a_device_that_is_not_there_is_refused_and_the_way_out_named(name: str) -> None:
    if name == "mps" and torch.backends.mps.is_available():
        pytest.skip("this machine has it")
    with pytest.raises(UnsupportedError, match="--device cpu") as error:
        open_device(name)
    assert "\n" not in str(error.value)
    assert name in str(error.value)


def test_a_device_is_checked_before_anything_is_read(tiny_llama: Path) -> None:
    with pytest.raises(UnsupportedError, match="banana"):
        open_head(tiny_llama, 2, device="banana")


@pytest.mark.parametrize("k", [0, -1, 5])
def test_k_must_be_one_of_the_layers(tiny_llama: Path, k: int) -> None:
    with pytest.raises(BadRequestError, match="1 to 4"):
        open_head(tiny_llama, k)


def test_logits_need_all_layers(tiny_llama: Path, heads: Any) -> None:
    with pytest.raises(BadRequestError, match="-ngl all"):
        heads(tiny_llama, 3).logits(torch.zeros(1, 256))


def test_a_context_that_does_not_fit_fails_before_loading(tiny_llama: Path) -> None:
    seen: list[float] = []
    with pytest.raises(OutOfMemoryError, match=r"bytes .*-ngl"):
        open_head(tiny_llama, 2, n_ctx=1 << 44, progress=seen.append)
    assert not seen


def test_progress_rises_to_1_and_a_load_can_be_cancelled(mixed: Path, heads: Any) -> None:
    seen: list[float] = []
    heads(mixed, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    half: list[float] = []
    with pytest.raises(Cancelled):
        open_head(mixed, progress=half.append, cancelled=lambda: bool(half) and half[-1] > 0.5)
    assert 0.5 < half[-1] < 1.0


def test_a_failed_forward_can_be_trimmed_away(tiny_gemma: Path, heads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = some_tokens(30)
    want = run(heads(tiny_gemma, 5), tokens)
    head = heads(tiny_gemma, 5)
    run(head, tokens[:20])
    with monkeypatch.context() as patch:
        patch.setattr(head._blocks[3].feed_forward, "down", lambda x: (_ for _ in ()).throw(torch.OutOfMemoryError()))
        with pytest.raises(OutOfMemoryError, match="-b"):
            run(head, tokens[20:], at=20)
    assert head.cache.trim(0, 20) == 20
    assert relative(run(head, tokens[20:], at=20), want[20:]) < 5e-4


def test_close_gives_everything_back(tiny_llama: Path) -> None:
    head = open_head(tiny_llama)
    assert head.nbytes > 0
    head.close()
    head.close()
    assert head.nbytes == 0


def test_a_tensor_nobody_knows_is_an_error(tiny_llama: Path) -> None:
    """Leaving it out would be another model."""
    from dataclasses import replace

    from hybrid.head.head import Head
    from hybrid.schedule.placement import Placement

    with ModelFile(tiny_llama) as file:
        spec = read_spec(file)
        extra = {**spec.layers[0].weights, "attn_gate.weight": spec.layers[0].weights["attn_norm.weight"]}
        spec = replace(spec, layers=(replace(spec.layers[0], weights=extra), *spec.layers[1:]))
        with pytest.raises(UnsupportedError, match=r"attn_gate\.weight"):
            Head(file, spec, Placement(device="cpu", n_gpu_layers=1, n_ctx=32))


def test_a_device_that_is_full_is_out_of_memory_and_not_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(OutOfMemoryError, match="'cuda' has no memory left"):
        open_device("cuda")


@pytest.mark.parametrize(
    ("error", "device", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "cuda", OutOfMemoryError),
        (MemoryError(), "cuda", HostMemoryError),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "cuda", HostMemoryError),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "cpu", HostMemoryError),
    ],
)
def test_which_memory_is_out_is_told(error: BaseException, device: str, kind: type[Exception]) -> None:
    with pytest.raises(OutOfMemoryError) as caught, allocating("Loading x", 8, torch.device(device)):
        raise error
    assert type(caught.value) is kind
    assert ("RAM" in str(caught.value)) == (kind is HostMemoryError and device != "cpu")


def test_a_tensor_that_ends_while_another_is_counted_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = torch.UntypedStorage.nbytes
    kept: list[torch.Tensor] = []

    def collected(storage: torch.UntypedStorage) -> int:  # as a garbage collection, or another thread, may do
        kept.clear()
        return nbytes(storage)

    with LiveBytes() as count:
        kept.append(torch.zeros(1000))
        assert count.now == 4000
        monkeypatch.setattr(torch.UntypedStorage, "nbytes", collected)
        other = torch.zeros(10)
        monkeypatch.undo()
        assert count.now == other.nbytes
    del other
    assert count.now == 0
