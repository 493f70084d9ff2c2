"""`hf:` names, against a hub on this machine."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid import Hybrid
from hybrid.errors import HybridError, UnsupportedError
from hybrid.model.catalog import resolve_model
from hybrid.model.file import ModelFile
from tests.model.hub_server import Hub, serve
from tests.tail.shards import write_shards
from tests.tiny import write_tiny

KINDS = {f"m-{kind}.gguf": f"GGUF {kind}".encode() for kind in ("Q4_K_M", "Q4_K_S", "Q8_0", "UD-Q4_K_XL", "BF16")}
SPLIT = {f"Q6_K/m-Q6_K-{i:05d}-of-00003.gguf": b"GGUF" + bytes([i]) for i in (1, 2, 3)}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants, file_download

    repos = {
        "org/many": {**KINDS, **SPLIT, "README.md": b"hello", "mmproj-F16.gguf": b"GGUF"},
        "org/one": {"m.gguf": b"GGUF one", "config.json": b"{}"},
        "org/none": {"model.safetensors": b"x"},
        "org/gated": {"m.gguf": b"GGUF gated"},
        "org/torn": {"m-00001-of-00002.gguf": b"GGUF"},
    }
    with serve(Hub(repos, gated={"org/gated"})) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(
            file_download, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("hf:org/many/m-Q8_0.gguf", b"GGUF Q8_0"),
        ("hf:org/many:Q4_K_M", b"GGUF Q4_K_M"),
        ("hf:org/many:q4_k_s", b"GGUF Q4_K_S"),
        ("hf:org/many:Q4_K_XL", b"GGUF UD-Q4_K_XL"),
        ("hf:org/many:bf16", b"GGUF BF16"),
        ("hf:org/one", b"GGUF one"),
        ("hf:org/many/*Q8_0.gguf", b"GGUF Q8_0"),
        ("hf:org/many/*/*Q6_K*", b"GGUF\x01"),
        ("hf:org/one/m.gguf", b"GGUF one"),
    ],
)
def test_a_name_is_fetched(hub: Hub, name: str, content: bytes) -> None:
    assert resolve_model(name).read_bytes() == content


@pytest.mark.parametrize("name", ["hf:org/many:Q6_K", "hf:org/many/Q6_K/m-Q6_K-00002-of-00003.gguf"])
def test_all_shards_are_fetched_and_the_first_is_the_model(hub: Hub, name: str) -> None:
    first = resolve_model(name)
    assert first.name == "m-Q6_K-00001-of-00003.gguf"
    assert sorted(path.read_bytes() for path in first.parent.iterdir()) == sorted(SPLIT.values())


def test_a_file_that_is_here_is_not_fetched_again(hub: Hub) -> None:
    resolve_model("hf:org/one")
    hub.requests.clear()
    resolve_model("hf:org/one")
    assert not [path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]


@pytest.mark.parametrize("retries", [4, 0])
def test_a_broken_download_goes_on_where_it_stopped(hub: Hub, monkeypatch: pytest.MonkeyPatch, retries: int) -> None:
    from huggingface_hub import constants

    from hybrid.model import hub as ours

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    monkeypatch.setattr(ours, "RETRIES", retries)
    hub.repos["org/one"]["m.gguf"] = data = b"GGUF" + os.urandom(300_000)
    hub.cut_after = 200_000
    if not retries:  # as if Ctrl-C had ended the first run
        with pytest.raises(HybridError, match="cannot be reached"):
            resolve_model("hf:org/one")
    assert resolve_model("hf:org/one").read_bytes() == data
    ranges = [found for method, path, found in hub.requests if method == "GET" and "/resolve/" in path]
    assert len(ranges) == 2
    assert int(str(ranges[1]).removeprefix("bytes=").split("-")[0]) >= 100_000


@pytest.mark.parametrize("status", [None, 503])
def test_without_the_hub_what_is_here_is_used(hub: Hub, monkeypatch: pytest.MonkeyPatch, status: int | None) -> None:
    from huggingface_hub import constants

    first = resolve_model("hf:org/many:Q8_0")
    hub.status = status
    if status is None:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert resolve_model("hf:org/many:Q8_0") == first
    assert resolve_model("hf:org/many/m-Q8_0.gguf") == first


def test_without_the_hub_sentences_speak_of_what_is_here(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    resolve_model("hf:org/many:Q8_0")
    for offline, why in (
        (False, "http://127.0.0.1:9 cannot be reached"),
        (True, "HF_HUB_OFFLINE says not to fetch more"),
    ):
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        for name, what in (
            ("org/many:Q4_K_M", "has no Q4_K_M; it has Q8_0"),
            ("org/many/x.gguf", "has no file x.gguf"),
        ):
            with pytest.raises(HybridError, match=rf"The copy of org/many on this machine {what}.*\({why}\)\."):
                resolve_model(f"hf:{name}")
        assert resolve_model("hf:org/many").name == "m-Q8_0.gguf"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    hub.status = 503
    with pytest.raises(HybridError, match=r"on this machine has no Q4_K_M.*answers 503\)"):
        resolve_model("hf:org/many:Q4_K_M")


@pytest.mark.parametrize(
    ("message", "words", "n_calls"),
    [
        (
            "Data processing error: CAS service error : error sending request\n(deep)",
            r"CAS service error : error send",
            5,
        ),
        ("Data processing error: I/O error: No space left on device (os error 28)", "disk that holds", 1),
    ],
)
def test_what_hf_xet_raises_is_one_sentence(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, message: str, words: str, n_calls: int
) -> None:
    import huggingface_hub

    calls: list[str] = []

    def broken(repo: str, file: str, **options: Any) -> str:
        calls.append(file)
        raise RuntimeError(message)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", broken)
    with pytest.raises(HybridError, match=words) as caught:
        resolve_model("hf:org/one")
    assert "\n" not in str(caught.value)
    assert len(calls) == n_calls


def test_a_token_opens_a_gated_repository(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HybridError, match=r"gated: accept its terms.*HF_TOKEN"):
        resolve_model("hf:org/gated")
    monkeypatch.setenv("HF_TOKEN", "good")
    assert resolve_model("hf:org/gated").read_bytes() == b"GGUF gated"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hf:org/missing:Q4_0", "no repository org/missing"),
        ("hf:org/none", "no GGUF files"),
        ("hf:org/many", "several models: BF16, Q4_K_M, Q4_K_S, Q4_K_XL, Q6_K, Q8_0; say which"),
        ("hf:org/many:Q3_K", "has no Q3_K; it has BF16"),
        ("hf:org/many:Q4", "has no Q4;"),
        ("hf:org/many/other.gguf", "no file other.gguf; its GGUF files are"),
        ("hf:org/many/*Q4*", "Several files of org/many fit"),
        ("hf:org/many/*Q3*", r"no file \*Q3\*"),
        ("hf:org/torn", "lacks m-00002-of-00002.gguf"),
        ("hf:nothing", "not a model's name"),
        ("hf:", "not a model's name"),
        ("hf:../../etc", "not a repository's name"),
        ("hf:../..", "not a repository's name"),
        ("hf:a/b/../../c.gguf", "no repository|no file"),
        ("hf:-x/y--z", "repository"),
    ],
)
def test_a_name_that_fits_nothing_is_one_sentence(hub: Hub, name: str, words: str) -> None:
    with pytest.raises(HybridError, match=words) as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "words"), [(401, "HF_TOKEN"), (403, "HF_TOKEN"), (429, "answers 429"), (500, "500")]
)
def test_a_hub_that_refuses_is_one_sentence(hub: Hub, status: int, words: str) -> None:
    hub.status = status
    with pytest.raises(HybridError, match=words):
        resolve_model("hf:org/one")


def test_no_network_and_offline_mode_are_told_apart(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for name in ("hf:org/one", "hf:org/one/m.gguf"):
        with pytest.raises(HybridError, match=r"http://127.0.0.1:9 cannot be reached"):
            resolve_model(name)


def test_from_pretrained_takes_a_pattern_and_the_constructors_arguments(hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/tiny"] = {"t-f32.gguf": write_tiny(tmp_path / "t.gguf", n_layers=1).read_bytes()}
    with Hybrid.from_pretrained("org/tiny", "*f32.gguf", n_ctx=64, n_gpu_layers=0, verbose=False) as model:
        assert model.model_path.name == "t-f32.gguf"
        assert model.n_ctx == 64
    with pytest.raises(UnsupportedError, match="HF_HOME"):
        Hybrid.from_pretrained("org/tiny", "*f32.gguf", local_dir=".")


def test_a_full_disk_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def full(*args: Any, **kwargs: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", "x")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", full)
    with pytest.raises(HybridError, match=r"disk that holds .* is full"):
        resolve_model("hf:org/one")


def test_ctrl_c_passes(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def interrupted(*args: Any, **kwargs: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve_model("hf:org/one")


def _run(env: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    keep = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    command = [sys.executable, "-m", "hybrid.cli", *args]
    return subprocess.run(command, env={**keep, **env}, capture_output=True, text=True, timeout=300, check=False)


def test_the_librarys_variables_are_honoured_by_the_program(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    first = write_shards(write_tiny(tmp_path / "made" / "m.gguf", n_layers=2), 2)
    files = {path.name: path.read_bytes() for path in first.parent.glob("m-*")}
    env = {"HF_HOME": str(tmp_path / "home"), "NO_PROXY": "*"}
    with serve(Hub({"org/tiny": files})) as hub:
        done = _run({**env, "HF_ENDPOINT": hub.url}, "inspect", f"hf:org/tiny/{first.name}", "--json")
        assert done.returncode == 0, done.stderr
        found = list((tmp_path / "home").rglob("*.gguf"))
        assert {path.name for path in found} == set(files)
        with ModelFile(min(found)) as file:
            assert len(file.shards) == 2
    offline = {**env, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    assert _run(offline, "inspect", "hf:org/tiny", "--json").returncode == 0
    done = _run({**offline, "HF_HOME": str(tmp_path / "empty")}, "inspect", "hf:org/tiny")
    assert done.returncode == 2
    assert done.stderr == "hybrid: org/tiny is not on this machine, and HF_HUB_OFFLINE says not to fetch it.\n"
