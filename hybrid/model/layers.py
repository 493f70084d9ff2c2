"""read_layers: the LayerSpecs of a model the head can run, as llama.cpp would compute them from the same metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from hybrid.model.hparams import Hparams, f32
from hybrid.model.records import TensorInfo
from hybrid.model.rope import factor_tensors, read_rope, scaling_type, windowed_rope
from hybrid.model.spec import FfnSpec, LayerSpec, RopeSpec
from hybrid.model.tensors import (
    SHARED,
    TensorTable,
    Wanted,
    check_tensors,
    has_experts,
    layer_tensors,
    outside_tensors,
)
from hybrid.model.traits import Architecture, Experts


def read_layers(
    hparams: Hparams, architecture: Architecture, n_layers: int, n_embd: int, table: TensorTable
) -> tuple[LayerSpec, ...]:
    """Every layer, its tensors checked. Raises BadFileError where the file contradicts itself."""
    per_layer = hparams.per_layer if architecture.varies else partial(_same, hparams)
    heads = per_layer("attention.head_count", n_layers, least=1)
    kv_heads = per_layer("attention.head_count_kv", n_layers, heads, least=1)
    windows = _windows(hparams, n_layers, architecture)
    head_dims = _head_dims(hparams, architecture, n_embd // heads[0])
    ropes = _ropes(hparams, architecture, head_dims, table, any(windows))
    ffns = _feed_forwards(hparams, architecture, n_layers, table)
    softcap = 0.0
    if architecture.attention_softcap is not None:
        softcap = hparams.number("attn_logit_softcapping", architecture.attention_softcap)
    layers = []
    for i, ffn in enumerate(ffns):
        if heads[i] % kv_heads[i]:
            hparams.fail(f"its {heads[i]} heads cannot share {kv_heads[i]} key-value heads")
        head_dim = head_dims[bool(windows[i])]
        rope = ropes[bool(windows[i])]
        if architecture.no_rope_every and (i + 1) % architecture.no_rope_every == 0:
            rope = None
        layer = LayerSpec(
            index=i,
            n_heads=heads[i],
            n_kv_heads=kv_heads[i],
            head_dim_k=head_dim,
            head_dim_v=head_dim,
            window=windows[i],
            rope=rope,
            ffn=ffn,
            attn_scale=_attention_scale(hparams, architecture, n_layers, n_embd // heads[i], head_dim),
            weights=_renamed(architecture, table.layers[i], ffn),
            attn_softcap=softcap,
            residual_scale=(hparams.number("residual_scale", 0.0) or 1.0) if architecture.scales else 1.0,
            norm=architecture.norm,
            parallel=architecture.parallel,
            normalised_values=architecture.normalised_values,
        )
        check_tensors(
            hparams.file, f"blk.{i}.", table.layers[i], _sizes(layer, n_embd), _wanted(hparams, architecture, table, i)
        )
        layers.append(layer)
    return tuple(layers)


def unknown_tensor(hparams: Hparams, architecture: Architecture, table: TensorTable) -> str | None:
    """The name of a tensor that the architecture's description does not list, or None."""
    outside = outside_tensors(architecture, factor_tensors(architecture, scaling_type(hparams)))
    extra = outside.unknown(table.rest)
    for i, tensors in enumerate(table.layers):
        if extra is not None:
            break
        unknown = _wanted(hparams, architecture, table, i).unknown(tensors)
        extra = None if unknown is None else f"blk.{i}.{unknown}"
    return extra


def _wanted(hparams: Hparams, architecture: Architecture, table: TensorTable, i: int) -> Wanted:
    shared = hparams.integer("expert_shared_feed_forward_length", 0)
    return layer_tensors(architecture, table.layers[i], hparams.integer("expert_count", 0), shared)


def _same(hparams: Hparams, key: str, n_layers: int, default: list[int] | None = None, *, least: int = 0) -> list[int]:
    """A figure that may be an array but must be the same in every layer: llama.cpp takes the first layer's for all."""
    values = hparams.per_layer(key, n_layers, default, least=least)
    if len(set(values)) > 1:
        hparams.fail(f"{hparams.prefix}{key} differs between layers, which llama.cpp does not support here")
    return values


def _windows(hparams: Hparams, n_layers: int, architecture: Architecture) -> list[int]:
    """Each layer's sliding window, 0 where it attends globally (`load_swa_pattern`, `set_swa_pattern`)."""
    kind = architecture.windows
    if kind is None or kind.only_with_layers not in (None, n_layers):
        return [0] * n_layers
    window = hparams.integer("attention.sliding_window", kind.default)
    if window == 0:
        return [0] * n_layers
    windowed = hparams.flags("attention.sliding_window_pattern")
    if windowed is None:
        n = hparams.integer("attention.sliding_window_pattern", kind.pattern)
        windowed = [n == 0 or i % n < n - 1 for i in range(n_layers)]
    windowed = (windowed + [False] * n_layers)[:n_layers]
    if not any(windowed):
        hparams.fail(f"it has a sliding window of {window} tokens but no layer that uses it")
    return [window if flag else 0 for flag in windowed]


def _head_dims(hparams: Hparams, architecture: Architecture, default: int) -> dict[bool, int]:
    """Head dimension of global (False) and windowed (True) layers."""
    dims: dict[bool, int] = {}
    for windowed, suffix in ((False, ""), (True, "_swa")):
        if windowed and not (architecture.windows is not None and architecture.windows.own_heads):
            dims[windowed] = dims[False]
            continue
        key, value = (
            hparams.integer(f"attention.{kind}_length{suffix}", default, least=1) for kind in ("key", "value")
        )
        if key != value:
            hparams.fail(f"its keys have {key} and its values {value} dimensions, which must be equal")
        dims[windowed] = default = key
    return dims


def _ropes(
    hparams: Hparams, architecture: Architecture, head_dims: Mapping[bool, int], table: TensorTable, windowed: bool
) -> dict[bool, RopeSpec | None]:
    """The rotary embedding of global (False) and windowed (True) layers."""
    rope = read_rope(hparams, architecture, head_dims[False], table)
    if architecture.rotates_whole_head and rope.n_dims != head_dims[False]:
        hparams.fail(
            f"it rotates {rope.n_dims} dimensions of a head, but its architecture rotates all {head_dims[False]}"
        )
    if architecture.rope_switch and not hparams.flag("rope.scaling.finetuned", True):
        return {False: None, True: None}
    if architecture.windows is None or not windowed:
        return {False: rope, True: None}
    return {
        False: rope if architecture.windows.global_rope else None,
        True: windowed_rope(hparams, rope, architecture.windows, head_dims[True]),
    }


def _feed_forwards(hparams: Hparams, architecture: Architecture, n_layers: int, table: TensorTable) -> list[FfnSpec]:
    """The feed-forward part of every layer."""
    n_experts, n_used = hparams.integer("expert_count", 0), 0
    if n_experts or architecture.feed_forward is None:
        n_used = hparams.integer("expert_used_count", least=1)
        if n_used > n_experts:
            hparams.fail(f"each token uses {n_used} of {n_experts} experts")
    dense = None
    if architecture.feed_forward is not None:
        read = hparams.per_layer if architecture.varies else partial(_same, hparams)
        dense = read("feed_forward_length", n_layers, least=1)
    ffns = []
    for i, tensors in enumerate(table.layers):
        experts = architecture.experts if has_experts(architecture, tensors, n_experts) else None
        if experts is None:
            assert dense is not None  # has_experts is true where there is no dense part
            fused = "ffn_gate.weight" not in (architecture.feed_forward or {}) and architecture.gated
            ffns.append(FfnSpec(architecture.activation, dense[i], gated=architecture.gated, fused=fused))
            continue
        shared = 0
        if experts.beside_dense is not None:
            assert dense is not None
            shared = dense[i]
        elif experts.shared:
            shared = hparams.integer("expert_shared_feed_forward_length", 0)
        ffns.append(
            FfnSpec(
                architecture.activation,
                _expert_length(hparams, experts, n_layers, n_used),
                n_experts=n_experts,
                n_experts_used=n_used,
                routing=experts.routing,
                n_ff_shared=shared,
            )
        )
    return ffns


def _expert_length(hparams: Hparams, experts: Experts, n_layers: int, n_used: int) -> int:
    """Width of one expert; old files give that of all a token uses (`qwen3moe.cpp`)."""
    if hparams.has(experts.length_key):
        return _same(hparams, experts.length_key, n_layers, least=1)[0]
    return hparams.integer("feed_forward_length", least=n_used) // n_used


def _attention_scale(hparams: Hparams, architecture: Architecture, n_layers: int, width: int, head_dim: int) -> float:
    """What scores are multiplied by; `width` is n_embd / n_heads."""
    if architecture.attention_scale == "one":
        return 1.0
    scale = hparams.number("attention.scale", 0.0) if architecture.attention_scale == "file" else 0.0
    depth = architecture.depth
    by_width = depth is not None and depth.attention_scaled_by_width and n_layers == depth.n_layers
    return scale or f32(1.0 / f32(math.sqrt(width if by_width else head_dim)))


def _renamed(architecture: Architecture, tensors: Mapping[str, TensorInfo], ffn: FfnSpec) -> dict[str, TensorInfo]:
    """A layer's tensors under the names of what they do."""
    names = dict(architecture.renamed)
    if ffn.n_experts and ffn.n_ff_shared:
        names |= SHARED
    return {names.get(suffix, suffix): tensor for suffix, tensor in tensors.items()}


def _sizes(layer: LayerSpec, n_embd: int) -> dict[str, int]:
    """Values of the names that shapes are written in."""
    n_q, ffn = layer.n_heads * layer.head_dim_k, layer.ffn
    return {
        "one": 1,
        "n_embd": n_embd,
        "n_heads": layer.n_heads,
        "head_dim": layer.head_dim_k,
        "n_q": n_q,
        "n_k": layer.n_embd_k,
        "n_v": layer.n_embd_v,
        "n_qkv": n_q + layer.n_embd_k + layer.n_embd_v,
        "n_ff": ffn.n_ff,
        "n_ff_twice": 2 * ffn.n_ff,
        "n_ff_shared": ffn.n_ff_shared,
        "n_experts": ffn.n_experts,
    }
