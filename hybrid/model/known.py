"""The architectures the head can run, as data. A new one is a few lines here, not a class.

Every figure follows llama.cpp's `src/models/<name>.cpp`; what is common to all of them follows `src/llama-model.cpp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hybrid.model.spec import Activation, RopeStyle

Shapes = Mapping[str, tuple[str, ...]]
"""GGUF suffix -> row-major shape, in names that `hybrid.model.tensors` knows (`n_embd`, `n_q`, `n_ff`, ...)."""


@dataclass(frozen=True)
class Architecture:
    """What llama.cpp's code for one architecture says that its metadata does not."""

    name: str
    rope_style: RopeStyle
    activation: Activation
    tensors: Shapes
    """What every layer must have."""
    optional: Shapes = field(default_factory=dict)
    """What a layer may have; it is applied where it exists."""
    rope_factors: bool = False
    """`rope_freqs.weight`, where present, divides the rotary frequencies."""
    rotates_whole_head: bool = False
    """llama.cpp refuses a `rope.dimension_count` that is not the head dimension."""
    scaled_embedding: bool = False
    """Token embeddings are multiplied by sqrt(n_embd)."""
    window_pattern: int | None = None
    """Every n-th layer is global where the file does not say; None: no sliding windows at all."""
    final_softcap: bool = False
    """`final_logit_softcapping` is honoured."""
    n_layers_scaled_by_width: int | None = None
    """The model with so many layers scales attention by sqrt(n_embd / n_heads) instead of sqrt(head_dim)."""


ATTENTION: Shapes = {
    "attn_norm.weight": ("n_embd",),
    "attn_q.weight": ("n_q", "n_embd"),
    "attn_k.weight": ("n_k", "n_embd"),
    "attn_v.weight": ("n_v", "n_embd"),
    "attn_output.weight": ("n_embd", "n_q"),
}
QKV_BIASES: Shapes = {"attn_q.bias": ("n_q",), "attn_k.bias": ("n_k",), "attn_v.bias": ("n_v",)}
QK_NORMS: Shapes = {"attn_q_norm.weight": ("head_dim_k",), "attn_k_norm.weight": ("head_dim_k",)}
POST_NORMS: Shapes = {"post_attention_norm.weight": ("n_embd",), "post_ffw_norm.weight": ("n_embd",)}
GATED_FFN: Shapes = {
    "ffn_norm.weight": ("n_embd",),
    "ffn_gate.weight": ("n_ff", "n_embd"),
    "ffn_up.weight": ("n_ff", "n_embd"),
    "ffn_down.weight": ("n_embd", "n_ff"),
}
FFN_BIASES: Shapes = {"ffn_gate.bias": ("n_ff",), "ffn_up.bias": ("n_ff",), "ffn_down.bias": ("n_embd",)}

GLOBAL_TENSORS: Shapes = {"token_embd.weight": ("n_vocab", "n_embd"), "output_norm.weight": ("n_embd",)}
OPTIONAL_GLOBAL_TENSORS: Shapes = {"output.weight": ("n_vocab", "n_embd")}
ROPE_FACTORS = "rope_freqs.weight"

LLAMA = Architecture(
    name="llama",
    rope_style="norm",
    activation="silu",
    tensors={**ATTENTION, **GATED_FFN},
    optional={**QKV_BIASES, "attn_output.bias": ("n_embd",), **FFN_BIASES},
    rope_factors=True,
    rotates_whole_head=True,
)
GEMMA3 = Architecture(
    name="gemma3",
    rope_style="neox",
    activation="gelu",
    tensors={**ATTENTION, **QK_NORMS, **GATED_FFN, **POST_NORMS},
    optional=QKV_BIASES,
    scaled_embedding=True,
    window_pattern=6,
    final_softcap=True,
    n_layers_scaled_by_width=62,
)

KNOWN: Mapping[str, Architecture] = MappingProxyType({a.name: a for a in (LLAMA, GEMMA3)})
