"""`ollama:` and `lmstudio:` names: models that those programs have downloaded already. Only read, never fetched."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from hybrid.errors import BadRequestError
from hybrid.model.opening import first_shard

MODEL_LAYER = "application/vnd.ollama.image.model"
_OLLAMA = re.compile(
    r"(?:(?P<host>[\w.-]+\.[\w.-]+(?::\d+)?)/)?(?:(?P<space>[\w.-]+)/)?(?P<name>[\w.-]+)(?::(?P<tag>[\w.-]+))?"
)
_MANIFESTS = (("manifests", "registry.ollama.ai"), ("manifest-v2", "ollama.com"), ("manifest-v2", "registry.ollama.ai"))
"""Folder and default host: of releases up to now, and of newer ones."""


def ollama_model(name: str) -> Path:
    """The GGUF of an Ollama model `NAME[:TAG]` (or `namespace/NAME`, `host/namespace/NAME`), tag `latest` by default.

    Raises BadRequestError where it was not pulled, is not a GGUF, or its file is missing.
    """
    match = _OLLAMA.fullmatch(name)
    if match is None or any(part in (".", "..") for part in match.groups()):
        raise BadRequestError(f"ollama:{name} is not a model's name; write ollama:NAME or ollama:NAME:TAG.")
    # os.path: a folder of Ollama's service that others may not enter is not there for them; pathlib would raise.
    folders = [folder for folder in _ollama_folders() if os.path.isdir(folder)]
    for folder in folders:
        for manifests, host in _MANIFESTS:
            space = Path(manifests, match["host"] or host, match["space"] or "library")
            manifest = folder / space / match["name"] / (match["tag"] or "latest")
            if os.path.isfile(manifest):
                return _blob(folder, manifest, name)
    if not folders:
        raise BadRequestError("No models of Ollama are on this machine (OLLAMA_MODELS says where they are).")
    here = sorted({other for folder in folders for other in _pulled(folder)})
    known = f"; there are {', '.join(here[:12])}" if here else ""
    raise BadRequestError(f"Ollama has no model {name} on this machine{known}; fetch it: ollama pull {name}")


def _ollama_folders() -> list[Path]:
    own = os.environ.get("OLLAMA_MODELS")
    if own:
        return [Path(os.path.expanduser(own))]
    return [Path.home() / ".ollama/models", *map(Path, ("/usr/share/ollama/.ollama/models", "/var/lib/ollama/models"))]


def _pulled(folder: Path) -> Iterator[str]:
    for manifests, host in _MANIFESTS:
        for tag in (folder / manifests / host / "library").glob("*/*"):
            yield tag.parent.name if tag.name == "latest" else f"{tag.parent.name}:{tag.name}"


def _blob(folder: Path, manifest: Path, name: str) -> Path:
    try:
        layers = json.loads(manifest.read_bytes())["layers"]
        digests = [layer["digest"] for layer in layers if layer.get("mediaType") == MODEL_LAYER]
    except OSError as e:
        raise BadRequestError(f"{manifest} cannot be read: {e.strerror}.") from e
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise BadRequestError(f"{manifest} is not a manifest of Ollama's.") from e
    if not digests:
        raise BadRequestError(
            f"The Ollama model {name} holds no GGUF (it may run in the cloud, or be in another format)."
        )
    if len(digests) > 1 or not isinstance(digests[0], str) or not re.fullmatch("sha256[:-][0-9a-f]{64}", digests[0]):
        raise BadRequestError(f"{manifest} is not a manifest of Ollama's with one model file.")
    blob = folder / "blobs" / digests[0].replace(":", "-")
    if not os.access(blob, os.R_OK):
        lost = os.access(blob.parent, os.X_OK) and not os.path.exists(blob)
        why = "is missing; fetch it again: ollama pull " + name if lost else "may not be read by this user"
        raise BadRequestError(f"The file of the Ollama model {name}, {blob}, {why}.")
    return blob


def lmstudio_model(name: str) -> Path:
    """The GGUF of an LM Studio model: `publisher/model`, or `publisher/model/file.gguf` where it has several files.

    Raises BadRequestError where it is not there.
    """
    parts = name.split("/")
    if len(parts) not in (2, 3) or any(part in ("", ".", "..") for part in parts):
        raise BadRequestError(f"lmstudio:{name} is not a model's name; write lmstudio:PUBLISHER/MODEL[/FILE.gguf].")
    roots = [Path.home() / ".lmstudio/models", Path.home() / ".cache/lm-studio/models"]
    folders = [folder for root in roots if (folder := root / parts[0] / parts[1]).is_dir()]
    files = [first_shard(file) for folder in folders for file in folder.glob("*.gguf") if not _is_extra(file)]
    # Newer releases moved their folder: what is in both is one model. The newer folder's file wins.
    by_name = {file.name: file for file in reversed(files)}
    found = [by_name[name] for name in sorted(by_name)]
    if len(parts) == 3:
        found = [file for file in found if file.name == parts[2]]
    if not found:
        where = next((str(root) for root in roots if root.is_dir()), str(roots[0]))
        raise BadRequestError(f"LM Studio has no GGUF {name} on this machine (its models are in {where}).")
    if len(found) > 1:
        several = ", ".join(file.name for file in found)
        raise BadRequestError(
            f"LM Studio has several files of {name}: {several}; write lmstudio:{name}/{found[0].name}."
        )
    return found[0]


def _is_extra(file: Path) -> bool:
    return "mmproj" in file.name.lower()
