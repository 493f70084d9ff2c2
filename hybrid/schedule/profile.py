"""Profile: what was measured of a model on this machine, remembered in the user's cache directory.

A versioned JSON file for each model and machine. Whatever else it holds (another version's, another file's, garbage) is
ignored with one line; where it cannot be written, only the memory is lost.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

from hybrid.files import replacing
from hybrid.schedule.identity import Identity
from hybrid.schedule.machine_store import cache_dir
from hybrid.schedule.placement import Placement
from hybrid.schedule.rates import Coefficients

VERSION = 2
"""Of the file and of what its seconds mean: before 2, llama.cpp computed with two teams of threads, and more slowly."""
MOST_ALIKE, MOST_RECORDS = 20, 600
"""Records kept of one placement, and in all: the youngest."""
PATIENCE_S = 2.0
"""How long to wait for another process that writes the same profile; then this record is lost rather than a chat held
up."""

LEAST_S, MOST_S = 1e-9, 1e6
"""Seconds that cannot be measured lie beyond these."""

Source = Literal["run", "tune"]
"""A person's own chat or generation, or a measurement for its own sake."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Seconds that one run took, or why it failed."""

    placement: Placement
    source: Source
    at: str
    """ISO date and time."""
    depth: int = 0
    """Tokens in each sequence's context where decoding began."""
    decode_s: tuple[float, ...] = ()
    """Seconds a step (a token of every sequence), one a repeat."""
    n_prompt: int = 0
    """Tokens of each sequence that were evaluated at once, from an empty context."""
    prefill_s: tuple[float, ...] = ()
    """Seconds for those, to the first token."""
    predicted_s: float | None = None
    """The seconds of one that were predicted before anything of this placement was measured."""
    wall_s: float | None = None
    """The whole process, where it was one of its own."""
    vram_budget: int | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    """The most that was held."""
    failure: str = ""
    """The kind; a failed run has no seconds."""
    message: str = ""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Record:
        """The inverse of `asdict`. Raises TypeError, KeyError or ValueError for what is none."""
        parts: dict[str, Any] = {"placement": Placement.from_dict(values["placement"])}
        for name in ("decode_s", "prefill_s"):
            parts[name] = tuple(float(value) for value in values[name])
        if not all(_seconds(value) for name in ("decode_s", "prefill_s") for value in parts[name]):
            raise ValueError("seconds that cannot be")
        datetime.fromisoformat(values["at"])
        found = cls(**{**values, **parts})
        for name, value in asdict(found).items():
            if not _sound(name, value):
                raise ValueError(f"{name} cannot be {value!r}")
        return found


def _seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and LEAST_S < value < MOST_S


def _sound(name: str, value: object) -> bool:
    """Whether a record may have it; of what has a check of its own (the placement, times, samples) nothing is asked."""
    if name in ("predicted_s", "wall_s"):
        return value is None or _seconds(value)
    if name in ("depth", "n_prompt", "vram_budget", "device_bytes", "host_bytes"):
        missing = value is None and name not in ("depth", "n_prompt")
        return missing or (type(value) is int and 0 <= value < 1 << 60)
    if name == "source":
        return value in get_args(Source)
    return isinstance(value, str) or name not in ("failure", "message")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """All that is remembered."""

    records: tuple[Record, ...] = ()
    rates: Mapping[str, Coefficients] = field(default_factory=dict)
    """The CostModel's, fitted to measurements, by the head's device."""
    notes: tuple[str, ...] = ()
    """One line where a file was ignored."""


class ProfileStore:
    """The profile of one model on this machine."""

    def __init__(self, identity: Identity, folder: Path | None = None) -> None:
        self.identity = identity
        folder = cache_dir() / "profiles" if folder is None else folder
        self.path = folder / f"{identity.model}-{identity.machine}.json"

    def load(self) -> Profile:
        """What is remembered; empty where there is nothing, or nothing of use (which `notes` then says)."""
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            return Profile()
        except (OSError, UnicodeDecodeError):
            return Profile(notes=(f"The saved speeds in {self.path} cannot be read; they are ignored.",))
        try:
            stored = json.loads(text)
            if stored["version"] != VERSION or stored["versions"] != dict(self.identity.versions):
                return Profile(notes=(f"The saved speeds in {self.path} are from another version; they are ignored.",))
            if (stored["model"], stored["machine"]) != (self.identity.model, self.identity.machine):
                return Profile(notes=(f"The saved speeds in {self.path} are of another file; they are ignored.",))
            records = tuple(Record.from_dict(values) for values in stored["records"])
            rates = {device: Coefficients.from_dict(values) for device, values in stored["rates"].items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return Profile(notes=(f"The saved speeds in {self.path} are damaged; they are ignored.",))
        return Profile(records=records, rates=rates)

    def add(self, *records: Record, rates: Mapping[str, Coefficients] | None = None) -> None:
        """Remember more. What other processes add at the same time is kept too; a file that cannot be written costs
        only the memory."""
        with suppress(OSError), self._locked():
            before = self.load()
            self._write(_youngest([*before.records, *records]), {**before.rates, **(rates or {})})

    def _write(self, records: Iterable[Record], rates: Mapping[str, Coefficients]) -> None:
        stored = {
            "version": VERSION,
            "versions": dict(self.identity.versions),
            "model": self.identity.model,
            "machine": self.identity.machine,
            "rates": {device: asdict(one) for device, one in rates.items()},
            "records": [asdict(record) for record in records],
        }
        with replacing(self.path) as file:
            json.dump(stored, file)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone with the file, among processes. Raises OSError if that cannot be had."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.005)
            yield
        finally:
            os.close(lock)


def now() -> str:
    """The time of a record."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _youngest(records: list[Record]) -> list[Record]:
    """Those that are kept, in their order."""
    seen: Counter[Placement] = Counter()
    kept: list[Record] = []
    for record in reversed(records):
        seen[record.placement] += 1
        if seen[record.placement] <= MOST_ALIKE and len(kept) < MOST_RECORDS:
            kept.append(record)
    return kept[::-1]
