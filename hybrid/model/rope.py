"""Rotary embeddings as llama.cpp derives them (`load_hparams` in llama-model.cpp, then llama-context.cpp:114-214)."""

from __future__ import annotations

import math
from dataclasses import replace

from hybrid.model.hparams import Hparams, f32
from hybrid.model.spec import RopeSpec, RopeStyle

SCALING_TYPES = ("none", "linear", "yarn", "longrope")


def read_rope(hparams: Hparams, style: RopeStyle, head_dim: int, factors: str | None) -> RopeSpec:
    """The rotary embedding of global attention layers; windowed ones have `windowed_rope` of it."""
    kind = scaling_type(hparams)
    factor = hparams.number("rope.scaling.factor", 0.0)
    if not hparams.has("rope.scaling.factor"):
        factor = hparams.number("rope.scale_linear", 0.0)  # the key of old files
    scale = 1.0 if factor == 0.0 or kind == "none" else f32(1.0 / factor)
    if not 0 < scale < math.inf:
        hparams.fail(f"its rope scaling factor is {factor}")
    n_dims = hparams.integer("rope.dimension_count", head_dim)
    if n_dims % 2 or not 0 < n_dims <= head_dim:
        hparams.fail(f"it rotates {n_dims} of {head_dim} dimensions of a head")
    yarn = kind == "yarn"
    attn_factor = hparams.number("rope.scaling.attn_factor", 1.0)
    return RopeSpec(
        style=style,
        n_dims=n_dims,
        freq_base=positive(hparams, "rope.freq_base", 10000.0),
        freq_scale=scale,
        ext_factor=1.0 if yarn else 0.0,
        attn_factor=f32(attn_factor * _yarn_attn_factor(scale)) if yarn else attn_factor,
        n_ctx_orig=hparams.integer("rope.scaling.original_context_length", hparams.integer("context_length")),
        factors=factors,
    )


def windowed_rope(hparams: Hparams, rope: RopeSpec) -> RopeSpec:
    """The rotary embedding of windowed layers: its own base and no scaling (`rope_freq_base_train_swa`)."""
    return replace(rope, freq_base=positive(hparams, "rope.freq_base_swa", 10000.0), freq_scale=1.0)


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


def _yarn_attn_factor(freq_scale: float) -> float:
    """What llama.cpp passes so that YaRN's magnitude, which ggml applies inside rope too, is not applied twice."""
    factor = 1.0 / freq_scale
    magnitude = 1.0 if factor <= 1.0 else 0.1 * math.log(factor) + 1.0
    return magnitude / (1.0 + 0.1 * math.log(factor))
