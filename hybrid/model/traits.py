"""What llama.cpp's code for one architecture says that a file's metadata does not: the vocabulary of `known.py`.

No field names an architecture. The decoder, the slice and the split rules each read the fields that concern them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hybrid.model.spec import Activation, NormKind, RopeStyle, Routing

Shapes = Mapping[str, tuple[str, ...]]
"""GGUF suffix -> row-major shape, in names that `hybrid.model.sizes` knows (`n_embd`, `n_q`, `n_ff`, ...)."""


@dataclass(frozen=True)
class Windows:
    """Layers with a sliding window, and how they differ from global ones."""

    pattern: int | None
    """Every n-th layer is global where the file does not say which are; None: the file must say it as an array."""
    default: int | None = 0
    """Tokens of the window where the file does not say; 0: no windows then; None: it must say."""
    rope_base: float | None = None
    """Rotary base of windowed layers where the file gives no `rope.freq_base_swa`; None: that of global layers."""
    rope_base_from_file: bool = True
    """`rope.freq_base_swa` is honoured."""
    rope_scaling: Literal["same", "unscaled", "plain"] = "same"
    """Windowed layers scale frequencies as global ones do, not at all, or drop YaRN altogether."""
    own_heads: bool = False
    """Windowed layers have head sizes and rotary dimensions of their own (`attention.key_length_swa`, ...)."""
    global_rope: bool = True
    """Global layers rotate too. Where there are no windows at all, every layer rotates."""
    only_with_layers: int | None = None
    """Only models of so many layers have windows."""
    without: Literal["unset", "widen", "pad"] = "unset"
    """How llama.cpp is told of a tail whose layers are all global: no window; one wider than any context that every
    layer has; or not at all, so that the tail needs an empty windowed layer."""


@dataclass(frozen=True)
class Experts:
    """A feed-forward part of which each token uses a few experts."""

    tensors: Shapes
    length_key: str = "expert_feed_forward_length"
    """Metadata key with the width of one expert."""
    routing: Routing = "softmax"
    merged_gate_up: bool = False
    """`ffn_gate_up_exps.weight` may stand for gate and up."""
    shared: bool = False
    """With `expert_shared_feed_forward_length` there is an expert that every token uses."""
    beside_dense: Shapes | None = None
    """A dense part runs beside the experts; these are the tensors the two have beyond their own."""
    optional: Shapes = field(default_factory=dict)


@dataclass(frozen=True)
class DepthRule:
    """llama.cpp recognises one model of the family by its number of layers, and computes otherwise there."""

    n_layers: int
    what: str
    """What it takes from the number of layers."""
    attention_scaled_by_width: bool = False
    """Attention is scaled by sqrt(n_embd / n_heads) there instead of sqrt(head_dim)."""
    folds: bool = False
    """The slice can make up for it by folding the ratio into `attn_q_norm`, to rounding."""


@dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture` that the head can run."""

    name: str
    models: str
    """What people know it by."""
    rope_style: RopeStyle
    attention: Shapes
    """What every layer must have besides its feed-forward part. Q, K and V may always be one `attn_qkv.weight`."""
    feed_forward: Shapes | None
    """A layer without experts; None: there is none."""
    experts: Experts | None = None
    optional: Shapes = field(default_factory=dict)
    """What a layer may have; it is applied where it exists."""
    activation: Activation = "silu"
    gated: bool = True
    norm: NormKind = "rms"
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Tensors whose name says something else here: `post_attention_norm.weight` that normalises the feed-forward
    part's input. The spec has them under the name of what they do."""
    parallel: bool = False
    """Attention and the feed-forward part read the same normalised input."""
    normalised_values: bool = False
    """V is divided by its root mean square, head by head."""
    output: Literal["optional", "tied", "own"] = "optional"
    """Whether the output head may, must not or must have a matrix of its own."""
    output_bias: bool = False
    output_norm_bias: bool = False

    varies: bool = False
    """Heads and feed-forward widths may differ between layers."""
    rotates_whole_head: bool = True
    """llama.cpp refuses a `rope.dimension_count` that is not the head dimension."""
    rope_factors: bool = False
    """`rope_freqs.weight`, where present, divides the rotary frequencies (of global layers)."""
    long_factors: Literal["never", "longrope", "always"] = "never"
    """`rope_factors_long/short.weight` divide them instead: only with `rope.scaling.type` longrope, or always."""
    yarn_from_file: bool = False
    """YaRN's beta_fast, beta_slow and log multiplier are honoured."""
    rope_switch: bool = False
    """`rope.scaling.finetuned` = false means no rotary embedding at all."""
    no_rope_every: int | None = None
    """Every n-th layer, by index, has no rotary embedding."""
    query_temperature: bool = False
    """`attention.temperature_scale` lengthens queries far into the context."""
    windows: Windows | None = None

    attention_scale: Literal["head", "file", "one"] = "head"
    """1 / sqrt(head_dim); `attention.scale` where the file has it; or 1."""
    attention_softcap: float | None = None
    """Default of `attn_logit_softcapping`; None: not honoured."""
    final_softcap: float | None = None
    """Default of `final_logit_softcapping`; None: not honoured."""
    scaled_embedding: bool = False
    """Token embeddings are multiplied by sqrt(n_embd)."""
    scales: bool = False
    """`embedding_scale`, `residual_scale` and (as a divisor) `logit_scale` are honoured."""
    logit_scale: bool = False
    """`logit_scale` is honoured as a factor."""

    scales_given_embeddings: bool = False
    """llama.cpp multiplies by sqrt(n_embd) what it is given as hidden states, too."""
    least_tail: int = 1
    """llama.cpp aborts on fewer layers."""
    depth: DepthRule | None = None
    loads_tied_embedding_twice: bool = False
    """llama.cpp asks for the output matrix before the embedding it is tied to, and then keeps a copy of each."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Metadata keys that llama.cpp honours and the head does not: they must be missing or zero, and why."""
    no_slice: str | None = None
    """Why llama.cpp cannot take over from any layer of it."""
