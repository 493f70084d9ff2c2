"""What a measurement is of: which model file, which machine, which versions. Milliseconds, and neither torch nor
llama.cpp is imported."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import hybrid
from hybrid.model.file import ModelFile
from hybrid.schedule import facts
from hybrid.schedule.machine_store import fingerprint

HEADER_BYTES = 1 << 16
"""Of each file's beginning, where the names and hyperparameters are."""
MEASURED_WITH = {"torch": "torch", "llama_cpp": "llama_cpp_python"}
"""Packages whose version matters to speed: import name, distribution."""


@dataclass(frozen=True)
class Identity:
    """Keys to what was measured."""

    model: str
    """A hash of the files' sizes and headers; the weights are not read."""
    machine: str
    versions: Mapping[str, str]


def identify(file: ModelFile) -> Identity:
    """The identity of measurements made of an open model, here and now."""
    machine = fingerprint(facts.cpu(), facts.memory(), facts.gpus())
    return Identity(model_key(file), machine, {"hybrid": hybrid.__version__, **_versions()})


def model_key(file: ModelFile) -> str:
    """The same for the same files wherever they lie; another one for any other size, name, shape or type."""
    digest = hashlib.sha256()
    for shard in file.shards:
        digest.update(f"{shard.size}\n".encode())
        digest.update(os.pread(shard.fd, HEADER_BYTES, 0))
    for name, tensor in file.tensors.items():
        digest.update(f"{name} {tensor.shape} {tensor.type} {tensor.offset}\n".encode())
    return digest.hexdigest()[:16]


def _versions() -> dict[str, str]:
    """By the folders that pip makes: `importlib.metadata` takes forty milliseconds to import."""
    found = {}
    for name, distribution in MEASURED_WITH.items():
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            folder = Path(spec.origin).parent.parent
            versions = sorted(p.stem.split("-")[1] for p in folder.glob(f"{distribution}-*.dist-info"))
            found[name] = versions[-1] if versions else ""
    return found
