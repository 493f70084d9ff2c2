"""The architectures the head can run, as data. A new one is a few lines here, not a class.

Every figure follows llama.cpp's `src/models/<name>.cpp`; what is common to all of them follows `src/llama-model.cpp`.
The vocabulary is `hybrid/model/traits.py`. Each is tested against llama.cpp (`tests/architectures`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hybrid.model.traits import Architecture, DepthRule, Experts, Shapes, Windows

ATTENTION: Shapes = {
    "attn_q.weight": ("n_q", "n_embd"),
    "attn_k.weight": ("n_k", "n_embd"),
    "attn_v.weight": ("n_v", "n_embd"),
    "attn_output.weight": ("n_embd", "n_q"),
}
NORMED_ATTENTION: Shapes = {"attn_norm.weight": ("n_embd",), **ATTENTION}
QKV_BIASES: Shapes = {"attn_q.bias": ("n_q",), "attn_k.bias": ("n_k",), "attn_v.bias": ("n_v",)}
OUTPUT_BIAS: Shapes = {"attn_output.bias": ("n_embd",)}
QK_NORMS: Shapes = {"attn_q_norm.weight": ("head_dim",), "attn_k_norm.weight": ("head_dim",)}
WIDE_QK_NORMS: Shapes = {"attn_q_norm.weight": ("n_q",), "attn_k_norm.weight": ("n_k",)}
POST_NORMS: Shapes = {"post_attention_norm.weight": ("n_embd",), "post_ffw_norm.weight": ("n_embd",)}

FFN_NORM: Shapes = {"ffn_norm.weight": ("n_embd",)}
SEPARATE_FFN: Shapes = {
    "ffn_gate.weight": ("n_ff", "n_embd"),
    "ffn_up.weight": ("n_ff", "n_embd"),
    "ffn_down.weight": ("n_embd", "n_ff"),
}
GATED_FFN: Shapes = {**FFN_NORM, **SEPARATE_FFN}
FUSED_FFN: Shapes = {**FFN_NORM, "ffn_up.weight": ("n_ff_twice", "n_embd"), "ffn_down.weight": ("n_embd", "n_ff")}
FFN_BIASES: Shapes = {"ffn_gate.bias": ("n_ff",), "ffn_up.bias": ("n_ff",), "ffn_down.bias": ("n_embd",)}

EXPERTS: Shapes = {
    "ffn_gate_inp.weight": ("n_experts", "n_embd"),
    "ffn_gate_exps.weight": ("n_experts", "n_ff", "n_embd"),
    "ffn_up_exps.weight": ("n_experts", "n_ff", "n_embd"),
    "ffn_down_exps.weight": ("n_experts", "n_embd", "n_ff"),
}
EXPERT_BIASES: Shapes = {
    "ffn_gate_inp.bias": ("n_experts",),
    "ffn_gate_exps.bias": ("n_experts", "n_ff"),
    "ffn_up_exps.bias": ("n_experts", "n_ff"),
    "ffn_down_exps.bias": ("n_experts", "n_embd"),
}

FFN_AFTER_POST_NORM = {"post_attention_norm.weight": "ffn_norm.weight"}
POST_NORM_AS_FFN_NORM: Shapes = {"post_attention_norm.weight": ("n_embd",)}

LLAMA = Architecture(
    name="llama",
    models="Llama 1 to 3, Mistral 7B, Mixtral, SmolLM, SmolLM2, TinyLlama, Yi and many more",
    rope_style="norm",
    attention=NORMED_ATTENTION,
    feed_forward=GATED_FFN,
    experts=Experts({**FFN_NORM, **EXPERTS}, length_key="feed_forward_length"),
    optional={**QKV_BIASES, **OUTPUT_BIAS, **FFN_BIASES},
    rope_factors=True,
    long_factors="longrope",
)
MISTRAL3 = Architecture(
    name="mistral3",
    models="Ministral 3, Mistral 3",
    rope_style="norm",
    attention=NORMED_ATTENTION,
    feed_forward=GATED_FFN,
    experts=Experts({**FFN_NORM, **EXPERTS}, length_key="feed_forward_length"),
    optional={**QKV_BIASES, **OUTPUT_BIAS, **FFN_BIASES},
    rope_factors=True,
    long_factors="longrope",
    yarn_from_file=True,
    query_temperature=True,
)
GRANITE = Architecture(
    name="granite",
    models="Granite 3, dense Granite 4",
    rope_style="norm",
    attention=NORMED_ATTENTION,
    feed_forward=GATED_FFN,
    optional={**QKV_BIASES, **OUTPUT_BIAS, **FFN_BIASES},
    rope_factors=True,
    long_factors="longrope",
    rope_switch=True,
    attention_scale="file",
    scales=True,
    refused={"deepstack_mapping": "its layers take images in at several depths"},
)
GRANITE_MOE = Architecture(
    name="granitemoe",
    models="Granite 3 MoE",
    rope_style="norm",
    attention=NORMED_ATTENTION,
    feed_forward=GATED_FFN,
    experts=Experts({**FFN_NORM, **EXPERTS}, length_key="feed_forward_length", shared=True),
    optional={**QKV_BIASES, **OUTPUT_BIAS, **FFN_BIASES},
    rope_factors=True,
    long_factors="longrope",
    attention_scale="file",
    scales=True,
)
QWEN2 = Architecture(
    name="qwen2",
    models="Qwen 1.5 to 2.5, QwQ, DeepSeek-R1-Distill-Qwen",
    rope_style="neox",
    attention=NORMED_ATTENTION,
    feed_forward=GATED_FFN,
    optional=QKV_BIASES,
    output_bias=True,
)
QWEN3 = Architecture(
    name="qwen3",
    models="Qwen 3",
    rope_style="neox",
    attention={**NORMED_ATTENTION, **QK_NORMS},
    feed_forward=GATED_FFN,
    optional=QKV_BIASES,
)
QWEN3_MOE = Architecture(
    name="qwen3moe",
    models="Qwen 3 MoE: 30B-A3B, 235B-A22B, Coder",
    rope_style="neox",
    attention={**NORMED_ATTENTION, **QK_NORMS},
    feed_forward=None,
    experts=Experts({**FFN_NORM, **EXPERTS}),
    optional=QKV_BIASES,
)
SEED_OSS = Architecture(
    name="seed_oss",
    models="Seed-OSS 36B",
    rope_style="neox",
    attention=NORMED_ATTENTION,
    feed_forward={**POST_NORM_AS_FFN_NORM, **SEPARATE_FFN},
    optional=QKV_BIASES,
    renamed=FFN_AFTER_POST_NORM,
)
SMOLLM3 = Architecture(
    name="smollm3",
    models="SmolLM3",
    rope_style="norm",
    attention=NORMED_ATTENTION,
    feed_forward=GATED_FFN,
    optional=QKV_BIASES,
    no_rope_every=4,
)
STARCODER2 = Architecture(
    name="starcoder2",
    models="StarCoder2",
    rope_style="neox",
    attention={**NORMED_ATTENTION, "attn_norm.bias": ("n_embd",), **OUTPUT_BIAS},
    feed_forward={
        **FFN_NORM,
        "ffn_norm.bias": ("n_embd",),
        **{name: shape for name, shape in {**SEPARATE_FFN, **FFN_BIASES}.items() if "gate" not in name},
    },
    optional=QKV_BIASES,
    activation="gelu",
    gated=False,
    norm="layer",
    output_norm_bias=True,
)
PHI3 = Architecture(
    name="phi3",
    models="Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    rope_style="neox",
    attention=NORMED_ATTENTION,
    feed_forward=FUSED_FFN,
    optional=QKV_BIASES,
    rotates_whole_head=False,
    long_factors="always",
)
OLMO2 = Architecture(
    name="olmo2",
    models="OLMo 2, OLMo 3",
    rope_style="neox",
    attention={**ATTENTION, **WIDE_QK_NORMS, **POST_NORMS},
    feed_forward=SEPARATE_FFN,
    optional=QKV_BIASES,
    output="own",
    windows=Windows(pattern=4, rope_scaling="plain", rope_base_from_file=False),
)
EXAONE4 = Architecture(
    name="exaone4",
    models="EXAONE 4",
    rope_style="neox",
    attention={**ATTENTION, **QK_NORMS, **POST_NORMS},
    feed_forward=SEPARATE_FFN,
    optional=QKV_BIASES,
    rope_factors=True,
    windows=Windows(pattern=4, default=4096, rope_base_from_file=False, global_rope=False, only_with_layers=64),
    depth=DepthRule(64, "whether it has sliding windows"),
)
COHERE2 = Architecture(
    name="cohere2",
    models="Command R7B, Command A",
    rope_style="norm",
    attention=NORMED_ATTENTION,
    feed_forward=SEPARATE_FFN,
    optional=QKV_BIASES,
    norm="layer",
    parallel=True,
    output="tied",
    rotates_whole_head=False,
    windows=Windows(pattern=4, default=None, rope_base_from_file=False, global_rope=False, without="pad"),
    logit_scale=True,
)
GEMMA2 = Architecture(
    name="gemma2",
    models="Gemma 2",
    rope_style="neox",
    attention={**NORMED_ATTENTION, **POST_NORMS},
    feed_forward=GATED_FFN,
    optional=QKV_BIASES,
    activation="gelu",
    output="tied",
    rotates_whole_head=False,
    windows=Windows(pattern=2, default=4096, without="widen"),
    attention_softcap=50.0,
    final_softcap=30.0,
    scaled_embedding=True,
    scales_given_embeddings=True,
    depth=DepthRule(46, "the scale of its attention", attention_scaled_by_width=True),
)
GEMMA3 = Architecture(
    name="gemma3",
    models="Gemma 3",
    rope_style="neox",
    attention={**NORMED_ATTENTION, **QK_NORMS, **POST_NORMS},
    feed_forward=GATED_FFN,
    optional=QKV_BIASES,
    activation="gelu",
    rotates_whole_head=False,
    windows=Windows(pattern=6, rope_base=10000.0, rope_scaling="unscaled"),
    final_softcap=0.0,
    scaled_embedding=True,
    depth=DepthRule(62, "the scale of its attention", attention_scaled_by_width=True, folds=True),
)
GEMMA4 = Architecture(
    name="gemma4",
    models="Gemma 4 31B and 26B-A4B",
    rope_style="neox",
    attention={
        **{name: shape for name, shape in NORMED_ATTENTION.items() if name != "attn_v.weight"},
        **QK_NORMS,
        **POST_NORMS,
    },
    feed_forward=GATED_FFN,
    experts=Experts(
        EXPERTS,
        merged_gate_up=True,
        beside_dense={
            "ffn_gate_inp.scale": ("n_embd",),
            "pre_ffw_norm_2.weight": ("n_embd",),
            "post_ffw_norm_1.weight": ("n_embd",),
            "post_ffw_norm_2.weight": ("n_embd",),
        },
        optional={"ffn_down_exps.scale": ("n_experts",)},
    ),
    optional={"attn_v.weight": ("n_v", "n_embd"), "layer_output_scale.weight": ("one",)},
    activation="gelu",
    normalised_values=True,
    varies=True,
    rotates_whole_head=False,
    rope_factors=True,
    windows=Windows(pattern=None, default=None, rope_base=10000.0, rope_scaling="unscaled", own_heads=True,
                    without="pad"),
    attention_scale="one",
    final_softcap=0.0,
    scaled_embedding=True,
    least_tail=2,
    loads_tied_embedding_twice=True,
    refused={
        "embedding_length_per_layer_input": "every layer reads an embedding of the tokens, which the CPU half has not",
        "attention.shared_kv_layers": "its last layers share the keys and values of earlier ones",
    },
)  # fmt: skip
GLM4 = Architecture(
    name="glm4",
    models="GLM-4 0414",
    rope_style="norm",
    attention={**NORMED_ATTENTION, **POST_NORMS},
    feed_forward=FUSED_FFN,
    optional=QKV_BIASES,
    rotates_whole_head=False,
    refused={"rope.dimension_sections": "its rotary positions have several parts (M-RoPE)"},
    no_slice="llama.cpp takes no hidden states for this architecture",
)
GPT_OSS = Architecture(
    name="gpt-oss",
    models="gpt-oss 20B and 120B",
    rope_style="neox",
    attention={**NORMED_ATTENTION, **OUTPUT_BIAS, "attn_sinks.weight": ("n_heads",)},
    feed_forward=None,
    experts=Experts({**POST_NORM_AS_FFN_NORM, **EXPERTS, **EXPERT_BIASES}, routing="softmax_of_chosen"),
    optional=QKV_BIASES,
    activation="swiglu_oai",
    renamed=FFN_AFTER_POST_NORM,
    output="own",
    windows=Windows(pattern=2, default=None, without="widen"),
)

KNOWN: Mapping[str, Architecture] = MappingProxyType(
    {
        a.name: a
        for a in (
            LLAMA, MISTRAL3, GRANITE, GRANITE_MOE, QWEN2, QWEN3, QWEN3_MOE, SEED_OSS, SMOLLM3, STARCODER2, PHI3, OLMO2,
            EXAONE4, COHERE2, GEMMA2, GEMMA3, GEMMA4, GLM4, GPT_OSS,
        )
    }
)  # fmt: skip
