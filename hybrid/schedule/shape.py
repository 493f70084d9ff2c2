"""A ModelSpec without a file: `--shape layers=32,kv_heads=8,head_dim=128` plans a model that is not on this machine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from hybrid.errors import BadRequestError
from hybrid.model.ggml_types import GGML_TYPES
from hybrid.model.records import TensorInfo
from hybrid.model.spec import FfnSpec, LayerSpec, ModelSpec, RopeSpec

F32 = 0
TYPES = {info.name: kind for kind, info in GGML_TYPES.items()}
LAYER = {
    "attn_norm.weight": ("n_embd",),
    "attn_q.weight": ("n_q", "n_embd"),
    "attn_k.weight": ("n_kv", "n_embd"),
    "attn_v.weight": ("n_kv", "n_embd"),
    "attn_output.weight": ("n_embd", "n_q"),
    "ffn_norm.weight": ("n_embd",),
    "ffn_gate.weight": ("n_ff", "n_embd"),
    "ffn_up.weight": ("n_ff", "n_embd"),
    "ffn_down.weight": ("n_embd", "n_ff"),
}
OUTSIDE = {
    "token_embd.weight": ("n_vocab", "n_embd"),
    "output_norm.weight": ("n_embd",),
    "output.weight": ("n_vocab", "n_embd"),
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The figures that decide a decoder-only model's bytes. With the defaults, a Llama-3-8B in Q4_K."""

    layers: int = 32
    heads: int = 0
    """Query heads; 0: four for every KV head."""
    kv_heads: int = 8
    head_dim: int = 128
    embd: int = 0
    """Width of the residual stream; 0: heads * head_dim."""
    ff: int = 0
    """Width of the feed-forward part; 0: 3.5 * embd."""
    vocab: int = 128256
    ctx: int = 131072
    """Tokens it was trained for."""
    window: int = 0
    """Sliding window of the layers that have one; 0: none."""
    pattern: int = 6
    """With a window, every so-many-th layer is global."""
    tied: int = 0
    """1: the output head is the token embedding."""
    quant: str = "Q4_K"
    """Type of the matrices."""
    head_quant: str = ""
    """Type of the output head and the token embedding; empty: as `quant`."""


FIELDS = {field.name: field.type for field in dataclasses.fields(Shape)}

MOST_LAYERS = 512
"""As many as llama.cpp takes (LLAMA_MAX_LAYERS)."""


def parse_shape(text: str) -> Shape:
    """`layers=32,kv_heads=8,…` as a Shape. Raises BadRequestError that names what is wrong and what there is."""
    values: dict[str, int | str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if key not in FIELDS or not equals:
            raise BadRequestError(f"--shape takes NAME=VALUE pairs of {', '.join(FIELDS)}; {part!r} is none.")
        if FIELDS[key] == "str":
            values[key] = value.upper()
        elif value.isascii() and value.isdecimal() and len(value) < 11:
            values[key] = int(value)
        else:
            raise BadRequestError(f"{key} in --shape must be a whole number, not {value!r}.")
    return _checked(Shape(**values))  # type: ignore[arg-type]


def _checked(shape: Shape) -> Shape:
    _limited(shape, "layers", "kv_heads", "head_dim", "vocab", "ctx", "pattern")
    heads = shape.heads or 4 * shape.kv_heads
    embd = shape.embd or heads * shape.head_dim
    shape = dataclasses.replace(
        shape, heads=heads, embd=embd, ff=shape.ff or 7 * embd // 2, head_quant=shape.head_quant or shape.quant
    )
    _limited(shape, "heads", "embd", "ff")
    if shape.heads % shape.kv_heads:
        raise BadRequestError(f"In --shape, {shape.heads} heads cannot share {shape.kv_heads} KV heads.")
    for quant in (shape.quant, shape.head_quant):
        if quant not in TYPES:
            raise BadRequestError(f"{quant!r} in --shape is no GGUF tensor type; Q4_K, Q8_0 and F16 are.")
    return shape


def _limited(shape: Shape, *keys: str) -> None:
    for key in keys:
        most = MOST_LAYERS if key == "layers" else 2**31 - 1
        if not 0 < getattr(shape, key) <= most:
            raise BadRequestError(f"{key} in --shape must be a number between 1 and {most}.")


def shape_spec(shape: Shape) -> ModelSpec:
    """The model such a shape describes: every tensor it would have, nowhere on a disk."""
    sizes = {
        "n_embd": shape.embd,
        "n_vocab": shape.vocab,
        "n_q": shape.heads * shape.head_dim,
        "n_kv": shape.kv_heads * shape.head_dim,
        "n_ff": shape.ff,
    }
    rope = RopeSpec("norm", shape.head_dim, 10000.0, 1.0)
    layers = tuple(
        LayerSpec(
            index=i,
            n_heads=shape.heads,
            n_kv_heads=shape.kv_heads,
            head_dim_k=shape.head_dim,
            head_dim_v=shape.head_dim,
            window=shape.window if (i + 1) % shape.pattern else 0,
            rope=rope,
            ffn=FfnSpec("silu", shape.ff),
            attn_scale=shape.head_dim**-0.5,
            weights=_tensors(LAYER, sizes, f"blk.{i}.", shape.quant),
        )
        for i in range(shape.layers)
    )
    outside = {name: names for name, names in OUTSIDE.items() if name != "output.weight" or not shape.tied}
    return ModelSpec(
        architecture="llama",
        n_layers=shape.layers,
        n_embd=shape.embd,
        n_vocab=shape.vocab,
        n_ctx_train=shape.ctx,
        norm_eps=1e-5,
        layers=layers,
        weights=_tensors(outside, sizes, "", shape.head_quant),
    )


def _tensors(
    shapes: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int], prefix: str, quant: str
) -> dict[str, TensorInfo]:
    tensors = {}
    for suffix, names in shapes.items():
        shape = tuple(sizes[name] for name in names)
        kind = TYPES[quant] if len(shape) == 2 else F32
        info = GGML_TYPES[kind]
        row_bytes = -(-shape[-1] // info.block) * info.n_bytes
        tensors[suffix] = TensorInfo(prefix + suffix, shape, kind, math.prod(shape[:-1]) * row_bytes, 0, 0)
    return tensors
