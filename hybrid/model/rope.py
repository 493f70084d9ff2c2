"""Rotary embeddings as llama.cpp derives them (`load_hparams` in llama-model.cpp, then llama-context.cpp:114-214)."""

from __future__ import annotations

import math
from dataclasses import replace

from hybrid.model.hparams import Hparams, f32
from hybrid.model.spec import RopeSpec
from hybrid.model.tensors import TensorTable
from hybrid.model.traits import Architecture, Windows

SCALING_TYPES = ("none", "linear", "yarn", "longrope")


def read_rope(hparams: Hparams, architecture: Architecture, head_dim: int, table: TensorTable) -> RopeSpec:
    """The rotary embedding of global attention layers; windowed ones have `windowed_rope` of it."""
    kind = scaling_type(hparams)
    scale = 1.0 if kind == "none" else _trained_scale(hparams)
    n_dims = _n_dims(hparams, "rope.dimension_count", head_dim, head_dim)
    yarn = kind == "yarn"
    attn_factor = hparams.number("rope.scaling.attn_factor", 1.0)
    from_file = architecture.yarn_from_file
    log_multiplier = hparams.number("rope.scaling.yarn_log_multiplier", 0.0) if from_file else 0.0
    n_ctx_orig = hparams.integer("rope.scaling.original_context_length", hparams.integer("context_length"))
    query_scale = hparams.number("attention.temperature_scale", 0.0) if architecture.query_temperature else 0.0
    if query_scale and not n_ctx_orig:
        hparams.fail("it scales queries by a context length that it does not give")
    factors, factors_long = _factors(architecture, kind, table)
    return RopeSpec(
        style=architecture.rope_style,
        n_dims=n_dims,
        freq_base=positive(hparams, "rope.freq_base", 10000.0),
        freq_scale=scale,
        ext_factor=1.0 if yarn else 0.0,
        attn_factor=f32(attn_factor * _yarn_attn_factor(scale, log_multiplier)) if yarn else attn_factor,
        beta_fast=hparams.number("rope.scaling.yarn_beta_fast", 32.0) if from_file else 32.0,
        beta_slow=hparams.number("rope.scaling.yarn_beta_slow", 1.0) if from_file else 1.0,
        n_ctx_orig=n_ctx_orig,
        factors=factors,
        factors_long=factors_long,
        query_scale=query_scale,
    )


def windowed_rope(hparams: Hparams, rope: RopeSpec, windows: Windows, head_dim: int) -> RopeSpec:
    """The rotary embedding of windowed layers with heads of `head_dim`, given that of global ones."""
    base = windows.rope_base or rope.freq_base
    if windows.rope_base_from_file:
        base = positive(hparams, "rope.freq_base_swa", base)
    rope = replace(rope, freq_base=base, freq_scale=1.0)
    if windows.rope_scaling == "same":
        rope = replace(rope, freq_scale=_trained_scale(hparams))  # also where the type is "none" (llama-context.cpp)
    if windows.rope_scaling == "plain":
        rope = replace(rope, ext_factor=0.0, attn_factor=1.0)
    if windows.own_heads:
        n_dims = _n_dims(hparams, "rope.dimension_count_swa", rope.n_dims, head_dim)
        rope = replace(rope, n_dims=n_dims, factors=None)
    return rope


def _n_dims(hparams: Hparams, key: str, default: int, head_dim: int) -> int:
    n_dims = hparams.integer(key, default)
    if n_dims % 2 or not 0 < n_dims <= head_dim:
        hparams.fail(f"it rotates {n_dims} of {head_dim} dimensions of a head")
    return n_dims


def _trained_scale(hparams: Hparams) -> float:
    factor = hparams.number("rope.scaling.factor", 0.0)
    if not hparams.has("rope.scaling.factor"):
        factor = hparams.number("rope.scale_linear", 0.0)  # the key of old files
    scale = 1.0 if factor == 0.0 else f32(1.0 / factor)
    if not 0 < scale < math.inf:
        hparams.fail(f"its rope scaling factor is {factor}")
    return scale


def _factors(architecture: Architecture, kind: str, table: TensorTable) -> tuple[str | None, str | None]:
    """The tensors that divide the frequencies: in an ordinary and in a long context (`get_rope_factors`)."""
    names = factor_tensors(architecture, kind)
    found = [name if name in table.rest else None for name in names]
    return (None, None) if not found else (found[0], found[-1] if len(found) > 1 else None)


def scaling_type(hparams: Hparams) -> str:
    """`rope.scaling.type`, one of SCALING_TYPES; llama.cpp aborts on any other."""
    kind = hparams.text("rope.scaling.type", "linear")
    if kind not in SCALING_TYPES:
        hparams.fail(f"its rope scaling type {kind[:40]!r} is not one of {', '.join(SCALING_TYPES)}")
    return kind


def positive(hparams: Hparams, key: str, default: float | None = None) -> float:
    """A number greater than zero; `default` as in `Hparams.number`."""
    value = hparams.number(key, default)
    if value <= 0:
        hparams.fail(f"{hparams.prefix}{key} is {value}")
    return value


def factor_tensors(architecture: Architecture, kind: str) -> tuple[str, ...]:
    """Names of the tensors that may divide frequencies: `rope_freqs.weight`, or LongRoPE's short and long ones."""
    if architecture.long_factors == "always" or (architecture.long_factors == "longrope" and kind == "longrope"):
        return ("rope_factors_short.weight", "rope_factors_long.weight")
    return ("rope_freqs.weight",) if architecture.rope_factors else ()


def _yarn_attn_factor(freq_scale: float, log_multiplier: float) -> float:
    """What llama.cpp passes so that YaRN's magnitude, which ggml applies inside rope too, is not applied twice."""
    factor = 1.0 / freq_scale

    def magnitude(multiplier: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * multiplier * math.log(factor) + 1.0

    wanted = magnitude(1.0) / magnitude(log_multiplier) if log_multiplier else magnitude(1.0)
    return wanted / (1.0 + 0.1 * math.log(factor))
