"""Whether llama.cpp survives a file: a short-lived process finds out before this one lets llama.cpp near it.

llama.cpp ends the process over much that only it can judge (a failed assertion is an abort, and so is an exception that
leaves a C function). The process opens the model without its weights, makes a context, which reaches the checks of
tensors and graphs, and uses the vocabulary in every way this program does. What it survived is remembered by the
file's identity, so that the next start costs a few system calls. Of an architecture whose tensors our own reader does
not check, a token is computed too: llama.cpp finds some of its types wrong only then.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hybrid import errors
from hybrid.errors import BadFileError, Cancelled, EngineError, HybridError, OutOfMemoryError, UnsupportedError
from hybrid.model.file import ModelFile
from hybrid.printable import printable
from hybrid.schedule.machine_store import cache_dir
from hybrid.tail.llama import LLAMA_CPP_PYTHON

COMMAND = (sys.executable, "-P", "-m", "hybrid.tail.preflight_child")
VERSION = 1
"""Of what is tried; another version's verdicts do not count."""
MOST_VERDICTS = 2000
CPU_S, CPU_S_PER_MIB, CPU_S_PER_GIB = 6, 2, 8
"""Seconds the process may compute, for each MiB of metadata (Gemma's 262,144 tokens, 8 MiB, take one) and for each GiB
of weights, of which only an architecture that our own reader does not check has a token computed."""
WALL_S, WALL_S_PER_GIB = 120.0, 30.0
"""Seconds it may take where the disk is slow."""
MEMORY_BYTES, MEMORY_FACTOR, WEIGHTS_SHARE = 1 << 30, 64, 8
"""What it may allocate, for each byte of metadata, and as a share of the weights (which are mapped)."""
POLL_S = 0.05
SHOWN = 240
"""Characters of llama.cpp's words that a message repeats."""
NO_GPUS = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1", "GGML_VK_VISIBLE_DEVICES": ""}


def preflight(file: ModelFile, k: int, machine: str, cancelled: Callable[[], bool] | None = None) -> None:
    """Make sure that llama.cpp can open layers k.. of `file` (k = L: its vocabulary) and live.

    `machine` is what a verdict holds for (`Identity.machine`). Raises BadFileError in one sentence where it cannot,
    UnsupportedError where it could but the model is of another kind or llama.cpp itself is broken, Cancelled on Ctrl-C
    and where `cancelled` says so; and EngineError with llama.cpp's own reason.
    """
    verdict = cache_dir() / "preflight" / _key(file, k, machine)
    if os.path.exists(verdict):  # pathlib's would raise where the folder is another user's
        return
    metadata = sum(len(field.raw) for field in file.fields.values())
    weights = sum(tensor.n_bytes for tensor in file.tensors.values())
    task = {
        "path": os.path.abspath(file.path),
        "k": k,
        "cpu_s": CPU_S + CPU_S_PER_MIB * (metadata >> 20) + CPU_S_PER_GIB * (weights >> 30),
        "wall_s": WALL_S + WALL_S_PER_GIB * (weights >> 30),
        "memory_bytes": MEMORY_BYTES + MEMORY_FACTOR * metadata + weights // WEIGHTS_SHARE,
    }
    try:
        _try(file.path, task, cancelled or (lambda: False))
    except KeyboardInterrupt:
        raise Cancelled("Loading was interrupted.") from None
    _remember(verdict)


def _key(file: ModelFile, k: int, machine: str) -> str:
    """Everything a verdict depends on."""
    parts: list[Any] = [VERSION, LLAMA_CPP_PYTHON, machine, k, _library()]
    for shard in file.shards:
        info = os.fstat(shard.fd)
        parts.append([os.path.realpath(shard.path), info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _library() -> list[tuple[str, int, int]]:
    """Name, size and time of llama.cpp's libraries: one that was built again is another one."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return []
    with suppress(OSError), os.scandir(Path(spec.origin).parent / "lib") as entries:
        return sorted((e.name, e.stat().st_size, e.stat().st_mtime_ns) for e in entries if e.is_file())
    return []


def _remember(verdict: Path) -> None:
    """An empty file with the verdict's name, there from one moment to the next. A cache that cannot be written costs
    only the next start; the oldest verdicts make room."""
    with suppress(OSError):
        verdict.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(verdict, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        kept = list(verdict.parent.iterdir())
        if len(kept) > MOST_VERDICTS:
            for old in sorted(kept, key=lambda path: path.stat().st_mtime)[: len(kept) // 2]:
                old.unlink()


def _try(path: Path, task: dict[str, Any], cancelled: Callable[[], bool]) -> None:
    """Run the process to its end and raise what came of it. It is ended on the way out, whatever happens; Ctrl-C does
    not reach it by itself, for it has a session of its own."""
    process = subprocess.Popen(
        COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **NO_GPUS, "GGML_NO_BACKTRACE": "1"},
        start_new_session=True,
    )
    with process:
        try:
            code, said, words = _talk(process, task, cancelled)
        finally:
            process.kill()
    lines = [json.loads(line) for line in said.splitlines()]
    last = lines[-1] if lines else {}
    if "done" in last and code == 0:
        return
    if "failed" in last:
        raise _failure(path, task, last["failed"], last["message"])
    raise _death(path, code, last.get("stage"), _last_words(words.decode(errors="replace")))


def _talk(
    process: subprocess.Popen[bytes], task: dict[str, Any], cancelled: Callable[[], bool]
) -> tuple[int, bytes, bytes]:
    """Give it its task. Returns the exit code (that of SIGXCPU where it took too long), stdout and stderr."""
    deadline = time.monotonic() + task["wall_s"]
    asked: bytes | None = json.dumps(task).encode()
    while time.monotonic() < deadline:
        try:
            said, words = process.communicate(asked, POLL_S)
            return process.returncode, said, words
        except subprocess.TimeoutExpired:
            asked = None  # it has been sent
        if cancelled():
            raise Cancelled("Loading was interrupted.")
    return -signal.SIGXCPU, b"", b""


def _failure(path: Path, task: dict[str, Any], kind: str, message: str) -> HybridError:
    """What the process itself raised."""
    known: type[HybridError] = getattr(errors, kind, EngineError)
    if issubclass(known, OutOfMemoryError):  # of what a description may need, which no other placement changes
        return BadFileError(
            f"{path} cannot be used: llama.cpp needs more than {task['memory_bytes'] >> 20} MiB for its metadata alone."
        )
    return known(message)


def _death(path: Path, code: int, stage: str | None, words: str) -> HybridError:
    """A process that ended without a word."""
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    if code == -signal.SIGXCPU:
        return BadFileError(f"{path} cannot be used: llama.cpp was not done reading its metadata in time.")
    if stage is None:
        return EngineError(f"The process that tries {path.name} before it is loaded could not run ({name}): {words}.")
    if stage == "library":
        return UnsupportedError(
            f"llama.cpp as it is built here runs no model on this processor: it ends with {name}. Build it again with "
            '`CXXFLAGS="-mno-amx-tile -mno-amx-int8" pip install --no-cache-dir --force-reinstall --no-deps '
            f"llama-cpp-python=={LLAMA_CPP_PYTHON}`."
        )
    if code == -signal.SIGKILL:
        return BadFileError(f"{path} was not loaded: the process that tried it was killed, for want of memory perhaps.")
    return BadFileError(f"{path} cannot be used: llama.cpp would end the process with {name} ({words}).")


def _last_words(words: str) -> str:
    """The line that says most about a death: a failed assertion, an exception's text, or the last line of all."""
    lines = [line.strip() for line in words.splitlines() if line.strip(" .")]
    telling = [line for line in lines if re.search(r"GGML_ASSERT|what\(\):|Error: |: error", line)]
    line = (telling or lines or ["it said nothing"])[-1]
    line = re.sub(r"^/\S*/([\w.-]+:\d+: )", r"\1", line)  # where somebody once compiled it
    return printable(line)[:SHOWN].rstrip(" .")
