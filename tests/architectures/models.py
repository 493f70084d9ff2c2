"""One tiny model for each way an architecture can be: what the tests of this room run over."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gguf import GGMLQuantizationType as T

from tests.tiny_arch import Tiny

BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}
LONG = ("rope_factors_short.weight", "rope_factors_long.weight")
MOE = {"expert_count": 6, "expert_used_count": 2}
MOE_SIZES = {"n_experts": 6, "n_ff": 64}
GEMMA4 = {
    "attention.sliding_window_pattern": [True, True, False, True, True, False],
    "embedding_length_per_layer_input": 0,
    "rope.dimension_count_swa": 16,
    "rope.dimension_count": 32,
    "rope.freq_base": 1e6,
    "final_logit_softcapping": 30.0,
}
GEMMA4_SIZES = {"head_dim": 32, "n_kv_heads": 1}
GEMMA4_WINDOWED = {"head_dim": 16, "n_kv_heads": 2}

MODELS: dict[str, Tiny] = {
    "llama": Tiny("llama", 4, outside=("rope_freqs.weight",)),
    "llama-longrope": Tiny(
        "llama", 3, outside=LONG, keys={"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 200}
    ),
    "gemma3": Tiny("gemma3", 7),
    "qwen2": Tiny("qwen2", optional=BIASES),
    "qwen2-untied-bias": Tiny("qwen2", 3, optional=BIASES, outside=("output.weight", "output.bias")),
    "qwen3": Tiny("qwen3", sizes={"head_dim": 32}),
    "granite": Tiny(
        "granite",
        keys={"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.1, "logit_scale": 6.0},
    ),
    "granite-without-rope": Tiny("granite", 3, keys={"rope.scaling.finetuned": False}),
    "mistral3": Tiny("mistral3", sizes={"head_dim": 32}),
    "mistral3-long": Tiny(
        "mistral3",
        keys={
            **YARN,
            "attention.temperature_scale": 0.1,
            "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.yarn_beta_slow": 2.0,
            "rope.scaling.yarn_log_multiplier": 1.0,
        },
    ),
    "seed_oss": Tiny("seed_oss", optional=BIASES),
    "starcoder2": Tiny("starcoder2", optional=BIASES),
    "phi3": Tiny("phi3", fused_qkv=True),
    "phi3-partial-rope": Tiny("phi3", 3, keys={"rope.dimension_count": 12}, fused_qkv=True, outside=("output.weight",)),
    "phi3-short-context": Tiny(
        "phi3", 4, outside=LONG, keys={"rope.scaling.original_context_length": 256, "rope.scaling.attn_factor": 1.2}
    ),
    "phi3-long-context": Tiny(
        "phi3", 4, outside=LONG, keys={"rope.scaling.original_context_length": 200, "rope.scaling.attn_factor": 1.2}
    ),
    "olmo2": Tiny("olmo2", keys={"attention.sliding_window": None}),
    "olmo2-windows": Tiny("olmo2", 8, keys={**YARN, "rope.scaling.attn_factor": 1.1}),
    "exaone4": Tiny("exaone4", outside=("rope_freqs.weight",)),
    "smollm3": Tiny("smollm3", 9),
    "cohere2": Tiny("cohere2", 8),
    "gemma2": Tiny("gemma2", 6, keys={"attn_logit_softcapping": 5.0}),
    "gemma4": Tiny(
        "gemma4",
        6,
        keys=GEMMA4,
        sizes=GEMMA4_SIZES,
        windowed_sizes=GEMMA4_WINDOWED,
        optional=("attn_v.weight", "layer_output_scale.weight"),
        outside=("rope_freqs.weight",),
        drop={2: ("attn_v.weight",), 5: ("attn_v.weight",)},
    ),
    "glm4": Tiny("glm4", 3, keys={"rope.dimension_count": 8}, optional=BIASES),
    "llama-experts": Tiny("llama", keys=MOE, sizes=MOE_SIZES, seed=7),
    "mistral3-experts": Tiny("mistral3", 4, keys=MOE, sizes=MOE_SIZES, seed=7),
    "qwen3moe": Tiny("qwen3moe", keys=MOE, sizes=MOE_SIZES, seed=11),
    "granitemoe": Tiny(
        "granitemoe", keys={**MOE, "embedding_scale": 12.0, "residual_scale": 0.22}, sizes=MOE_SIZES, seed=26
    ),
    "granitemoe-shared": Tiny(
        "granitemoe",
        4,
        keys={**MOE, "expert_shared_feed_forward_length": 32},
        sizes={**MOE_SIZES, "n_ff_shared": 32},
        seed=24,
    ),
    "gpt-oss": Tiny("gpt-oss", 6, keys={**MOE, **YARN}, sizes=MOE_SIZES, optional=BIASES, seed=12),
    "gemma4-experts": Tiny(
        "gemma4",
        6,
        keys={**GEMMA4, **MOE},
        sizes={**GEMMA4_SIZES, **MOE_SIZES, "n_ff_shared": 96},
        windowed_sizes=GEMMA4_WINDOWED,
        optional=("attn_v.weight", "ffn_gate_up_exps.weight", "ffn_down_exps.scale"),
        outside=("rope_freqs.weight",),
        seed=50,
    ),
}
"""Name -> model. Seeds of models with experts are such that no token of the tests is close to being sent to another
expert: there llama.cpp alone changes its logits by 30 % when it is given other chunks."""

PLAIN = list(
    {(tiny.architecture, "expert_count" in tiny.keys): name for name, tiny in reversed(MODELS.items())}.values()
)
"""One name for each architecture, with experts and without."""

ALL_GLOBAL: dict[str, Tiny] = {
    name: replace(MODELS[like], n_layers=5, keys={**MODELS[like].keys, "attention.sliding_window_pattern": pattern})
    for name, like, pattern in (
        ("olmo2", "olmo2-windows", [True, True, False, False, False]),
        ("gemma2", "gemma2", [False, True, False, False, False]),
        ("gpt-oss", "gpt-oss", [True, False, True, False, False]),
        ("cohere2", "cohere2", [True, True, True, False, False]),
    )
}
"""Models whose late layers all attend globally."""


@dataclass(frozen=True)
class Types:
    """A way of quantising a tiny model: matrix types, cycled, and the width their blocks need."""

    kinds: list[T]
    sizes: dict[str, int] = field(default_factory=dict)
    expert_kind: T | None = None

    @property
    def names(self) -> list[str]:
        """Every type in it."""
        return [kind.name for kind in [*self.kinds, *([self.expert_kind] if self.expert_kind else [])]]


TESTED: dict[str, Types] = {
    "blocks of 32": Types([T.Q8_0, T.Q4_0, T.Q5_1, T.F16, T.IQ4_NL], expert_kind=T.MXFP4),
    "blocks of 256": Types([T.Q4_K, T.Q6_K, T.Q5_K, T.IQ4_XS, T.Q3_K], {"n_embd": 256, "n_heads": 16, "n_ff": 256}),
}
"""What tails are tested with besides F32."""
