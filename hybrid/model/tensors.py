"""Sorting a file's tensors into layers and checking them against what an architecture says they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hybrid.errors import BadFileError
from hybrid.model.file import ModelFile, TensorInfo
from hybrid.model.known import GLOBAL_TENSORS, OPTIONAL_GLOBAL_TENSORS, ROPE_FACTORS, Architecture, Shapes

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


def unknown_tensor(table: TensorTable, architecture: Architecture) -> str | None:
    """The name of a tensor that the architecture's description does not list, or None."""
    extra = {ROPE_FACTORS} if architecture.rope_factors else set()
    for name in table.rest:
        if name not in GLOBAL_TENSORS and name not in OPTIONAL_GLOBAL_TENSORS and name not in extra:
            return name
    for i, layer in enumerate(table.layers):
        for suffix in layer:
            if suffix not in architecture.tensors and suffix not in architecture.optional:
                return f"blk.{i}.{suffix}"
    return None


def check_tensors(
    file: ModelFile,
    prefix: str,
    tensors: Mapping[str, TensorInfo],
    sizes: Mapping[str, int],
    required: Shapes,
    optional: Shapes,
) -> None:
    """Make sure that `tensors` has what is required, and everything in the shape that `sizes` demands.

    Raises BadFileError naming the first tensor that is missing or misshapen.
    """
    for suffix, names in {**required, **optional}.items():
        tensor = tensors.get(suffix)
        if tensor is None:
            if suffix in required:
                raise BadFileError(f"{file.path} lacks the tensor {prefix}{suffix}, which its architecture needs.")
            continue
        wanted = tuple(sizes[name] for name in names)
        if _trimmed(tensor.shape) != _trimmed(wanted):
            raise BadFileError(
                f"{file.path} has the tensor {tensor.name} in shape {list(tensor.shape)}, "
                f"but its hyperparameters demand {list(wanted)}."
            )


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without outer dimensions of one, which ggml does not tell from missing ones."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape
