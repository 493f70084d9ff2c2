"""GGUFs of any size that take no room: a true header, and a hole where the weights would be.

llama.cpp opens them with `no_alloc` and says how large its buffers would be; `read_spec` reads them like any other.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hybrid.model.file import ModelFile
from hybrid.model.spec import ModelSpec
from hybrid.tail.virtual_gguf import UINT32, VirtualGGUF, VirtualTensor, scalar_record
from tests.tiny import write_tiny


def write_sparse(path: Path, spec: ModelSpec, architecture: str = "llama") -> Path:
    """A file with the header of a model like `spec` and no data; the vocabulary is a tiny one, so `n_vocab` must be
    that of `tests.tiny`."""
    layer, window = spec.layers[0], max(layer.window for layer in spec.layers)
    tiny = write_tiny(path.with_suffix(".tiny"), architecture, n_layers=1, window=window)
    values: dict[str, Any] = {
        "block_count": spec.n_layers,
        "context_length": spec.n_ctx_train,
        "embedding_length": spec.n_embd,
        "feed_forward_length": layer.ffn.n_ff,
        "attention.head_count": layer.n_heads,
        "attention.head_count_kv": layer.n_kv_heads,
        "attention.key_length": layer.head_dim_k,
        "attention.value_length": layer.head_dim_v,
        "rope.dimension_count": layer.head_dim_k,
    }
    with ModelFile(tiny) as file:
        prefix = f"{file.architecture}."
        records: list[bytes | memoryview] = [
            scalar_record(key, UINT32, "I", values[key.removeprefix(prefix)])
            if key.removeprefix(prefix) in values
            else bytes(field.raw)
            for key, field in file.fields.items()
        ]
        tensors = [*spec.weights.values(), *(t for layer in spec.layers for t in layer.weights.values())]
        virtual = VirtualGGUF(
            file.version,
            file.alignment,
            records,
            [VirtualTensor(t.name, t.shape, t.type, t.n_bytes) for t in tensors],
        )
        header = virtual.header()
    path.write_bytes(header)
    padded = sum(-(-t.n_bytes // virtual.alignment) * virtual.alignment for t in virtual.tensors)
    os.truncate(path, len(header) + padded)
    return path
