"""`ollama:` and `lmstudio:` names: models that other programs have downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybrid.errors import BadRequestError
from hybrid.model.catalog import resolve_model

DIGEST = "sha256:" + "ab" * 32
LAYER = {"mediaType": "application/vnd.ollama.image.model", "digest": DIGEST, "size": 4}
TEMPLATE = {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:" + "cd" * 32}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    return tmp_path


def pull(folder: Path, name: str, manifest: Any = None, blob: bytes | None = b"GGUF") -> None:
    """Lay out what `ollama pull` leaves behind."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"layers": [TEMPLATE, LAYER]} if manifest is None else manifest))
    (folder / "blobs").mkdir(exist_ok=True)
    if blob is not None:
        (folder / "blobs" / DIGEST.replace(":", "-")).write_bytes(blob)


@pytest.mark.parametrize(
    ("name", "manifest"),
    [
        ("llama3", "manifests/registry.ollama.ai/library/llama3/latest"),
        ("llama3:8b", "manifests/registry.ollama.ai/library/llama3/8b"),
        ("me/mine:q4", "manifests/registry.ollama.ai/me/mine/q4"),
        ("hf.co/org/repo:Q4_K_M", "manifests/hf.co/org/repo/Q4_K_M"),
        ("llama4", "manifest-v2/ollama.com/library/llama4/latest"),
    ],
)
@pytest.mark.parametrize("where", ["home", "variable"])
def test_an_ollama_model_is_its_blob(
    home: Path, monkeypatch: pytest.MonkeyPatch, name: str, manifest: str, where: str
) -> None:
    folder = home / (".ollama/models" if where == "home" else "elsewhere")
    pull(folder, manifest)
    if where == "variable":
        monkeypatch.setenv("OLLAMA_MODELS", str(folder))
    assert resolve_model(f"ollama:{name}") == folder / "blobs" / DIGEST.replace(":", "-")


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ([], "not a manifest"),
        ({}, "not a manifest"),
        ({"layers": [TEMPLATE]}, "holds no GGUF"),
        ({"layers": [LAYER, LAYER]}, "one model file"),
        ({"layers": [{**LAYER, "digest": "../../etc/passwd"}]}, "one model file"),
        ({"layers": [{**LAYER, "digest": None}]}, "one model file"),
    ],
)
def test_a_manifest_that_is_none_is_one_sentence(home: Path, manifest: Any, words: str) -> None:
    pull(home / ".ollama/models", "manifests/registry.ollama.ai/library/x/latest", manifest)
    with pytest.raises(BadRequestError, match=words):
        resolve_model("ollama:x")


def test_what_ollama_does_not_have_is_said_with_what_it_has(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = home / ".ollama/models"
    pull(folder, "manifests/registry.ollama.ai/library/llama3/8b", blob=None)
    with pytest.raises(BadRequestError, match=r"no model other.*there are llama3:8b; fetch it: ollama pull other"):
        resolve_model("ollama:other")
    with pytest.raises(BadRequestError, match=r"is missing; fetch it again"):
        resolve_model("ollama:llama3:8b")
    for name in ("", "../x", "a:b:c", "..", "x:.."):
        with pytest.raises(BadRequestError, match="not a model's name"):
            resolve_model(f"ollama:{name}")
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "none"))
    with pytest.raises(BadRequestError, match="No models of Ollama"):
        resolve_model("ollama:llama3")


@pytest.mark.parametrize("root", [".lmstudio/models", ".cache/lm-studio/models"])
def test_an_lm_studio_model_is_its_file(home: Path, root: str) -> None:
    folder = home / root / "org" / "repo"
    folder.mkdir(parents=True)
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m.gguf"):
        (folder / name).write_bytes(b"GGUF")
    assert resolve_model("lmstudio:org/repo") == folder / "m-00001-of-00002.gguf"
    (folder / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(BadRequestError, match=r"several files of org/repo: m-00001-of-00002.gguf, other.gguf"):
        resolve_model("lmstudio:org/repo")
    assert resolve_model("lmstudio:org/repo/other.gguf") == folder / "other.gguf"
    with pytest.raises(BadRequestError, match="has no GGUF org/none"):
        resolve_model("lmstudio:org/none")
    for other in (".lmstudio/models", ".cache/lm-studio/models"):  # an update may have left a model in both
        (home / other / "org" / "twice").mkdir(parents=True)
        (home / other / "org" / "twice" / "m.gguf").write_bytes(b"GGUF")
    assert resolve_model("lmstudio:org/twice") == home / ".lmstudio/models/org/twice/m.gguf"
    for name in ("", "org", "../x", "a/b/c/d"):
        with pytest.raises(BadRequestError, match="not a model's name"):
            resolve_model(f"lmstudio:{name}")
