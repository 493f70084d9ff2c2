"""Finished answers on disk, each saved the moment it is there, so that a run killed at any time can go on.

A checkpoint is a text file of lines `CRC32 JSON`: first what the run depends on, then one answer a line, synced to
the disk as it is appended. A line that was cut off, and whatever follows it, is ignored.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import platformdirs

from hybrid.apps.summarize.work import Answer, Job
from hybrid.errors import BadRequestError
from hybrid.files import replacing

FORMAT = 1
"""Rises when an old checkpoint must not be continued by new code."""
NAMES = {"document": "the document", "model": "the model", "options": "the options", "prompts": "the prompts"}


def checkpoint_folder() -> Path:
    """Where checkpoints are kept: `hybrid/summaries` in the user's state directory."""
    return Path(platformdirs.user_state_dir("hybrid")) / "summaries"


class Checkpoint:
    """The answers of one run. Use as a context manager; `finish` removes the file once its summary is written."""

    def __init__(
        self,
        folder: Path,
        name: str,
        parts: Mapping[str, Any],
        *,
        resume: bool,
        key: str = "",
        kept: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the checkpoint of a document called `name` and a run that depends on `parts` (see NAMES).

        Documents of one name are told apart by `key`, a full path for instance. `kept` are JSON-ready values that a
        run goes on with although they may be others by now; afterwards they are those the run began with.

        Without `resume`, and where no run with the same parts was interrupted, it begins empty; an interrupted run is
        set aside until one is finished, for who only forgot to resume it. `notes` says what a person should know.
        Raises BadRequestError while another process works on the same, OSError where the folder cannot be used.
        """
        self.notes: list[str] = []
        self.trouble = ""
        self._answers: dict[str, tuple[str, Answer]] = {}
        self._head = {"format": FORMAT, **{key: _digest(value) for key, value in parts.items()}}
        self.kept = dict(kept or {})
        self._prefix = _digest(key or name)[:16]
        self.path = folder / f"{self._prefix}-{_digest(self._head)[:16]}.jsonl"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        self._file: IO[bytes] = os.fdopen(descriptor, "r+b")
        try:
            self._begin(name, resume)
        except BaseException:
            self.close()
            raise

    def _begin(self, name: str, resume: bool) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise BadRequestError(f"{name} is being summarised by another process right now.") from e
        if resume:
            self._take_back()
        keep = self._load() if resume else 0
        if resume and not keep:
            self._say_why(name)
        elif not resume and (old := self._file.read()):
            self._set_aside(old)
            self.notes.append(f"Starting {name} afresh; an interrupted run was there, which --resume still continues.")
        self._file.seek(keep)
        self._file.truncate()
        if not keep:
            self._append({**self._head, "kept": self.kept})

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, job: Job) -> Answer | None:
        """The saved answer to exactly this job, if there is one."""
        digest, answer = self._answers.get(job.id, ("", None))
        return answer if digest == job.digest else None

    def add(self, job: Job, answer: Answer) -> None:
        """Save an answer; it is on the disk when this returns, unless `trouble` says that none is saved any more."""
        if self.trouble:
            return
        try:
            self._append({"prompt": job.digest, **asdict(answer)})
        except OSError as e:  # a full disk is no reason to lose what is still to come
            n = len(self)
            saved = {0: "No answer is", 1: "Only one answer is"}.get(n, f"Only {n} answers are")
            self.trouble = f"{saved} saved: {e.strerror} ({self.path.parent})."
        else:
            self._answers[job.id] = job.digest, answer

    def finish(self) -> None:
        """Forget this run and older ones of the same document."""
        with suppress(OSError):  # what stays is forgotten by the next run
            for path in self.path.parent.glob(f"{self._prefix}-*"):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file, which stays. Harmless when repeated."""
        with suppress(OSError):  # what a full disk did not take
            self._file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _aside(self) -> Path:
        return self.path.with_suffix(".aside")

    def _set_aside(self, old: bytes) -> None:
        """Keep what an interrupted run had, unless an earlier one had more."""
        if old.count(b"\n") > _n_lines(self._aside):
            with replacing(self._aside, "wb") as file:
                file.write(old)

    def _take_back(self) -> None:
        """Go on with the run that was set aside, where it had come further than the one after it."""
        if _n_lines(self._aside) > _n_lines(self.path):
            self._file.truncate()
            self._file.write(self._aside.read_bytes())
            self._file.seek(0)

    def _load(self) -> int:
        """Read the answers; returns the bytes that are sound, 0 if the first line is not ours."""
        sound = 0
        for record, end in _records(self._file):
            if sound == 0:
                kept = record.pop("kept", None)
                if record != self._head or not isinstance(kept, dict):
                    return 0
                self.kept = kept
            else:
                try:
                    self._answers[record["id"]] = record.pop("prompt"), Answer(**record)
                except (KeyError, TypeError):
                    return sound
            sound = end
        return sound

    def _say_why(self, name: str) -> None:
        """Tell a resumed run that cannot go on what has changed."""
        others = [p for p in self.path.parent.glob(f"{self._prefix}-*.jsonl") if p != self.path]
        for path in sorted(others, key=lambda p: p.stat().st_mtime, reverse=True):
            with open(path, "rb") as f:
                head = next((record for record, _ in _records(f)), {})
            changed = [word for key, word in NAMES.items() if head.get(key) != self._head[key]]
            what = " and ".join(changed) if head.get("format") == FORMAT and changed else "the program"
            self.notes.append(f"Starting {name} afresh: {what} changed since the run that was interrupted.")
            return

    def _append(self, record: Mapping[str, Any]) -> None:
        data = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
        self._file.write(b"%08x %s\n" % (zlib.crc32(data), data))
        self._file.flush()
        os.fsync(self._file.fileno())


def _n_lines(path: Path) -> int:
    """Lines of a file; 0 where there is none."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _records(file: IO[bytes]) -> Iterator[tuple[dict[str, Any], int]]:
    """(record, offset of its end) of every line before the first damaged one."""
    end = 0
    for line in file:
        end += len(line)
        crc, _, data = line.rstrip(b"\n").partition(b" ")
        if not line.endswith(b"\n") or crc != b"%08x" % zlib.crc32(data):
            return
        try:
            record = json.loads(data)
        except (ValueError, RecursionError):
            return
        if not isinstance(record, dict):
            return
        yield record, end


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
