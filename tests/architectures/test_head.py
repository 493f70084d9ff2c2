"""The hidden state at the boundary is llama.cpp's for every architecture, on F32 files, at every k.

llama.cpp runs with a float32 KV cache and without flash attention; see `tests/head/test_boundary.py` for why, and for
what its GELU table does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybrid.head.device import Compute
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.tail.reference import Reference
from tests.architectures.models import MODELS, PLAIN, TESTED
from tests.head.heads import mean_kl, open_head, relative, run, some_tokens
from tests.tiny_arch import write_arch

N, N_CTX = 60, 256
TOLERANCE = 1e-4
GELU_TOLERANCE = 3e-4
"""llama.cpp takes GELU from a table by the 11 bits of a float16: where two float32 sums on either side of a rounding
differ in their last bit, so does the value, by 5e-4 of it. With AVX-512 this comes to 2.1e-4 in six layers."""
FAIR: dict[str, Any] = {"kv_dtype": "f32", "flash_attn": "off", "swa_full": True}


def llama_cpp(path: Path, n_ctx: int = N_CTX, chunk: int | None = None) -> tuple[list[np.ndarray], np.ndarray]:
    """Hidden states after every layer (of all tokens), and the logits."""
    with ModelFile(path) as file:
        n_layers = read_spec(file).n_layers
    taps = [f"l_out-{i}" for i in range(n_layers)]
    with Reference(path, n_ctx=n_ctx, taps=taps, **FAIR) as reference:
        logits = reference.evaluate(some_tokens(N), chunk=chunk)
        return [reference.hidden(i) for i in range(n_layers)], logits


@pytest.mark.parametrize("name", MODELS)
def test_the_boundary_is_llama_cpp_s_after_every_layer(name: str, tiny: Callable[..., Path]) -> None:
    path, tokens = tiny(name), some_tokens(N)
    hidden, logits = llama_cpp(path)
    tolerance = GELU_TOLERANCE if "gelu" in spec_of(path).layers[0].ffn.activation else TOLERANCE
    for k in range(1, len(hidden) + 1):
        head = open_head(path, k, n_ctx=N_CTX)
        got = head.forward(tokens, np.arange(N), np.full(N, 0))
        assert relative(got.numpy(), hidden[k - 1]) < tolerance, k
        if k == len(hidden):
            assert mean_kl(head.logits(got).numpy(), logits) < 1e-5
        head.close()


@pytest.mark.parametrize("name", MODELS)
def test_chunks_are_invisible(name: str, tiny: Callable[..., Path]) -> None:
    tokens = some_tokens(N)
    whole, pieces = open_head(tiny(name)), open_head(tiny(name), n_batch=32)
    want = whole.logits(whole.forward(tokens, np.arange(N), np.full(N, 0))).numpy()
    got = pieces.logits(torch.from_numpy(run(pieces, tokens, [32, 1, 20, 7]))).numpy()
    assert np.abs(got - want).max() <= 5e-3 * np.abs(want).max()
    whole.close()
    pieces.close()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("granite", {"residual_scale": 0.2}),
        ("granite", {"attention.scale": 0.2}),
        ("granite", {"embedding_scale": 11.0}),
        ("mistral3-long", {"attention.temperature_scale": None}),
        ("mistral3-long", {"rope.scaling.yarn_log_multiplier": None}),
        ("phi3-partial-rope", {"rope.dimension_count": 16}),
        ("phi3-long-context", {"rope.scaling.original_context_length": 300}),
        ("olmo2-windows", {"attention.sliding_window": 17}),
        ("gemma2", {"attn_logit_softcapping": 50.0}),
        ("gemma4", {"rope.dimension_count_swa": 8}),
        ("qwen3moe", {"expert_used_count": 3}),
    ],
    ids=str,
)
def test_the_tolerance_would_catch_a_wrong_figure(
    name: str, wrong: dict[str, Any], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """The same weights with another hyperparameter are many times further away than the tolerance."""
    hidden, _ = llama_cpp(tiny(name))
    other = write_arch(tmp_path / "wrong.gguf", replace(MODELS[name], keys={**MODELS[name].keys, **wrong}))
    head = open_head(other, n_ctx=N_CTX)
    assert relative(run(head, some_tokens(N)), hidden[-1]) > 10 * TOLERANCE
    head.close()


@pytest.mark.parametrize(("n_ctx", "n_sequences", "unified"), [(200, 1, False), (300, 1, False), (100, 3, True)])
def test_long_rope_chooses_its_factors_as_llama_cpp_does(
    n_ctx: int, n_sequences: int, unified: bool, tiny: Callable[..., Path]
) -> None:
    """It rounds the context up to 256, and a unified cache is one context: 256, 512 and 512 against an original 256."""
    path, tokens = tiny("phi3-short-context"), some_tokens(N)
    taps = ["l_out-3"]
    options: dict[str, Any] = {"n_ctx": n_ctx, "n_sequences": n_sequences, "kv_unified": unified}
    with Reference(path, taps=taps, **FAIR, **options) as reference:
        reference.evaluate(tokens)
        want = reference.hidden(3)
    head = open_head(path, n_batch=64, **options)
    assert relative(run(head, tokens), want) < TOLERANCE
    head.close()


@pytest.mark.parametrize("name", [name for name in PLAIN if "expert_count" in MODELS[name].keys])
@pytest.mark.parametrize("types", TESTED)
def test_experts_that_stay_quantised_compute_what_expanded_ones_do(name: str, types: str, tmp_path: Path) -> None:
    """As on a GPU: the matrices of the chosen experts are dequantised at the product."""
    how, tokens = TESTED[types], some_tokens(20)
    model = replace(MODELS[name], n_layers=2, sizes={**MODELS[name].sizes, **how.sizes}, keys=_two(MODELS[name].keys))
    path = write_arch(tmp_path / "m.gguf", model, how.kinds, expert_kind=how.expert_kind)
    expanded = open_head(path)
    kept = open_head(path, compute=Compute(torch.device("cpu"), torch.float32, expand=False, tile_values=1 << 14))
    assert kept.weight_bytes < 0.6 * expanded.weight_bytes
    assert relative(run(kept, tokens), run(expanded, tokens)) < 1e-5
    expanded.close()
    kept.close()


def _two(keys: dict[str, Any]) -> dict[str, Any]:
    """Metadata for the first two layers, one windowed and one not where there are both."""
    return {key: [True, False] if isinstance(value, list) else value for key, value in keys.items()}


def spec_of(path: Path) -> Any:
    with ModelFile(path) as file:
        return read_spec(file)
