"""read_spec: a file's metadata and tensor table, normalised into a ModelSpec as llama.cpp would compute it."""

from __future__ import annotations

import math

from hybrid.model.contents import check_kind, check_vocabulary
from hybrid.model.file import ModelFile
from hybrid.model.hparams import Hparams, f32
from hybrid.model.known import KNOWN
from hybrid.model.layers import read_layers, unknown_tensor
from hybrid.model.refused import REFUSED, REFUSED_KEYS
from hybrid.model.rope import factor_tensors, positive, scaling_type
from hybrid.model.spec import FfnSpec, LayerSpec, ModelSpec
from hybrid.model.tensors import TensorTable, check_tensors, outside_tensors, sort_tensors
from hybrid.model.traits import Architecture

EMBEDDING = "token_embd.weight"
MAX_LAYERS = 512
"""LLAMA_MAX_LAYERS; llama.cpp aborts beyond it."""
NORM_EPS = {"rms": "attention.layer_norm_rms_epsilon", "layer": "attention.layer_norm_epsilon"}


def read_spec(file: ModelFile) -> ModelSpec:
    """The ModelSpec of an open file.

    For an architecture the head can run, every tensor is checked: it exists, in the shape the hyperparameters demand.
    For any other, `ModelSpec.unsupported` says why, and the spec holds what `inspect`, the Ledger and a run with
    k = 0 need. Raises BadFileError where the file contradicts itself.
    """
    hparams = Hparams(file)
    check_kind(hparams)
    check_vocabulary(hparams)
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
        reason = REFUSED.get(name)
        if reason is not None:
            return f"architecture {name!r} cannot be split: {reason}"
        return f"architecture {name!r} cannot be split yet (those that can: {', '.join(KNOWN)})"
    if architecture.experts is None and hparams.integer("expert_count", 0) > 0:
        return f"mixture-of-experts layers of architecture {name!r} cannot be split"
    for key, reason in {**REFUSED_KEYS, **architecture.refused}.items():
        value = hparams.file.metadata.get(hparams.prefix + key)
        if value and (not isinstance(value, list) or any(value)):
            return reason
    if not hparams.flag("attention.causal", True):
        return "its attention is not causal"
    if architecture.windows is None or not architecture.windows.own_heads:
        for key in ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"):
            if hparams.has(key):
                return f"windowed layers with heads of their own ({hparams.prefix}{key}) cannot be split yet"
    extra = unknown_tensor(hparams, architecture, table)
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
    if EMBEDDING not in table.rest:
        hparams.fail(f"it lacks the tensor {EMBEDDING}")
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
    layers = read_layers(hparams, architecture, n_layers, n_embd, table)
    rotated = [layer.rope.n_dims for layer in layers if layer.rope is not None and layer.rope.factors]
    n_factors = max(rotated, default=layers[0].head_dim_k) // 2
    sizes = {"n_embd": n_embd, "n_vocab": n_vocab, "n_factors": n_factors}
    outside = outside_tensors(architecture, factor_tensors(architecture, scaling_type(hparams)))
    check_tensors(hparams.file, "", table.rest, sizes, outside)
    scaled = architecture.scales or architecture.logit_scale
    logit_scale = (hparams.number("logit_scale") if scaled else 0.0) or 1.0
    embedding_scale = f32(math.sqrt(n_embd)) if architecture.scaled_embedding else 1.0
    if architecture.scales:
        embedding_scale = hparams.number("embedding_scale", 0.0) or 1.0
    softcap = architecture.final_softcap
    return ModelSpec(
        architecture=architecture.name,
        n_layers=n_layers,
        n_embd=n_embd,
        n_vocab=n_vocab,
        n_ctx_train=hparams.integer("context_length", least=1),
        norm_eps=positive(hparams, NORM_EPS[architecture.norm]),
        layers=layers,
        weights=table.rest,
        norm=architecture.norm,
        embedding_scale=embedding_scale,
        logit_scale=f32(1.0 / logit_scale) if architecture.scales else logit_scale,
        logit_softcap=0.0 if softcap is None else hparams.number("final_logit_softcapping", softcap),
    )
