"""Head and tail together are llama.cpp, for every architecture; and `hybrid inspect` tells where they may meet."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid.cli.inspect import describe
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.model.splits import find_splits, padding
from hybrid.runtime.engine import Engine
from hybrid.schedule.ledger import ledger_of
from hybrid.schedule.placement import Placement
from hybrid.tail.llama import lib
from hybrid.tail.reference import Reference
from hybrid.tail.tail import Tail
from tests.architectures.models import MODELS
from tests.head.heads import some_tokens
from tests.tiny_arch import Tiny, write_arch

TOKENS = some_tokens(70).tolist()
REPORTED = 10486
"""llama.cpp reports each buffer to a hundredth of a MiB."""


@pytest.mark.parametrize("name", MODELS)
def test_the_split_equals_llama_cpp(name: str, tiny: Callable[..., Path]) -> None:
    path = tiny(name)
    with Reference(path, n_ctx=128) as reference:
        want = reference.evaluate(TOKENS)
    with ModelFile(path) as file:
        spec = read_spec(file)
        allowed = find_splits(spec).allowed
        for k in sorted({1, spec.n_layers // 2, spec.n_layers - 1, spec.n_layers} & set(allowed)):
            placement = Placement(device="cpu", n_gpu_layers=k, n_ctx=128, n_batch=32, n_ubatch=32)
            with closing(Engine(file, spec, placement)) as engine, engine.scoring():
                got = engine.evaluate(TOKENS, outputs="all")
            assert got is not None
            assert np.abs(got - want).max() <= 5e-3 * np.abs(want).max(), k


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_reads_the_same_figures(name: str, tiny: Callable[..., Path]) -> None:
    with ModelFile(tiny(name)) as file:
        spec = read_spec(file)
    with Reference(tiny(name), n_ctx=64, n_outputs_max=1) as reference:
        model = reference.model.handle
        assert spec.n_layers == lib().llama_model_n_layer(model)
        assert spec.n_embd == lib().llama_model_n_embd(model)
        assert spec.layers[0].n_heads == lib().llama_model_n_head(model)
        assert spec.layers[0].n_kv_heads == lib().llama_model_n_head_kv(model)
        if any(layer.window for layer in spec.layers):
            assert max(layer.window for layer in spec.layers) == lib().llama_model_n_swa(model)
        styles = {lib().LLAMA_ROPE_TYPE_NORM: "norm", lib().LLAMA_ROPE_TYPE_NEOX: "neox"}
        ropes = {layer.rope.style for layer in spec.layers if layer.rope is not None}
        assert ropes <= {styles[lib().llama_model_rope_type(model)]}
        n_params = sum(t.n_values for layer in spec.layers for t in layer.weights.values())
        assert n_params + sum(t.n_values for t in spec.weights.values()) == lib().llama_model_n_params(model)


@pytest.mark.parametrize(("name", "k"), [("smollm3", 3), ("cohere2", 7), ("gemma4", 5), ("gemma4", 3), ("gpt-oss", 5)])
def test_the_ledger_knows_the_tail_s_kv_and_its_empty_layers(name: str, k: int, tmp_path: Path) -> None:
    model = replace(MODELS[name], sizes={**MODELS[name].sizes, "n_embd": 128, "n_heads": 8})  # rows Q1_0 can hold
    path = write_arch(tmp_path / "m.gguf", model)
    with ModelFile(path) as file:
        spec = read_spec(file)
        placement = Placement(device="cpu", n_gpu_layers=k, n_ctx=1024, n_batch=32, n_ubatch=32)
        host = ledger_of(spec, placement).host
        with Tail(file, spec, placement) as tail:
            assert sum(host.dynamic.kv) == pytest.approx(tail.memory.kv_bytes, abs=2 * REPORTED)
            assert host.static.n_bytes == pytest.approx(tail.memory.model_bytes, abs=2 * REPORTED)
            assert (host.static.padding > 0) == (padding(spec, k) > 0)


INSPECTED: dict[str, dict[str, Any]] = {
    "qwen3": {"allowed": [0, 1, 2, 3, 4, 5], "windows": [0] * 5},
    "phi3": {"allowed": [0, 1, 2, 3, 4, 5], "windows": [0] * 5},
    "olmo2-windows": {"allowed": list(range(9)), "windows": [16, 16, 16, 0] * 2},
    "cohere2": {"allowed": list(range(9)), "windows": [16, 16, 16, 0] * 2, "note": "n_gpu_layers = 7"},
    "smollm3": {"allowed": list(range(10)), "windows": [0] * 9, "note": "6 of the splits"},
    "gemma2": {"allowed": list(range(7)), "windows": [16, 0] * 3},
    "gemma4": {"allowed": list(range(7)), "windows": [16, 16, 0, 16, 16, 0], "note": "an empty layer"},
    "glm4": {"allowed": [0, 3], "windows": [0] * 3, "refused": "no hidden states"},
    "gpt-oss": {"allowed": list(range(7)), "windows": [16, 0] * 3},
}


@pytest.mark.parametrize("name", INSPECTED)
def test_inspect_tells_the_splits_the_windows_and_the_bytes(name: str, tiny: Callable[..., Path]) -> None:
    want, facts = INSPECTED[name], describe(str(tiny(name)), 512, "f16")
    assert facts["allowed_n_gpu_layers"] == want["allowed"]
    assert [layer["window"] for layer in facts["layers"]] == want["windows"]
    assert all(want.get("refused", "") in refusal["reason"] for refusal in facts["refused_n_gpu_layers"])
    assert bool(facts["refused_n_gpu_layers"]) == ("refused" in want)
    assert any(want["note"] in note for note in facts["notes"]) if "note" in want else not facts["notes"]
    weights = sum(layer["bytes"] for layer in facts["layers"]) + sum(t["bytes"] for t in facts["outside"])
    assert weights == facts["bytes"]


@pytest.mark.parametrize(
    ("model", "n_layers", "refused"),
    [
        (Tiny("gemma2"), 46, range(1, 46)),
        (Tiny("gemma2"), 47, range(1, 2)),
        (Tiny("gemma2"), 45, range(0)),
        (Tiny("exaone4"), 64, range(1, 64)),
        (Tiny("exaone4"), 65, range(1, 2)),
        (Tiny("exaone4"), 63, range(0)),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_what_llama_cpp_takes_from_the_depth_is_refused(
    model: Tiny, n_layers: int, refused: range, tmp_path: Path
) -> None:
    small = {"n_embd": 32, "n_heads": 2, "n_kv_heads": 1, "n_ff": 32}
    path = write_arch(tmp_path / "m.gguf", Tiny(model.architecture, n_layers, sizes=small))
    with ModelFile(path) as file:
        splits = find_splits(read_spec(file))
    assert [k for k in range(n_layers + 1) if k not in splits.allowed] == list(refused)
    assert all("number of layers" in (splits.refusal(k) or "") for k in refused)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Tiny("gemma4", 2, keys={"embedding_length_per_layer_input": 8}), "an embedding of the tokens"),
        (Tiny("gemma4", 2, keys={"attention.shared_kv_layers": 1}), "share the keys"),
        (Tiny("granite", 2, keys={"deepstack_mapping": [0, 1]}), "several depths"),
        (Tiny("qwen3", 2, keys={"expert_count": 4}), "mixture-of-experts"),
    ],
    ids=str,
)
def test_a_variant_the_head_does_not_know_runs_with_k_0_and_says_why(model: Tiny, reason: str, tmp_path: Path) -> None:
    pattern = {"attention.sliding_window_pattern": [True, False]} if model.architecture == "gemma4" else {}
    path = write_arch(tmp_path / "m.gguf", Tiny(model.architecture, 2, keys={**pattern, **model.keys}))
    with ModelFile(path) as file:
        splits = find_splits(read_spec(file))
    assert splits.allowed == (0,)
    assert reason in (splits.refusal(1) or "")
