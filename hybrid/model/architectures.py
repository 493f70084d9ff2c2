"""read_spec: a file's metadata and tensor table, normalised into a ModelSpec as llama.cpp would compute it."""

from __future__ import annotations

import math

from hybrid.model.file import ModelFile
from hybrid.model.hparams import Hparams, f32
from hybrid.model.known import GLOBAL_TENSORS, KNOWN, OPTIONAL_GLOBAL_TENSORS, ROPE_FACTORS, Architecture
from hybrid.model.rope import positive, read_rope, scaling_type, windowed_rope
from hybrid.model.spec import FfnSpec, LayerSpec, ModelSpec
from hybrid.model.tensors import TensorTable, check_tensors, sort_tensors, unknown_tensor

MAX_LAYERS = 512
"""LLAMA_MAX_LAYERS; llama.cpp aborts beyond it."""


def read_spec(file: ModelFile) -> ModelSpec:
    """The ModelSpec of an open file.

    For an architecture the head can run, every tensor is checked: it exists, in the shape the hyperparameters demand.
    For any other, `ModelSpec.unsupported` says why, and the spec holds what `inspect`, the Ledger and a run with
    k = 0 need. Raises BadFileError where the file contradicts itself.
    """
    hparams = Hparams(file)
    n_layers = hparams.integer("block_count", least=1)
    if n_layers > MAX_LAYERS:
        hparams.fail(f"it claims {n_layers} layers, but llama.cpp allows {MAX_LAYERS}")
    table = sort_tensors(file, n_layers)
    reason = _unsupported(hparams, table)
    if reason is not None:
        return _outline(hparams, n_layers, table, reason)
    return _full(hparams, n_layers, table, KNOWN[file.architecture])


def _unsupported(hparams: Hparams, table: TensorTable) -> str | None:
    """Why the head cannot run this model's layers; None where it can."""
    name = hparams.file.architecture
    architecture = KNOWN.get(name)
    if architecture is None:
        return f"architecture {name!r} cannot be split yet (those that can: {', '.join(KNOWN)})"
    if hparams.integer("expert_count", 0) > 0:
        return "mixture-of-experts layers cannot be split yet"
    if hparams.integer("nextn_predict_layers", 0) > 0:
        return "layers for multi-token prediction cannot be split"
    if not hparams.flag("attention.causal", True):
        return "its attention is not causal"
    if scaling_type(hparams) == "longrope":
        return "LongRoPE cannot be split yet"
    for key in ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"):
        if hparams.has(key):
            return f"windowed layers with heads of their own ({hparams.prefix}{key}) cannot be split yet"
    extra = unknown_tensor(table, architecture)
    if extra is not None:
        return f"its tensor {extra!r} is none that the GPU half knows"
    return None


def _n_vocab(hparams: Hparams, table: TensorTable) -> int:
    """The number of tokens in the vocabulary; without one, what the file says, or the rows of the embedding."""
    n = hparams.file.array_length("tokenizer.ggml.tokens")
    if n is not None:
        return n
    embedding = table.rest.get("token_embd.weight")
    return hparams.integer("vocab_size", embedding.shape[0] if embedding else 0)


def _outline(hparams: Hparams, n_layers: int, table: TensorTable, reason: str) -> ModelSpec:
    """What can be said of a model whose layers only llama.cpp can run."""
    n_embd = hparams.integer("embedding_length", 0)
    zeros = [0] * n_layers
    heads = hparams.per_layer("attention.head_count", n_layers, zeros)
    kv_heads = hparams.per_layer("attention.head_count_kv", n_layers, heads)
    n_ff = hparams.per_layer("feed_forward_length", n_layers, zeros)
    head_dim = n_embd // heads[0] if heads[0] else 0
    head_dim_k = hparams.integer("attention.key_length", head_dim)
    layers = tuple(
        LayerSpec(
            index=i,
            n_heads=heads[i],
            n_kv_heads=kv_heads[i],
            head_dim_k=head_dim_k,
            head_dim_v=hparams.integer("attention.value_length", head_dim),
            window=0,
            rope=None,
            ffn=FfnSpec("silu", n_ff[i], n_experts=hparams.integer("expert_count", 0)),
            attn_scale=head_dim_k**-0.5 if head_dim_k else 0.0,
            weights=table.layers[i],
        )
        for i in range(n_layers)
    )
    return ModelSpec(
        architecture=hparams.file.architecture,
        n_layers=n_layers,
        n_embd=n_embd,
        n_vocab=_n_vocab(hparams, table),
        n_ctx_train=hparams.integer("context_length", 0),
        norm_eps=0.0,
        layers=layers,
        weights=table.rest,
        unsupported=reason,
    )


def _full(hparams: Hparams, n_layers: int, table: TensorTable, architecture: Architecture) -> ModelSpec:
    """The spec of a model the head can run, with every tensor checked."""
    n_embd = hparams.integer("embedding_length", least=1)
    n_vocab = _n_vocab(hparams, table)
    n_heads = _same(hparams, "attention.head_count", n_layers)
    n_kv_heads = _same(hparams, "attention.head_count_kv", n_layers, n_heads)
    n_ff = _same(hparams, "feed_forward_length", n_layers)
    if n_heads % n_kv_heads:
        hparams.fail(f"its {n_heads} heads cannot share {n_kv_heads} key-value heads")
    head_dim = hparams.integer("attention.key_length", n_embd // n_heads, least=1)
    head_dim_v = hparams.integer("attention.value_length", n_embd // n_heads, least=1)
    if head_dim != head_dim_v:
        hparams.fail(f"its keys have {head_dim} and its values {head_dim_v} dimensions, which must be equal")

    factors = ROPE_FACTORS if architecture.rope_factors and ROPE_FACTORS in table.rest else None
    rope = read_rope(hparams, architecture.rope_style, head_dim, factors)
    if architecture.rotates_whole_head and rope.n_dims != head_dim:
        hparams.fail(f"it rotates {rope.n_dims} dimensions of a head, but its architecture rotates all {head_dim}")
    windows = _windows(hparams, n_layers, architecture)
    ropes = {0: rope} if not any(windows) else {0: rope, max(windows): windowed_rope(hparams, rope)}

    sizes = {
        "n_embd": n_embd,
        "n_vocab": n_vocab,
        "n_q": n_heads * head_dim,
        "n_k": n_kv_heads * head_dim,
        "n_v": n_kv_heads * head_dim,
        "head_dim_k": head_dim,
        "n_ff": n_ff,
        "n_factors": rope.n_dims // 2,
    }
    optional = {**OPTIONAL_GLOBAL_TENSORS, **({ROPE_FACTORS: ("n_factors",)} if factors else {})}
    check_tensors(hparams.file, "", table.rest, sizes, GLOBAL_TENSORS, optional)
    for i, tensors in enumerate(table.layers):
        check_tensors(hparams.file, f"blk.{i}.", tensors, sizes, architecture.tensors, architecture.optional)

    by_width = n_layers == architecture.n_layers_scaled_by_width
    attn_scale = f32(1.0 / f32(math.sqrt(n_embd // n_heads if by_width else head_dim)))
    layers = tuple(
        LayerSpec(
            index=i,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim_k=head_dim,
            head_dim_v=head_dim_v,
            window=windows[i],
            rope=ropes[windows[i]],
            ffn=FfnSpec(architecture.activation, n_ff),
            attn_scale=attn_scale,
            weights=table.layers[i],
        )
        for i in range(n_layers)
    )
    return ModelSpec(
        architecture=architecture.name,
        n_layers=n_layers,
        n_embd=n_embd,
        n_vocab=n_vocab,
        n_ctx_train=hparams.integer("context_length", least=1),
        norm_eps=positive(hparams, "attention.layer_norm_rms_epsilon"),
        layers=layers,
        weights=table.rest,
        embedding_scale=f32(math.sqrt(n_embd)) if architecture.scaled_embedding else 1.0,
        logit_softcap=hparams.number("final_logit_softcapping", 0.0) if architecture.final_softcap else 0.0,
    )


def _same(hparams: Hparams, key: str, n_layers: int, default: int | None = None) -> int:
    """A figure that may be an array but must be the same in every layer: llama.cpp takes the first layer's for all."""
    values = hparams.per_layer(key, n_layers, None if default is None else [default] * n_layers, least=1)
    if len(set(values)) > 1:
        hparams.fail(f"{hparams.prefix}{key} differs between layers, which llama.cpp does not support here")
    return values[0]


def _windows(hparams: Hparams, n_layers: int, architecture: Architecture) -> list[int]:
    """Each layer's sliding window, 0 where it attends globally (`load_swa_pattern`, `set_swa_pattern`)."""
    window = 0 if architecture.window_pattern is None else hparams.integer("attention.sliding_window", 0)
    if window == 0:
        return [0] * n_layers
    windowed = hparams.flags("attention.sliding_window_pattern")
    if windowed is None:
        n = hparams.integer("attention.sliding_window_pattern", architecture.window_pattern)
        windowed = [n == 0 or i % n < n - 1 for i in range(n_layers)]
    windowed = (windowed + [False] * n_layers)[:n_layers]
    if not any(windowed):
        hparams.fail(f"it has a sliding window of {window} tokens but no layer that uses it")
    return [window if flag else 0 for flag in windowed]
