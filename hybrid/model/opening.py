"""Opening the files of a model, and finding the other shards of one."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.errors import BadFileError
from hybrid.model.gguf_header import Header
from hybrid.model.gguf_values import Metadata
from hybrid.model.not_gguf import piece_hint, what_it_is

MAX_SHARDS = 4096
_SHARD_NAME = re.compile(r"(?P<prefix>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class Shard:
    """One file of the set. `fd` stays open as long as the ModelFile."""

    path: Path
    fd: int
    size: int


def open_shard(path: Path) -> Shard:
    """Open one file for reading and check that it begins like a GGUF. Never blocks (FIFOs, devices are refused)."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            kind = "a directory" if path.is_dir() else "not a regular file"
            raise BadFileError(f"{path} is {kind}; a GGUF file is wanted.")
        # Between stat and open the path may become a FIFO; O_NONBLOCK keeps even that from blocking.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise BadFileError(f"{path} does not exist.") from None
    except PermissionError:
        raise BadFileError(f"{path} may not be read by this user (permission denied).") from None
    except (OSError, ValueError) as error:
        raise BadFileError(f"{path} cannot be opened: {getattr(error, 'strerror', None) or error}.") from error
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise BadFileError(f"{path} is not a regular file; a GGUF file is wanted.")
        problem = what_it_is(os.pread(fd, 512, 0))
        if problem:
            raise BadFileError(f"{path} is not a GGUF: {problem}{piece_hint(path.name)}.")
    except OSError as error:
        os.close(fd)
        raise BadFileError(f"{path} cannot be read: {error.strerror}.") from error
    except BaseException:
        os.close(fd)
        raise
    return Shard(path, fd, info.st_size)


def first_shard(path: Path) -> Path:
    """The first file of the set that `path` belongs to by its name; `path` itself where it is no shard."""
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None or int(match["no"]) == 1:
        return path
    first = path.with_name(f"{match['prefix']}-00001-of-{match['count']}.gguf")
    if os.path.exists(path) and not os.path.exists(first):
        raise BadFileError(f"{path} is a part of a sharded model whose first file {first.name} is missing beside it.")
    return first if os.path.exists(first) else path


def shard_paths(first: Path, metadata: Mapping[str, Any]) -> list[Path]:
    """All files of the set that `first` begins (llama.cpp's naming, `llama_split_path`)."""
    count = _split(metadata, "split.count", first, default=0)
    if count < 2:
        return [first]
    if count > MAX_SHARDS:
        raise BadFileError(f"{first} says it is one of {count} shards, which cannot be.")
    number = _split(metadata, "split.no", first)
    if number != 0:
        raise BadFileError(
            f"{first} is shard {number + 1} of {count}; give the first one (-00001-of-{count:05d}.gguf)."
        )
    match = _SHARD_NAME.fullmatch(first.name)
    if match is None or int(match["no"]) != 1 or int(match["count"]) != count:
        raise BadFileError(
            f"{first} is the first of {count} shards, so its name must end in -00001-of-{count:05d}.gguf."
        )
    paths = [first.with_name(f"{match['prefix']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    missing = [p.name for p in paths if not os.path.exists(p)]
    if missing:
        raise BadFileError(
            f"{first} is the first of {count} shards, but {', '.join(missing[:3])} is missing beside it."
        )
    return paths


def check_shards(paths: Sequence[Path], headers: Sequence[Header]) -> None:
    """Make sure that the files belong to one model: numbers, counts and tensor names agree."""
    if len(paths) == 1:
        return
    seen: dict[str, Path] = {}
    for i, (path, header) in enumerate(zip(paths, headers, strict=True)):
        metadata = Metadata(header.fields)
        number, count = _split(metadata, "split.no", path), _split(metadata, "split.count", path, default=len(paths))
        if number != i or count != len(paths):
            raise BadFileError(
                f"{path} says it is shard {number + 1} of {count}, but its name says {i + 1} of {len(paths)}; "
                "shards of different models are mixed."
            )
        for name in header.tensors:
            if name in seen:
                raise BadFileError(f"tensor {name!r} is in both {seen[name].name} and {path.name} of one model.")
            seen[name] = path
    expected = _split(Metadata(headers[0].fields), "split.tensors.count", paths[0], default=len(seen))
    if expected != len(seen):
        raise BadFileError(f"{paths[0]} and its shards hold {len(seen)} tensors, but it says {expected}.")


def _split(metadata: Mapping[str, Any], key: str, path: Path, default: int | None = None) -> int:
    """One of the integers a shard says about the set."""
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadFileError(f"{path} has no usable {key}, which a shard must say.")
    return value
