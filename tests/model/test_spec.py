"""read_spec computes from a file's metadata what llama.cpp computes from it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from hybrid.errors import BadFileError
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.model.spec import ModelSpec
from hybrid.tail.llama import lib
from tests.doctored import SMALL, rewritten
from tests.tiny import write_tiny


def spec_of(path: Path) -> ModelSpec:
    with ModelFile(path) as file:
        return read_spec(file)


def tiny_spec(tmp_path: Path, architecture: str = "llama", **options: Any) -> ModelSpec:
    return spec_of(write_tiny(tmp_path / "m.gguf", architecture, **{**SMALL, **options}))


def test_a_llama_is_read_layer_by_layer(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, n_layers=3, tied=False, rope_freqs=True, biases=True)
    assert spec.unsupported is None
    assert (spec.architecture, spec.n_layers, spec.n_embd, spec.n_ctx_train) == ("llama", 3, 64, 512)
    assert not spec.tied_output
    assert spec.output_tensor.shape == (spec.n_vocab, 64)
    assert (spec.embedding_scale, spec.logit_softcap) == (1.0, 0.0)
    for i, layer in enumerate(spec.layers):
        assert (layer.index, layer.n_heads, layer.n_kv_heads, layer.head_dim_k, layer.head_dim_v) == (i, 4, 2, 16, 16)
        assert (layer.window, layer.attn_scale, layer.ffn.n_ff, layer.ffn.activation) == (0, 0.25, 96, "silu")
        assert layer.weights["attn_k.weight"].shape == (32, 64)
        assert layer.weights["attn_k.bias"].name == f"blk.{i}.attn_k.bias"
        assert layer.weight_bytes == sum(t.n_bytes for t in layer.weights.values())
        rope = layer.rope
        assert rope is not None
        assert (rope.style, rope.n_dims, rope.freq_base, rope.freq_scale, rope.ext_factor) == ("norm", 16, 1e4, 1, 0)
        assert rope.factors == "rope_freqs.weight"


def test_head_sizes_default_to_the_width_divided_by_the_heads(tmp_path: Path) -> None:
    keys = ("attention.key_length", "attention.value_length", "rope.dimension_count", "attention.head_count_kv")
    layer = spec_of(rewritten(tmp_path, without=tuple(f"llama.{k}" for k in keys[:3]))).layers[0]
    assert (layer.head_dim_k, layer.head_dim_v, layer.rope and layer.rope.n_dims) == (16, 16, 16)
    with pytest.raises(BadFileError, match=r"attn_k\.weight in shape"):  # four kv heads now, so K would be wider
        spec_of(rewritten(tmp_path, without=tuple(f"llama.{k}" for k in keys)))


def test_figures_given_per_layer_are_read_and_must_agree(tmp_path: Path) -> None:
    same = {"llama.attention.head_count": [4] * 6, "llama.feed_forward_length": [96] * 6}
    assert tiny_spec(tmp_path, metadata=same).layers[5].ffn.n_ff == 96
    with pytest.raises(BadFileError, match="differs between layers"):
        tiny_spec(tmp_path, metadata={"llama.attention.head_count": [4] * 5 + [2]})
    with pytest.raises(BadFileError, match="has 5 values for 6 layers"):
        tiny_spec(tmp_path, metadata={"llama.attention.head_count": [4] * 5})


@pytest.mark.parametrize(
    ("metadata", "freq_scale", "ext_factor", "attn_factor"),
    [
        ({"scaling.factor": 4.0}, 0.25, 0.0, 1.0),
        ({"scaling.type": "linear", "scaling.factor": 2.0}, 0.5, 0.0, 1.0),
        ({"scale_linear": 8.0}, 0.125, 0.0, 1.0),
        ({"scaling.factor": 4.0, "scale_linear": 8.0}, 0.25, 0.0, 1.0),
        ({"scaling.type": "none", "scaling.factor": 4.0}, 1.0, 0.0, 1.0),
        ({"scaling.factor": 0.0}, 1.0, 0.0, 1.0),
        ({"scaling.type": "yarn", "scaling.factor": 4.0}, 0.25, 1.0, 1.0),
        ({"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.attn_factor": 0.5}, 0.25, 1.0, 0.5),
        ({"scaling.type": "yarn", "scaling.factor": 0.5}, 2.0, 1.0, 1 / (1 + 0.1 * math.log(0.5))),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_rope_scaling_is_what_llama_cpp_passes_to_ggml(
    tmp_path: Path, metadata: dict[str, Any], freq_scale: float, ext_factor: float, attn_factor: float
) -> None:
    keys = {f"llama.rope.{key}": value for key, value in metadata.items()}
    rope = tiny_spec(tmp_path, n_layers=1, metadata=keys).layers[0].rope
    assert rope is not None
    assert (rope.freq_scale, rope.ext_factor) == (freq_scale, ext_factor)
    assert rope.attn_factor == pytest.approx(attn_factor, rel=1e-6)
    assert (rope.beta_fast, rope.beta_slow, rope.n_ctx_orig) == (32.0, 1.0, 512)


def test_yarn_knows_the_context_it_was_stretched_from(tmp_path: Path) -> None:
    keys = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    keys |= {"llama.rope.scaling.original_context_length": 128}
    rope = tiny_spec(tmp_path, n_layers=1, metadata=keys).layers[0].rope
    assert rope is not None
    assert rope.n_ctx_orig == 128


def test_gemma3_alternates_windows_with_a_rope_of_their_own(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, "gemma3", n_layers=8, metadata={"gemma3.rope.scaling.factor": 8.0})
    assert [layer.window for layer in spec.layers] == [16, 16, 16, 16, 16, 0, 16, 16]
    windowed, glob = spec.layers[0].rope, spec.layers[5].rope
    assert windowed is not None
    assert glob is not None
    assert (windowed.freq_base, windowed.freq_scale) == (10000.0, 1.0)
    assert (glob.freq_base, glob.freq_scale, glob.style) == (1000000.0, 0.125, "neox")
    assert spec.embedding_scale == 8.0
    assert spec.layers[0].ffn.activation == "gelu"


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [
        ([True, False, False, True], [16, 0, 0, 16]),
        ([True], [16, 0, 0, 0]),
        (2, [16, 0, 16, 0]),
        (0, [16, 16, 16, 16]),
    ],
    ids=str,
)
def test_the_window_pattern_may_be_an_array_or_a_number(tmp_path: Path, pattern: Any, windows: list[int]) -> None:
    keys = {"gemma3.attention.sliding_window_pattern": pattern, "gemma3.rope.freq_base_swa": 5000.0}
    spec = tiny_spec(tmp_path, "gemma3", n_layers=4, metadata=keys)
    assert [layer.window for layer in spec.layers] == windows
    assert spec.layers[0].rope is not None
    assert spec.layers[0].rope.freq_base == 5000.0


def test_gemma3_without_windows_is_global_throughout(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, "gemma3", window=0)
    assert {layer.window for layer in spec.layers} == {0}
    assert {layer.rope.freq_base for layer in spec.layers if layer.rope} == {1000000.0}


def test_a_window_that_no_layer_uses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match="no layer that uses it"):  # llama.cpp aborts on it
        tiny_spec(tmp_path, "gemma3", metadata={"gemma3.attention.sliding_window_pattern": 1})


def test_gemma3_scales_attention_by_width_only_with_62_layers(tmp_path: Path) -> None:
    sizes = {"n_embd": 128, "n_heads": 4, "head_dim": 16, "n_ff": 32}
    for n_layers, scale in ((61, 16**-0.5), (62, 32**-0.5)):
        spec = tiny_spec(tmp_path, "gemma3", n_layers=n_layers, **sizes)
        assert spec.layers[0].attn_scale == pytest.approx(scale, rel=1e-7)


def test_gemma3_may_cap_its_logits(tmp_path: Path) -> None:
    key = "final_logit_softcapping"
    assert tiny_spec(tmp_path, "gemma3", metadata={f"gemma3.{key}": 30.0}).logit_softcap == 30.0
    assert tiny_spec(tmp_path, "llama", metadata={f"llama.{key}": 30.0}).logit_softcap == 0.0  # as llama.cpp has it


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    for name in ("token_embd.weight", "output_norm.weight", "blk.1.ffn_up.weight"):
        with pytest.raises(BadFileError, match=f"lacks the tensor {name}"):
            spec_of(rewritten(tmp_path, drop=name))


def test_a_misshapen_tensor_is_named(tmp_path: Path) -> None:
    path = rewritten(tmp_path, keys={"llama.attention.head_count_kv": 4})
    with pytest.raises(BadFileError, match=r"blk\.0\.attn_k\.weight in shape \[32, 64\].*demand \[64, 64\]"):
        spec_of(path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"llama.block_count": 0}, "block_count is 0"),
        ({"llama.block_count": 600}, "600 layers"),
        ({"llama.block_count": "two"}, "not a whole number"),
        ({"llama.block_count": 3}, r"lacks the tensor blk\.2\."),
        ({"llama.attention.head_count": 0}, "head_count is 0"),
        ({"llama.attention.head_count_kv": 3}, "cannot share"),
        ({"llama.attention.value_length": 8}, "must be equal"),
        ({"llama.rope.dimension_count": 8}, "rotates 8 dimensions"),
        ({"llama.rope.freq_base": -1.0}, "freq_base is -1"),
        ({"llama.rope.freq_base": math.inf}, "not a number"),
        ({"llama.rope.scaling.type": "magic"}, "scaling type 'magic'"),
        ({"llama.rope.scaling.factor": -2.0}, "scaling factor"),
        ({"llama.rope.scaling.factor": 1e-44}, "scaling factor"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "epsilon is 0.0"),
    ],
    ids=str,
)
def test_hyperparameters_that_make_no_sense_are_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(BadFileError, match=message):
        spec_of(rewritten(tmp_path, keys=keys))


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "context_length", "feed_forward_length"])
def test_a_missing_hyperparameter_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(BadFileError, match=f"does not give llama.{key}"):
        spec_of(rewritten(tmp_path, without=(f"llama.{key}",)))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"as_architecture": "quux"}, "architecture 'quux'"),
        ({"architecture": "gemma3", "keys": {"gemma3.expert_count": 8}}, "mixture-of-experts"),
        ({"as_architecture": "gemma3n"}, "an embedding of the tokens"),
        ({"add": {"blk.0.attn_q.scale": (1,)}}, "attn_q.scale"),
        ({"add": {"rope_factors_long.weight": (8,)}}, "rope_factors_long"),
        ({"keys": {"llama.nextn_predict_layers": 1}}, "multi-token"),
        ({"keys": {"llama.expert_group_count": 4}}, "groups"),
        ({"keys": {"llama.attention.causal": False}}, "not causal"),
        ({"architecture": "gemma3", "keys": {"gemma3.attention.key_length_swa": 8}}, "key_length_swa"),
    ],
    ids=str,
)
def test_what_the_head_cannot_run_says_why_and_still_tells_what_it_weighs(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    spec = spec_of(rewritten(tmp_path, **options))
    assert spec.unsupported is not None
    assert reason in spec.unsupported
    assert (spec.n_layers, spec.n_embd, spec.n_ctx_train) == (2, 64, 512)
    assert [layer.n_embd_k for layer in spec.layers] == [32, 32]
    assert spec.layers[1].weights["ffn_up.weight"].name == "blk.1.ffn_up.weight"
    assert spec.output_tensor.name == "token_embd.weight"


@pytest.mark.parametrize(
    ("architecture", "metadata"),
    [
        ("llama", {"llama.rope.scaling.factor": 4.0}),
        ("llama", {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 3.0}),
        ("gemma3", {}),
        ("gemma3", {"gemma3.attention.head_count_kv": [2] * 6, "gemma3.rope.scaling.factor": 8.0}),
    ],
    ids=str,
)
def test_llama_cpp_reads_the_same_figures_from_tiny_models(
    tmp_path: Path, architecture: str, metadata: dict[str, Any]
) -> None:
    assert_llama_cpp_agrees(write_tiny(tmp_path / "m.gguf", architecture, **SMALL, metadata=metadata))


@pytest.mark.real
def test_llama_cpp_reads_the_same_figures_from_real_models(real_model: Path) -> None:
    assert_llama_cpp_agrees(real_model)


def assert_llama_cpp_agrees(path: Path) -> None:
    spec = spec_of(path)
    lib().llama_backend_init()
    params = lib().llama_model_default_params()
    params.n_gpu_layers = 0
    model = lib().llama_model_load_from_file(str(path).encode(), params)
    assert model
    try:
        first = spec.layers[0]
        glob = next(layer for layer in spec.layers if layer.window == 0)
        assert first.rope is not None
        assert glob.rope is not None
        assert spec.n_layers == lib().llama_model_n_layer(model)
        assert spec.n_embd == lib().llama_model_n_embd(model)
        assert spec.n_ctx_train == lib().llama_model_n_ctx_train(model)
        assert first.n_heads == lib().llama_model_n_head(model)
        assert first.n_kv_heads == lib().llama_model_n_head_kv(model)
        assert max(layer.window for layer in spec.layers) == lib().llama_model_n_swa(model)
        assert spec.n_vocab == lib().llama_vocab_n_tokens(lib().llama_model_get_vocab(model))
        assert glob.rope.freq_scale == lib().llama_model_rope_freq_scale_train(model)
        styles = {lib().LLAMA_ROPE_TYPE_NORM: "norm", lib().LLAMA_ROPE_TYPE_NEOX: "neox"}
        assert first.rope.style == styles[lib().llama_model_rope_type(model)]
        n_params = sum(t.n_values for layer in spec.layers for t in layer.weights.values())
        assert n_params + sum(t.n_values for t in spec.weights.values()) == lib().llama_model_n_params(model)
    finally:
        lib().llama_model_free(model)
