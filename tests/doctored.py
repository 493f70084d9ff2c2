"""Tiny models that are written again with something changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from hybrid.model.file import ModelFile
from tests.tiny import write_tiny

SMALL = {"n_embd": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "n_ff": 96}


def rewritten(
    tmp_path: Path,
    architecture: str = "llama",
    *,
    drop: str = "",
    add: dict[str, tuple[int, ...]] | None = None,
    keys: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    as_architecture: str = "",
) -> Path:
    """A tiny model without one tensor, with others added, or with other metadata."""
    source = write_tiny(tmp_path / "source.gguf", architecture, **SMALL, n_layers=2)
    path = tmp_path / "rewritten.gguf"
    name = as_architecture or architecture
    writer = gguf.GGUFWriter(path, name)
    with ModelFile(source) as file:
        metadata = {k.replace(f"{architecture}.", f"{name}."): v for k, v in file.metadata.items()}
        for key, value in {**metadata, **(keys or {})}.items():
            if key == "general.architecture" or key in without:
                continue
            if isinstance(value, list):
                writer.add_array(key, value)
            else:
                kinds = {bool: "bool", int: "uint32", float: "float32", str: "string"}
                getattr(writer, f"add_{kinds[type(value)]}")(key, value)
        for tensor in file.tensors.values():
            if tensor.name != drop:
                writer.add_tensor(tensor.name, file.data(tensor.name).view(np.float32).reshape(tensor.shape))
        for extra, shape in (add or {}).items():
            writer.add_tensor(extra, np.ones(shape, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return path
