"""The Ledger against what torch and llama.cpp really allocate."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybrid.head import attention, device, graphs
from hybrid.head.activation import gelu
from hybrid.head.dequant import SUPPORTED
from hybrid.head.device import Compute
from hybrid.head.kernels.formats import FEW_TOKENS, Planes
from hybrid.head.kv.cache import open_cache
from hybrid.head.linear import QuantLinear, Workspace
from hybrid.head.memory import LiveBytes
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.model.ggml_types import GGML_TYPES
from hybrid.model.spec import ModelSpec
from hybrid.schedule import head_size, kv_tiers
from hybrid.schedule.kv_size import kv_bytes, llama_layer_kv_bytes
from hybrid.schedule.ledger import ledger_of
from hybrid.schedule.placement import KV_STRATEGIES, KVDtype, KVStrategy, Placement
from hybrid.schedule.shape import parse_shape, shape_spec
from hybrid.tail.dry_run import dry_run
from scripts.bench_ledger import grown, growth, head_bytes, spread, temporaries
from tests.schedule.sparse import write_sparse
from tests.tiny import vocabulary, write_tiny

MIB = 1 << 20


def close(predicted: int, measured: int, *, share: float = 0.02, slack: int = 16 * MIB) -> bool:
    """Within 2 % or 16 MiB."""
    return abs(predicted - measured) <= max(slack, share * measured)


# -- the head ----------------------------------------------------------------------------------------------------------


def test_the_constants_are_the_heads_own() -> None:
    for name, stated in (("cpu", head_size.CPU), ("meta", head_size.ACCELERATOR)):  # meta: as any accelerator
        compute = Compute.on(torch.device(name))
        assert (compute.expand, compute.dtype.itemsize, compute.tile_values) == (
            stated.expand,
            stated.value_bytes,
            stated.tile_values,
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "_matmul_dtype", lambda device: torch.float16)
        patch.setattr(device.Kernels, "on", lambda device: None)
        compute, cuda = Compute.on(torch.device("cuda")), head_size.CUDA
    assert (compute.tile_values, compute.temporaries) == (cuda.tile_values, cuda.temporaries)
    assert (head_size.CPU.rows, head_size.ACCELERATOR.rows) == (attention.ROWS, attention.ROWS_ACCELERATOR)
    assert attention.CONVERT_BYTES == head_size.CONVERT_BYTES
    assert SUPPORTED == head_size.QUANTISED
    assert graphs.MAX_SHAPES == head_size.GRAPH_SHAPES
    assert FEW_TOKENS == kv_tiers.RECORDED_TOKENS


def measure_head(file: ModelFile, placement: Placement) -> int:
    """Bytes of weights, cache and live temporaries of a full batch that ends a full context."""
    gelu(torch.zeros(1))  # makes its table, once a process
    return head_bytes(file, read_spec(file), placement)[0]


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_the_heads_bytes_are_its_live_storages(architecture: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", architecture, n_layers=4, n_ff=1024, n_ctx=4096)
    with ModelFile(path) as file:
        spec = read_spec(file)
        cases: list[tuple[int, int, int, int, KVDtype]] = [
            (1, 512, 64, 1, "f16"),
            (2, 2048, 256, 3, "f16"),
            (4, 1024, 256, 1, "f32"),
            (3, 2048, 128, 1, "bf16"),
            (4, 512, 1, 2, "f16"),
        ]
        for k, n_ctx, n_batch, sequences, dtype in cases:
            placement = Placement(
                device="cpu", n_gpu_layers=k, n_ctx=n_ctx, n_batch=n_batch, n_sequences=sequences, kv_dtype=dtype
            )
            predicted, measured = ledger_of(spec, placement).vram_bytes, measure_head(file, placement)
            assert close(predicted, measured, share=0.1, slack=MIB), (placement, predicted, measured)
            assert predicted >= 0.98 * measured


@pytest.mark.parametrize("kv", ["stream", "attend", "tiered"])
@pytest.mark.parametrize("dtype", ["f16", "f32", "q8_0"])
def test_the_bytes_of_a_cache_on_the_host(kv: KVStrategy, dtype: KVDtype, tmp_path: Path) -> None:
    """On both sides of the bus, whatever the strategy: what waits in host memory, and what passes through buffers."""
    cases = [("llama", 4, 4096, 64, True), ("llama", 2, 1024, 8, True), ("gemma3", 3, 2048, 256, False)]
    for architecture, k, n_ctx, n_batch, keep in cases:
        path = write_tiny(tmp_path / "m.gguf", architecture, n_layers=4, n_ctx=4096, head_dim=256, window=128)
        placement = Placement(
            device="cpu",
            n_gpu_layers=k,
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_sequences=2,
            kv=kv,
            kv_dtype=dtype,
            kv_budget=3 * MIB if kv == "tiered" else None,
            kv_keep_sliding=keep,
        )
        with ModelFile(path) as file:
            spec = read_spec(file)
            measured, ledger = measure_head(file, placement), ledger_of(spec, placement)
        assert close(ledger.vram_bytes, measured, share=0.1, slack=MIB), (placement, ledger.vram_bytes, measured)
        cache = open_cache(spec.layers[:k], placement, torch.device("cpu"))
        tail = sum(llama_layer_kv_bytes(layer, placement) for layer in spec.layers[k:])
        in_host = ledger.host.dynamic
        assert cache.host_nbytes == sum(in_host.kv) - tail + in_host.staging
        assert cache.nbytes == sum(ledger.device.dynamic.kv) + ledger.device.dynamic.staging


def test_keys_too_many_to_convert_at_once(tmp_path: Path) -> None:
    """The running softmax over blocks of keys, whose scores are the largest temporary there is."""
    wide = {"n_layers": 1, "n_heads": 8, "n_kv_heads": 4, "head_dim": 256}
    with ModelFile(write_tiny(tmp_path / "m.gguf", n_ctx=8192, **wide)) as file:  # type: ignore[arg-type]
        for n_ctx in (2048, 2560, 6000):
            placement = Placement(device="cpu", n_gpu_layers=1, n_ctx=n_ctx, n_batch=64)
            predicted, measured = ledger_of(read_spec(file), placement).vram_bytes, measure_head(file, placement)
            assert close(predicted, measured, share=0.1, slack=MIB), (placement, predicted, measured)


def varied(spec: ModelSpec, rows: Sequence[tuple[int, int, int, int, KVStrategy]]) -> list[Placement]:
    """Placements of (k, n_ctx, n_batch, sequences, kv); `tiered` has room for a quarter of the cache."""
    found = []
    for asked, c, b, s, kv in rows:
        k = asked if asked >= 0 else spec.n_layers
        p = Placement(device="cpu", n_gpu_layers=k, n_ctx=c, n_batch=b, n_ubatch=b, n_sequences=s, kv=kv)
        found.append(replace(p, kv_budget=kv_bytes(spec, p, 0, k) // 4) if kv == "tiered" else p)
    return found


HEADS: dict[str, list[tuple[int, int, int, int, KVStrategy]]] = {
    "some": [
        (2, 1024, 128, 3, "device"),
        (1, 8192, 64, 1, "stream"),
        (3, 1024, 64, 4, "attend"),
        (1, 4096, 512, 1, "tiered"),
    ],
    "more": [
        (-1, 1024, 512, 4, "device"),
        (8, 8192, 64, 1, "device"),
        (-1, 1024, 64, 1, "stream"),
        (4, 8192, 512, 4, "stream"),
        (8, 1024, 512, 1, "attend"),
        (-1, 4096, 64, 4, "attend"),
        (8, 4096, 64, 4, "tiered"),
        (-1, 1024, 512, 1, "tiered"),
    ],
}
"""k (-1: all), context, batch, sequences, strategy; `scripts/bench_ledger.py` has all combinations."""


@pytest.mark.real
@pytest.mark.parametrize("rows", ["some", pytest.param("more", marks=pytest.mark.slow)])
def test_the_heads_bytes_on_a_real_model(rows: str, real_model: Path) -> None:
    gelu(torch.zeros(1))
    with ModelFile(real_model) as file:
        spec = read_spec(file)
        for placement in varied(spec, HEADS[rows]):
            measured, in_host = head_bytes(file, spec, placement)
            ledger = ledger_of(spec, placement)
            assert close(ledger.vram_bytes, measured), (placement, ledger.vram_bytes, measured)
            tail = sum(llama_layer_kv_bytes(layer, placement) for layer in spec.layers[placement.n_gpu_layers :])
            assert in_host == sum(ledger.host.dynamic.kv) - tail + ledger.host.dynamic.staging


@pytest.mark.parametrize("kind", sorted(SUPPORTED))
@pytest.mark.parametrize("as_planes", [False, True])
def test_on_cuda_torch_s_tiles_and_temporaries_take_no_more_than_a_kernel_s_tile(kind: int, as_planes: bool) -> None:
    cpu = torch.device("cpu")
    n_out, n_in = 512, 512
    info = GGML_TYPES[kind]
    for tile_values in (1 << 16, 1 << 20):  # the matrix in four tiles, or in a quarter of one
        compute = Compute(cpu, torch.bfloat16, expand=False, tile_values=tile_values, temporaries=False)
        weight = torch.ones(n_out, n_in // info.block * info.n_bytes, dtype=torch.uint8)
        held = Planes(weight.view(-1), kind, (n_out, n_in)) if as_planes else weight
        with torch.inference_mode(), LiveBytes() as count:
            QuantLinear(held, kind, (n_out, n_in), None, Workspace(compute))(torch.zeros(1, n_in))
        assert count.peak - 6 * (n_in + n_out) <= 2 * min(tile_values, n_out * n_in)


@pytest.mark.parametrize("kind", sorted(SUPPORTED))
def test_a_tile_takes_no_more_than_the_workspace(kind: int) -> None:
    compute = Compute(torch.device("cpu"), torch.bfloat16, expand=False, tile_values=1 << 16)
    n_out, n_in = 256, 512
    info = GGML_TYPES[kind]
    weight = torch.ones(n_out, n_in // info.block * info.n_bytes, dtype=torch.uint8)
    with torch.inference_mode(), LiveBytes() as count:
        work = Workspace(compute)
        QuantLinear(weight, kind, (n_out, n_in), None, work)(torch.zeros(1, n_in))
    per_value = (count.peak - 4 * (n_in + n_out)) / compute.tile_values
    assert per_value <= compute.dtype.itemsize + head_size.TILE_TEMPORARY_BYTES


# -- the tail ----------------------------------------------------------------------------------------------------------

SHAPES = {
    "8B": "layers=6,kv_heads=8,head_dim=128",
    "70B": "layers=4,kv_heads=8,heads=64,head_dim=128,ff=28672",
    "many heads": "layers=4,kv_heads=8,heads=64,head_dim=128,embd=5120,ff=25600",
    "narrow": "layers=4,kv_heads=2,heads=16,head_dim=128,embd=2048,ff=6144",
    "thin feed-forward": "layers=4,kv_heads=8,heads=32,head_dim=128,embd=1024,ff=768",
    "no grouping": "layers=4,kv_heads=32,heads=32,head_dim=128,ff=11008",
    "small": "layers=30,kv_heads=3,heads=9,head_dim=64,ff=1536,quant=Q4_1",
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_tails_buffers_are_what_llama_cpp_reports(name: str, tmp_path: Path) -> None:
    wanted = shape_spec(parse_shape(f"{SHAPES[name]},vocab={len(vocabulary()[0])}"))
    with ModelFile(write_sparse(tmp_path / "m.gguf", wanted)) as file:
        spec = read_spec(file)
        dtypes: tuple[KVDtype, ...] = ("f16", "q8_0")
        placements = [
            Placement(
                device="cpu",
                n_gpu_layers=k,
                n_ctx=c,
                n_batch=b,
                n_ubatch=b,
                n_sequences=s,
                n_draft=d,
                kv_dtype=t,
                kv_unified=u,
            )
            for k, c, b, (s, d), t, u in itertools.product(
                (0, 2, spec.n_layers - 1), (1000, 16384), (64, 512), ((1, 0), (3, 7)), dtypes, (False, True)
            )
        ]
        for placement, memory in zip(placements, dry_run(file, spec, placements), strict=True):
            dynamic = ledger_of(spec, placement).host.dynamic
            assert close(sum(dynamic.kv), memory.kv_bytes, slack=MIB), placement
            predicted = sum(dynamic.kv) + dynamic.compute + dynamic.output
            assert close(predicted, memory.total_bytes), (placement, predicted, memory)


@pytest.mark.real
def test_the_tails_buffers_on_a_real_model(real_model: Path) -> None:
    with ModelFile(real_model) as file:
        spec = read_spec(file)
        base = Placement(device="cpu", n_gpu_layers=0, n_ctx=1024)
        placements = [
            replace(base, n_gpu_layers=k, n_ctx=c, n_batch=b, n_ubatch=b, n_sequences=s, n_draft=d)
            for k, c, b, (s, d) in itertools.product(
                (0, spec.n_layers - 1), (300, 8192), (64, 512), ((1, 0), (4, 0), (1, 7))
            )
        ]
        for placement, memory in zip(placements, dry_run(file, spec, placements), strict=True):
            dynamic = ledger_of(spec, placement).host.dynamic
            predicted = sum(dynamic.kv) + dynamic.compute + dynamic.output
            assert close(predicted, memory.total_bytes, slack=8 * MIB), (placement, predicted, memory)
            assert dynamic.output == memory.output_bytes
        for kv in KV_STRATEGIES:  # where the head keeps its own is nothing to llama.cpp
            for placement in placements:
                host = ledger_of(spec, replace(placement, kv=kv, kv_budget=0)).host
                assert (host.dynamic.compute, host.dynamic.output) == (
                    ledger_of(spec, placement).host.dynamic.compute,
                    ledger_of(spec, placement).host.dynamic.output,
                )


# -- the process -------------------------------------------------------------------------------------------------------

PROCESSES: list[tuple[int, int, int, int, KVStrategy]] = [
    (4, 512, 128, 2, "tiered"),
    (0, 2048, 512, 1, "device"),
    (4, 1024, 128, 2, "tiered"),
    (10, 2048, 64, 1, "device"),
    (6, 1024, 512, 2, "stream"),
    (10, 1024, 64, 2, "attend"),
    (-1, 1024, 512, 1, "tiered"),
]


@pytest.mark.real
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id="-".join(map(str, row)), marks=[pytest.mark.slow] * (i > 0))
        for i, row in enumerate(PROCESSES)
    ],
)
def test_a_process_grows_by_what_the_ledger_says(row: tuple[int, int, int, int, KVStrategy], real_model: Path) -> None:
    """Anonymous memory, after the libraries are imported and with every sequence's context full. What malloc keeps of
    freed temporaries is another matter: it depends on how the threads met, and is bounded."""
    with ModelFile(real_model) as file:
        spec = read_spec(file)
    (placement,) = varied(spec, [row])
    found = grown(real_model, placement)
    predicted = growth(spec, placement)
    assert close(predicted, found["anonymous"]), (placement, predicted, found)
    assert found["kept"] <= 2 * temporaries(spec, placement) + 16 * MIB, (placement, found)
    assert found["allocated"] >= found["anonymous"]


def test_a_spread_has_every_two_values_of_different_kinds() -> None:
    axes = (0, 1, 2), "ab", (True, False), (5, 6, 7, 8)
    rows = spread(*axes)
    for (i, ours), (j, theirs) in itertools.combinations(enumerate(axes), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(ours, theirs))
    assert len(rows) < 20
    assert spread(*axes) == rows


def test_a_shape_weighs_what_its_file_would(tmp_path: Path) -> None:
    wanted = shape_spec(parse_shape(f"layers=3,kv_heads=2,head_dim=128,quant=Q6_K,vocab={len(vocabulary()[0])}"))
    with ModelFile(write_sparse(tmp_path / "m.gguf", wanted)) as file:
        spec = read_spec(file)
    placement = Placement(device="cuda", n_gpu_layers=2, n_ctx=4096)
    assert ledger_of(spec, placement) == ledger_of(wanted, placement)
