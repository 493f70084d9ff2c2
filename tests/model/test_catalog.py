"""The catalogue, and what a MODEL argument means."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid.errors import BadRequestError
from hybrid.model.architectures import read_spec
from hybrid.model.catalog import CATALOG_FILE, catalog, find_entry, models_dir, resolve_model
from hybrid.model.download import sha256_of
from hybrid.model.file import ModelFile
from hybrid.model.known import KNOWN


@pytest.fixture(autouse=True)
def empty_models_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if "real_model" not in request.fixturenames:
        monkeypatch.setenv("HYBRID_MODELS", str(tmp_path / "models"))


def fake_pull(name: str) -> Path:
    """Put a file of the right size where the model would be."""
    path = find_entry(name).path
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(find_entry(name).size)
    return path


def test_the_catalogue_holds_two_models_the_head_can_run() -> None:
    assert list(catalog()) == ["smollm2-135m", "gemma3-270m"]
    for entry in catalog().values():
        assert entry.architecture in KNOWN
        assert len(entry.sha256) == 64
        assert entry.size > 0
        assert entry.download_bytes > 0
        assert Path(entry.file).name == entry.file
        assert entry.parts
    assert catalog()["smollm2-135m"].licence == "Apache-2.0"
    assert not catalog()["smollm2-135m"].accept


def test_gemma_comes_with_its_terms() -> None:
    entry = find_entry("gemma3-270m")
    assert entry.accept == "gemma"
    assert "https://ai.google.dev/gemma/terms" in entry.terms


def test_the_catalogue_in_the_package_is_the_one_in_models() -> None:
    top = Path(__file__).parents[2] / "models" / "catalog.toml"
    assert CATALOG_FILE.read_bytes() == top.read_bytes()


@pytest.mark.real
def test_a_pulled_model_is_what_the_catalogue_says(real_model: Path) -> None:
    entry = next(entry for entry in catalog().values() if entry.path == real_model)
    assert sha256_of(real_model) == entry.sha256
    with ModelFile(real_model) as file:
        assert read_spec(file).architecture == entry.architecture


def test_models_live_in_the_users_data_directory_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert models_dir() == tmp_path / "models"
    monkeypatch.delenv("HYBRID_MODELS")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert models_dir().name == "models"
    assert models_dir().parent.name == "hybrid"


def test_a_name_means_the_pulled_file_and_no_name_the_default() -> None:
    path = fake_pull("smollm2-135m")
    assert resolve_model("smollm2-135m") == path
    assert resolve_model(None) == path


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m", None])
def test_a_model_not_pulled_yet_is_an_error_with_the_command(name: str | None) -> None:
    with pytest.raises(BadRequestError, match=f"hybrid models pull {name or 'smollm2-135m'}$"):
        resolve_model(name)


def test_half_a_file_does_not_count_as_pulled() -> None:
    path = fake_pull("smollm2-135m")
    with path.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(BadRequestError, match="hybrid models pull"):
        resolve_model("smollm2-135m")


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(BadRequestError, match="smollm2-135m, gemma3-270m"):
        resolve_model("smollm3")


def test_paths_are_passed_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").touch()
    assert resolve_model("file") == Path("file")
    assert resolve_model("missing.gguf") == Path("missing.gguf")  # opening it says that it is missing
    assert resolve_model("./smollm2-135m") == Path("smollm2-135m")
    assert resolve_model("~/m.gguf") == tmp_path / "m.gguf"
    assert resolve_model(Path("anything")) == Path("anything")
