"""Sorting a file's tensors into layers and checking them against what an architecture says they are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybrid.errors import BadFileError
from hybrid.model.file import ModelFile, TensorInfo
from hybrid.model.ggml_types import F32, NO_PRODUCT, type_name
from hybrid.model.traits import Architecture, Shapes

_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,3})\.(.+)")


@dataclass(frozen=True)
class TensorTable:
    """A file's tensors: those of each layer by suffix (`attn_q.weight`), and the rest by name."""

    layers: tuple[dict[str, TensorInfo], ...]
    rest: dict[str, TensorInfo]


def sort_tensors(file: ModelFile, n_layers: int) -> TensorTable:
    """Sort the tensors of `file` into `n_layers` layers."""
    layers: tuple[dict[str, TensorInfo], ...] = tuple({} for _ in range(n_layers))
    rest: dict[str, TensorInfo] = {}
    for name, tensor in file.tensors.items():
        match = _BLOCK.fullmatch(name)
        if match and int(match[1]) < n_layers:
            layers[int(match[1])][match[2]] = tensor
        else:
            rest[name] = tensor
    return TensorTable(layers, rest)


@dataclass(frozen=True)
class Wanted:
    """The tensors of a layer, or of what lies outside the layers, by suffix, with their shapes by name."""

    required: Shapes
    optional: Shapes

    def unknown(self, tensors: Mapping[str, TensorInfo]) -> str | None:
        """The first of `tensors` that is neither required nor optional, or None."""
        return next((name for name in tensors if name not in self.required and name not in self.optional), None)


def outside_tensors(architecture: Architecture, factors: Sequence[str]) -> Wanted:
    """What lies outside the layers; `factors` are the tensors that may divide rotary frequencies."""
    required: dict[str, tuple[str, ...]] = {
        "token_embd.weight": ("n_vocab", "n_embd"),
        "output_norm.weight": ("n_embd",),
    }
    optional: dict[str, tuple[str, ...]] = dict.fromkeys(factors, ("n_factors",))
    if architecture.output_norm_bias:
        required["output_norm.bias"] = ("n_embd",)
    if architecture.output_bias:
        optional["output.bias"] = ("n_vocab",)
    if architecture.output != "tied":
        (required if architecture.output == "own" else optional)["output.weight"] = ("n_vocab", "n_embd")
    return Wanted(required, optional)


def layer_tensors(
    architecture: Architecture, tensors: Mapping[str, TensorInfo], n_experts: int, n_ff_shared: int
) -> Wanted:
    """What a layer with these tensors must and may have: alternatives are chosen by what is there."""
    required, optional = dict(architecture.attention), dict(architecture.optional)
    if "attn_qkv.weight" in tensors:
        for name in ("attn_q", "attn_k", "attn_v"):
            required.pop(name + ".weight", None)
            optional.pop(name + ".weight", None)
            optional.pop(name + ".bias", None)
        required["attn_qkv.weight"] = ("n_qkv", "n_embd")
        if architecture.optional.keys() & {"attn_q.bias"}:
            optional["attn_qkv.bias"] = ("n_qkv",)
    experts = architecture.experts if has_experts(architecture, tensors, n_experts) else None
    if architecture.feed_forward is not None and (experts is None or experts.beside_dense is not None):
        required |= architecture.feed_forward
    if experts is not None:
        required |= experts.tensors
        optional |= experts.optional
        if experts.beside_dense is not None:
            required = {name: _beside(shape) if name in SHARED else shape for name, shape in required.items()}
            required |= experts.beside_dense
        if experts.merged_gate_up and "ffn_gate_up_exps.weight" in tensors:
            del required["ffn_gate_exps.weight"], required["ffn_up_exps.weight"]
            required["ffn_gate_up_exps.weight"] = ("n_experts", "n_ff_twice", "n_embd")
        if experts.shared and n_ff_shared:
            required |= {shared: _beside(SHARED_SHAPES[name]) for name, shared in SHARED.items()}
    return Wanted(required, optional)


def has_experts(architecture: Architecture, tensors: Mapping[str, TensorInfo], n_experts: int) -> bool:
    """Whether this layer's feed-forward part has experts. Beside a dense part they are there if their router is."""
    if architecture.experts is None:
        return False
    if architecture.experts.beside_dense is not None:
        return n_experts > 0 and "ffn_gate_inp.weight" in tensors
    return n_experts > 0 or architecture.feed_forward is None


SHARED = {
    "ffn_gate.weight": "ffn_gate_shexp.weight",
    "ffn_up.weight": "ffn_up_shexp.weight",
    "ffn_down.weight": "ffn_down_shexp.weight",
}
"""The dense part that runs beside experts, by the names it has where it is called a shared expert."""
SHARED_SHAPES: Shapes = {
    "ffn_gate.weight": ("n_ff", "n_embd"),
    "ffn_up.weight": ("n_ff", "n_embd"),
    "ffn_down.weight": ("n_embd", "n_ff"),
}


def _beside(shape: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("n_ff_shared" if name == "n_ff" else name for name in shape)


def check_tensors(
    file: ModelFile,
    prefix: str,
    tensors: Mapping[str, TensorInfo],
    sizes: Mapping[str, int],
    wanted: Wanted,
) -> None:
    """Make sure that `tensors` has what is wanted, everything in the shape that `sizes` demands and of a type that
    llama.cpp can compute with: matrices of any that has products, all else F32.

    Raises BadFileError naming the first tensor that is missing, misshapen or of the wrong type.
    """
    for suffix, names in {**wanted.required, **wanted.optional}.items():
        tensor = tensors.get(suffix)
        if tensor is None:
            if suffix in wanted.required:
                raise BadFileError(f"{file.path} lacks the tensor {prefix}{suffix}, which its architecture needs.")
            continue
        shape = tuple(sizes[name] for name in names)
        if trimmed(tensor.shape) != trimmed(shape):
            raise BadFileError(
                f"{file.path} has the tensor {tensor.name} in shape {list(tensor.shape)}, "
                f"but its hyperparameters demand {list(shape)}."
            )
        is_matrix = len(shape) > 1 and suffix.endswith(".weight") and "norm" not in suffix
        if tensor.type in NO_PRODUCT if is_matrix else tensor.type != F32:
            raise BadFileError(
                f"{file.path} has the tensor {tensor.name} of type {type_name(tensor.type)}, with which llama.cpp "
                "cannot compute."
            )


def trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """`shape` without outer dimensions of one, which ggml does not tell from missing ones."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape
