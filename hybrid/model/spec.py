"""ModelSpec: a model's hyperparameters, normalised so that nothing downstream asks for an architecture's name.

Values follow what llama.cpp computes from the same metadata (`src/llama-model.cpp`, `src/models/*.cpp`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hybrid.model.file import TensorInfo

RopeStyle = Literal["norm", "neox"]
Activation = Literal["silu", "gelu", "swiglu_oai"]
NormKind = Literal["rms", "layer"]
Routing = Literal["softmax", "softmax_of_chosen"]
"""Weights of the chosen experts: their share of a softmax over all, made to sum to 1; or a softmax over them."""


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of one layer, in ggml's terms (`ggml_rope_ext`)."""

    style: RopeStyle
    """`norm` rotates neighbouring pairs (2i, 2i+1); `neox` rotates (i, i + n_dims/2)."""
    n_dims: int
    freq_base: float
    freq_scale: float
    """1 / linear scaling factor."""
    ext_factor: float = 0.0
    """YaRN's mix of extrapolation; 0 is plain or linearly scaled RoPE."""
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    n_ctx_orig: int = 0
    factors: str | None = None
    """Name of a tensor [n_dims / 2] whose values divide the frequencies (Llama 3's `rope_freqs.weight`)."""
    factors_long: str | None = None
    """LongRoPE: the tensor that takes its place in a context longer than `n_ctx_orig`."""
    query_scale: float = 0.0
    """Queries at position p are multiplied by 1 + query_scale * ln(1 + floor(p / n_ctx_orig)); 0: they are not."""


@dataclass(frozen=True)
class FfnSpec:
    """Feed-forward part of one layer. With experts, `n_ff` is the width of one."""

    activation: Activation
    n_ff: int
    gated: bool = True
    fused: bool = False
    """`ffn_up.weight` holds gate and up, [2 * n_ff, n_embd]."""
    n_experts: int = 0
    n_experts_used: int = 0
    routing: Routing = "softmax"
    expert_scale: float = 1.0
    """Factor of the chosen experts' weights."""
    n_ff_shared: int = 0
    """Width of the part that every token uses, beside the experts."""


@dataclass(frozen=True)
class LayerSpec:
    """One transformer block. `weights` maps GGUF suffixes (`attn_q.weight`, `ffn_down.bias`, …) to tensors;
    optional parts (biases, QK norms, post norms) exist exactly if their tensor does."""

    index: int
    n_heads: int
    n_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int
    """Sliding window in tokens (a token sees itself and the window - 1 before it); 0 means global attention."""
    rope: RopeSpec | None
    ffn: FfnSpec
    attn_scale: float
    weights: Mapping[str, TensorInfo]
    attn_softcap: float = 0.0
    residual_scale: float = 1.0
    norm: NormKind = "rms"
    parallel: bool = False
    """Attention and the feed-forward part read the same normalised input."""
    normalised_values: bool = False
    """V is divided by its root mean square, head by head."""

    @property
    def n_embd_k(self) -> int:
        """Values in one token's K row: n_kv_heads * head_dim_k."""
        return self.n_kv_heads * self.head_dim_k

    @property
    def n_embd_v(self) -> int:
        """Values in one token's V row."""
        return self.n_kv_heads * self.head_dim_v

    @property
    def weight_bytes(self) -> int:
        """Bytes of this layer's tensors as stored in the file."""
        return sum(t.n_bytes for t in self.weights.values())


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only model."""

    architecture: str
    n_layers: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    weights: Mapping[str, TensorInfo]
    """Tensors outside the blocks: `token_embd.weight`, `output_norm.weight`, `output.weight` where untied, …"""
    norm: NormKind = "rms"
    embedding_scale: float = 1.0
    """What llama.cpp multiplies token embeddings by before layer 0 (√n_embd for gemma)."""
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    unsupported: str | None = None
    """Why the head cannot run these layers, so that only k = 0 works; None where it can. Where it is set, a LayerSpec
    says truly what it weighs and how many heads of which size it has, as far as the file says; the rest is neutral."""

    @property
    def tied_output(self) -> bool:
        """Whether the output head is the token embedding."""
        return "output.weight" not in self.weights

    @property
    def output_tensor(self) -> TensorInfo:
        """The output head's matrix, [n_vocab, n_embd]."""
        return self.weights["token_embd.weight" if self.tied_output else "output.weight"]
