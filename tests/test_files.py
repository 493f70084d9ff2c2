"""Files are written whole or not at all, whatever the disk says; and nothing depends on a cache."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid.apps.summarize.document import read_document
from hybrid.cli.config_file import read_config
from hybrid.cli.session import read_prompt
from hybrid.errors import BadRequestError
from hybrid.files import replacing, write_atomically
from hybrid.runtime.template import chosen_template
from hybrid.schedule.identity import Identity
from hybrid.schedule.placement import Placement
from hybrid.schedule.presets import assumed_machine
from hybrid.schedule.profile import ProfileStore, Record, now
from tests.tiny import write_tiny


def full(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("step", ["fsync", "replace", "fchmod"])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "f"
    path.write_text("before")
    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, size: int) -> None:
    """A limit on file sizes fails as a full disk does: amid a large write, or when a small one is flushed at last."""
    path = tmp_path / "f"
    path.write_text("")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, before[1]))
    try:
        with pytest.raises(OSError, match="too large"), replacing(path) as file:
            file.write("x" * size)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == ""
    assert list(tmp_path.iterdir()) == [path]


def a_record() -> Record:
    placement = Placement(device="cpu", n_gpu_layers=0, n_ctx=64)
    return Record(placement=placement, source="run", at=now(), decode_s=(1.0,))


def run_limited(tmp_path: Path, environment: dict[str, str], fsize: int | None = None) -> None:
    """A generation succeeds and says nothing about disks."""
    model = write_tiny(tmp_path / "m.gguf", n_layers=2, n_embd=64, n_heads=2, n_kv_heads=1, head_dim=32, n_ff=64)
    command = [
        sys.executable,
        "-m",
        "hybrid.cli",
        "generate",
        str(model),
        "-p",
        "a",
        "-n",
        "40",
        "-t",
        "1",
        "-ngl",
        "0",
    ]

    def limit() -> None:
        if fsize is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (fsize, fsize))

    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, preexec_fn=limit, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "hybrid: " not in done.stderr
    assert "cache" not in done.stderr


def test_a_home_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    nowhere = tmp_path / "file"
    nowhere.write_text("")
    run_limited(tmp_path, {"HOME": str(nowhere), "XDG_CACHE_HOME": str(nowhere), "XDG_DATA_HOME": str(nowhere)})


def test_a_disk_without_room_for_a_byte_is_no_error(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    run_limited(tmp_path, {"XDG_CACHE_HOME": str(cache)}, fsize=0)
    assert not [path for path in cache.rglob("*") if path.is_file() and path.stat().st_size]


def test_a_cache_of_another_user_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: Any, **kwargs: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    store = ProfileStore(Identity("m", "here", {}), tmp_path)
    record = Record(
        placement=Placement(device="cpu", n_gpu_layers=0, n_ctx=64), source="run", at=now(), decode_s=(1.0,)
    )
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        store.add(record)
    assert store.load().records == ()
    store.add(record)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", denied)
        assert "cannot be read" in store.load().notes[0]


def test_processes_that_write_one_profile_at_once_lose_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from hybrid.schedule.identity import Identity\n"
        "from hybrid.schedule.placement import Placement\n"
        "from hybrid.schedule.profile import ProfileStore, Record, now\n"
        "store = ProfileStore(Identity('m', 'here', {}), Path(sys.argv[1]))\n"
        "for i in range(8):\n"
        "    placement = Placement(device='cpu', n_gpu_layers=i, n_ctx=int(sys.argv[2]))\n"
        "    store.add(Record(placement=placement, source='run', at=now(), decode_s=(1.0,)))\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(64 + i)]) for i in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    store = ProfileStore(Identity("m", "here", {}), tmp_path)
    assert len(store.load().records) == 24
    json.loads(store.path.read_text())


@pytest.mark.parametrize(
    "read",
    [
        read_document,
        lambda path: read_prompt(None, path),
        lambda path: chosen_template(Path(path)),
        assumed_machine,
        lambda path: read_config(Path(path)),
    ],
)
def test_what_never_ends_is_refused(read: Callable[[str], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid.files.MOST_BYTES", 3 << 20)
    if not Path("/dev/zero").exists():
        pytest.skip("no /dev/zero here")
    with pytest.raises(BadRequestError, match="/dev/zero cannot be read: File too large"):
        read("/dev/zero")


def test_a_lock_goes_with_the_process_that_held_it(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from hybrid.schedule.identity import Identity\n"
        "from hybrid.schedule.profile import ProfileStore\n"
        "with ProfileStore(Identity('m', 'here', {}), Path(sys.argv[1]))._locked():\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    store = ProfileStore(Identity("m", "here", {}), tmp_path)
    record = Record(
        placement=Placement(device="cpu", n_gpu_layers=0, n_ctx=64), source="run", at=now(), decode_s=(1.0,)
    )
    store.add(record)
    assert store.load().records == (record,)


def test_readers_never_see_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    texts = {"a" * 50_000, "b" * 70_000}
    path.write_text("a" * 50_000)
    over = threading.Event()

    def write() -> None:
        for _ in range(30):
            for text in texts:
                write_atomically(path, text)
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not over.is_set():
        assert path.read_text() in texts
    writer.join()
