"""Tiny random GGUFs of every architecture in `hybrid.model.known`, for tests against llama.cpp.

The tensors and their shapes come from the same table that the program reads files with; that llama.cpp loads the file,
and refuses one with a tensor too many, shows that the table is right.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

from hybrid.model.known import KNOWN
from hybrid.model.traits import Shapes
from tests.tiny import add_metadata, add_vocabulary, quantize

SIZES: dict[str, int] = {"n_embd": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "n_ff": 96, "window": 16}


@dataclass(frozen=True)
class Tiny:
    """One random model: an architecture and what of it is used."""

    architecture: str
    n_layers: int = 5
    keys: dict[str, Any] = field(default_factory=dict)
    """Metadata without the architecture's prefix; None drops a key."""
    sizes: dict[str, int] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    """Tensors of a layer that the architecture may have, and this model has."""
    outside: tuple[str, ...] = ()
    """The same for tensors outside the layers."""
    fused_qkv: bool = False
    windowed_sizes: dict[str, int] = field(default_factory=dict)
    """Sizes of windowed layers, where they differ."""
    drop: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Tensors that single layers lack."""
    seed: int = 0


def write_arch(path: str | Path, tiny: Tiny, kind: T | list[T] = T.F32, *, expert_kind: T | None = None) -> Path:
    """Write `tiny` with matrices of `kind` (a list is cycled), experts of `expert_kind`, and return the path."""
    architecture = KNOWN[tiny.architecture]
    sizes = {**SIZES, **tiny.sizes}
    windowed = _windowed(tiny)
    rng = np.random.default_rng(tiny.seed)
    kinds = kind if isinstance(kind, list) else [kind]
    writer = gguf.GGUFWriter(str(path), tiny.architecture)
    keys = _metadata(tiny, sizes, windowed)
    add_metadata(writer, {f"{tiny.architecture}.{key}": value for key, value in keys.items()})
    n_vocab = add_vocabulary(writer)
    count = 0

    def tensor(name: str, shape: tuple[int, ...], around: float = 0.0) -> None:
        nonlocal count
        values = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1 or name.endswith(".bias"):
            writer.add_tensor(name, around + 0.1 * values)
            return
        values /= np.sqrt(shape[-1])
        chosen = kinds[count % len(kinds)]
        count += 1
        if "ffn_gate_inp" in name:
            chosen = T.F32
        elif "_exps" in name and expert_kind is not None:
            chosen = expert_kind
        if shape[-1] % gguf.GGML_QUANT_SIZES[chosen][0]:
            chosen = T.Q8_0  # as llama.cpp's own quantiser falls back for narrow rows
        data = quantize(values.reshape(-1, shape[-1]), chosen)
        writer.add_tensor(name, data.reshape(*shape[:-1], -1), raw_dtype=chosen)

    width = sizes["n_embd"]
    tensor("token_embd.weight", (n_vocab, width))
    tensor("output_norm.weight", (width,), 1.0)
    if architecture.output_norm_bias:
        tensor("output_norm.bias", (width,))
    if architecture.output == "own" or "output.weight" in tiny.outside:
        tensor("output.weight", (n_vocab, width))
    for name in tiny.outside:
        if name == "output.bias":
            tensor(name, (n_vocab,))
        elif name.startswith("rope_"):
            n_dims = tiny.keys.get("rope.dimension_count", sizes["head_dim"])
            top = 8 if "long" in name else 3
            writer.add_tensor(name, np.linspace(1, top, n_dims // 2, dtype=np.float32))
    for i in range(tiny.n_layers):
        own = {**sizes, **(tiny.windowed_sizes if windowed[i] else {})}
        for suffix, names in _layer(tiny).items():
            if suffix not in tiny.drop.get(i, ()):
                factor = ("norm" in suffix or "scale" in suffix) and not suffix.endswith(".bias")
                tensor(f"blk.{i}.{suffix}", tuple(_size(own, name) for name in names), 1.0 if factor else 0.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _layer(tiny: Tiny) -> Shapes:
    architecture = KNOWN[tiny.architecture]
    shapes: dict[str, tuple[str, ...]] = dict(architecture.attention)
    shapes |= {name: architecture.optional[name] for name in tiny.optional if name in architecture.optional}
    experts = architecture.experts if tiny.keys.get("expert_count") else None
    if architecture.feed_forward and (experts is None or experts.beside_dense is not None):
        shapes |= architecture.feed_forward
    if experts is not None:
        if experts.beside_dense is not None:
            shapes = {n: tuple("n_ff_shared" if s == "n_ff" else s for s in shape) for n, shape in shapes.items()}
            shapes |= experts.beside_dense
        shapes |= experts.tensors
        shapes |= {name: experts.optional[name] for name in tiny.optional if name in experts.optional}
        if "ffn_gate_up_exps.weight" in tiny.optional:
            del shapes["ffn_gate_exps.weight"], shapes["ffn_up_exps.weight"]
            shapes["ffn_gate_up_exps.weight"] = ("n_experts", "n_ff_twice", "n_embd")
        if "expert_shared_feed_forward_length" in tiny.keys:
            up = ("n_ff_shared", "n_embd")
            shapes |= {"ffn_gate_shexp.weight": up, "ffn_up_shexp.weight": up, "ffn_down_shexp.weight": up[::-1]}
    if tiny.fused_qkv:
        for name in ("attn_q.weight", "attn_k.weight", "attn_v.weight"):
            del shapes[name]
        shapes["attn_qkv.weight"] = ("n_qkv", "n_embd")
    return shapes


def _size(sizes: dict[str, int], name: str) -> int:
    head = sizes["head_dim"]
    derived = {
        "one": 1,
        "n_q": sizes["n_heads"] * head,
        "n_k": sizes["n_kv_heads"] * head,
        "n_v": sizes["n_kv_heads"] * head,
        "n_qkv": (sizes["n_heads"] + 2 * sizes["n_kv_heads"]) * head,
        "n_ff_twice": 2 * sizes["n_ff"],
        "n_ff_shared": sizes.get("n_ff_shared", 0),
        "n_experts": sizes.get("n_experts", 0),
    }
    return derived[name] if name in derived else sizes[name]


def _windowed(tiny: Tiny) -> list[bool]:
    pattern = tiny.keys.get("attention.sliding_window_pattern")
    return pattern if isinstance(pattern, list) else [False] * tiny.n_layers


def _metadata(tiny: Tiny, sizes: dict[str, int], windowed: list[bool]) -> dict[str, Any]:
    architecture = KNOWN[tiny.architecture]
    keys: dict[str, Any] = {
        "block_count": tiny.n_layers,
        "context_length": 512,
        "embedding_length": sizes["n_embd"],
        "feed_forward_length": sizes.get("n_ff_shared") or sizes["n_ff"],
        "attention.head_count": sizes["n_heads"],
        "attention.head_count_kv": sizes["n_kv_heads"],
        "attention.key_length": sizes["head_dim"],
        "attention.value_length": sizes["head_dim"],
        "rope.dimension_count": sizes["head_dim"],
    }
    eps = "attention.layer_norm_epsilon" if architecture.norm == "layer" else "attention.layer_norm_rms_epsilon"
    keys[eps] = 1e-5
    if architecture.windows is not None:
        keys["attention.sliding_window"] = sizes["window"]
    if architecture.scales or architecture.logit_scale:
        keys["logit_scale"] = 0.25 if architecture.logit_scale else 4.0
    if tiny.keys.get("expert_count"):
        keys["expert_feed_forward_length"] = sizes["n_ff"]
        if architecture.experts is not None and architecture.experts.length_key == "feed_forward_length":
            keys["feed_forward_length"] = sizes["n_ff"]
    if tiny.windowed_sizes:
        own = {**sizes, **tiny.windowed_sizes}
        keys |= {"attention.key_length_swa": own["head_dim"], "attention.value_length_swa": own["head_dim"]}
        keys["attention.head_count_kv"] = [(own if w else sizes)["n_kv_heads"] for w in windowed]
    return {key: value for key, value in {**keys, **tiny.keys}.items() if value is not None}
