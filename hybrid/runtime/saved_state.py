"""The state of a sequence in a file, so that a conversation goes on tomorrow without being read again.

Layout: magic (8 bytes), version and header length (two little-endian uint32), the SHA-256 of all that follows, the
header as JSON (`model`, `placement`, `versions`, `tokens`, `head_bytes`, `tail_bytes`), then what each half made of the
tokens: rows of K and V (`hybrid.head.kv.state`), and llama.cpp's sequence state. Nothing of it reaches either half
before header, length and checksum have been found right.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from hybrid.errors import BadFileError, BadRequestError
from hybrid.files import replacing
from hybrid.runtime.engine import Engine, State
from hybrid.schedule.identity import Identity
from hybrid.schedule.kv_size import cached_tokens, kv_bytes_per_token
from hybrid.schedule.placement import Placement

MAGIC = b"HYBSTATE"
VERSION = 1
PREFIX = struct.Struct("<8sII32s")
MOST_HEADER_BYTES = 64 << 20
THREADS = ("n_threads_head", "n_threads_tail", "n_threads_tail_batch", "n_threads_attend")
"""Of a placement, what does not change the state."""


def save_state(engine: Engine, path: Path, identity: Identity, seq: int = 0) -> int:
    """Write what `engine` holds of `seq` to `path`, whole or not at all; returns the file's bytes. Raises OSError, and
    BadRequestError where there is nothing to save."""
    state = engine.save(seq)
    if not state.tokens:
        raise BadRequestError("There is nothing to save: the context is empty.")
    header = json.dumps(
        {
            **_belonging(engine.placement, identity),
            "tokens": state.tokens,
            "head_bytes": None if state.head is None else len(state.head),
            "tail_bytes": None if state.tail is None else len(state.tail),
        }
    ).encode()
    parts = [header, *(half for half in (state.head, state.tail) if half is not None)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    with replacing(path, "wb") as file:
        file.write(PREFIX.pack(MAGIC, VERSION, len(header), digest.digest()))
        for part in parts:
            file.write(part)
        return file.tell()


def restore_state(engine: Engine, path: Path, identity: Identity, seq: int = 0) -> int:
    """Replace `seq` by a saved state; returns its number of tokens.

    Raises FileNotFoundError or another OSError, BadFileError for a file that is damaged, BadRequestError for one of
    another model, placement or version (the message is a clause: "it was saved with …"). `seq` is then as it was, or
    empty where one half refused what the other had taken.
    """
    with open(path, "rb") as file:
        state = _read(file, engine.placement, identity)
    engine.load(state, seq)
    return len(state.tokens)


def state_bytes(engine: Engine, n_tokens: int) -> int:
    """About what the file of so many tokens takes, by arithmetic."""
    placement = engine.placement
    return sum(
        min(n_tokens, cached_tokens(layer, placement)) * kv_bytes_per_token(layer, placement.kv_dtype)
        for layer in engine.spec.layers
    )


def _read(file: IO[bytes], placement: Placement, identity: Identity) -> State:
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(PREFIX.size)
    if len(prefix) < PREFIX.size:
        raise BadFileError("The saved state is too short to be one.")
    magic, version, header_bytes, sha256 = PREFIX.unpack(prefix)
    if magic != MAGIC or header_bytes > min(size, MOST_HEADER_BYTES):
        raise BadFileError("The saved state is damaged, or no saved state at all.")
    if version != VERSION:
        raise BadRequestError("it was saved by another version of this program")
    encoded = file.read(header_bytes)
    header = _header(encoded)
    for what, wanted in _belonging(placement, identity).items():
        if header.get(what) != wanted:
            raise BadRequestError(f"it was saved with {_difference(what, header.get(what), wanted)}")
    halves = [header.get("head_bytes"), header.get("tail_bytes")]
    lengths = [n for n in halves if n is not None]
    if not all(type(n) is int and n >= 0 for n in lengths) or PREFIX.size + header_bytes + sum(lengths) != size:
        raise BadFileError("The saved state is damaged: its length does not match its header.")
    digest = hashlib.sha256(encoded)
    parts: list[bytes | None] = []
    for n in halves:
        part = None if n is None else file.read(n)
        digest.update(part or b"")
        parts.append(part)
    if digest.digest() != sha256:
        raise BadFileError("The saved state is damaged: its checksum does not match.")
    tokens = header["tokens"]
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise BadFileError("The saved state is damaged: its header makes no sense.")
    return State(tuple(tokens), *parts)


def _header(encoded: bytes) -> dict[str, Any]:
    try:
        header = json.loads(encoded)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or "tokens" not in header:
        raise BadFileError("The saved state is damaged: its header makes no sense.")
    return header


def _belonging(placement: Placement, identity: Identity) -> dict[str, Any]:
    """What must be the same when the state is used."""
    placed = {name: value for name, value in placement.to_dict().items() if name not in THREADS}
    return {"model": identity.model, "versions": dict(identity.versions), "placement": placed}


def _difference(what: str, saved: Any, wanted: Any) -> str:
    """For a person: what of `what` was another."""
    if what == "model" or not isinstance(saved, Mapping):
        return f"another {what}"
    names = [name for name in wanted if saved.get(name) != wanted[name]]
    if not names:
        return f"another {what}"
    if what == "placement":
        return f"{names[0]} {saved.get(names[0])}, now {wanted[names[0]]}"
    return f"another version of {names[0]}"
