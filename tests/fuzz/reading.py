"""All that reads a model file before llama.cpp does, and inputs for it that a fuzzer can change byte by byte.

An input is a file's header and four bytes behind it: how many zeros follow in place of the weights, and in the highest
bit whether each further `GGUF` begins another shard. So it stays a few KiB long, and most of its bytes matter.
"""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random

from hybrid.apps.plan import PlanRequest, make_plan
from hybrid.cli.inspect import describe
from hybrid.errors import HybridError
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.model.splits import find_splits
from hybrid.schedule.presets import assumed_machine
from hybrid.tail.slice import tail_slice
from tests.fuzz.layout import Layout, Record
from tests.fuzz.mutations import Mutation, apply, draw

MOST_ZEROS = 1 << 22
SEVERAL = 1 << 31
"""Flag in the last four bytes: the input is a set of shards."""
LIMIT_S = 3.0
"""Processor time of one file, some twenty times what the largest of the seeds takes."""
MACHINE = "rtx3060"
UINT16 = 2
N_VOCAB = 8
"""Tokens of a seed."""


def read(path: Path) -> str:
    """Read, check, describe, plan and slice a model at every split; the sentence it was refused with, or nothing.

    Whatever else is raised is a bug. Raises AssertionError where it took too long, or the sentence is none.
    """
    start, said = time.process_time(), ""
    try:
        _read(path)
    except HybridError as error:
        said = str(error)
        assert said.endswith("."), said
    assert time.process_time() - start < LIMIT_S, "it took too long"
    return said


def _read(path: Path) -> None:
    with ModelFile(path) as file:
        spec = read_spec(file)
        for tensor in file.tensors.values():
            assert tensor.offset + tensor.n_bytes <= file.shards[tensor.shard].size, "a tensor outside its file"
        for key in file.fields:
            assert file.metadata[key] is not None
        for k in find_splits(spec).allowed[1:-1]:
            assert tail_slice(file, spec, k).segments()
        make_plan(spec, assumed_machine(MACHINE), PlanRequest(n_ctx=512))
    json.dumps(describe(str(path), None, "f16"))


def write(data: bytes, folder: Path) -> Path:
    """The file of an input, or its shards; the path of the first."""
    (flags,) = struct.unpack("<I", data[-4:].rjust(4, b"\0"))
    parts = re.split(b"(?=GGUF)", data[:-4])[1:] if flags & SEVERAL else []
    if len(parts) < 2:
        parts = [data[:-4]]
    for old in folder.iterdir():
        old.unlink()
    n = len(parts)
    names = ["m.gguf"] if n == 1 else [f"m-{i + 1:05d}-of-{n:05d}.gguf" for i in range(n)]
    paths = [folder / name for name in names]
    for path, part in zip(paths, parts, strict=True):
        with open(path, "wb") as out:
            out.write(part)
            out.truncate(len(part) + flags % MOST_ZEROS)
    return paths[0]


def seeds(layouts: Iterable[Layout]) -> Iterator[bytes]:
    """Inputs that are sound: each model whole, and in two shards."""
    for layout in layouts:
        yield encode(layout)
        yield encode(*_shards(layout))


def spoilt(layouts: Sequence[Layout], random: Random) -> bytes:
    """An input out of a sound model, spoilt as the whole program is tested with (`tests.fuzz.mutations`)."""
    layout = random.choice(layouts)
    return encode(apply(layout, draw(layout, random)))


def small(layout: Layout) -> Layout:
    """The same model with N_VOCAB tokens: most of a tiny model's header is its vocabulary."""
    tokens = layout.find("tokenizer.ggml.tokens")
    assert tokens is not None
    n = len(tokens.items())
    changes: list[Mutation] = [["resized", r.key.decode(), N_VOCAB] for r in layout.records if len(r.items()) == n]
    changes += [["reshaped", i, t.ne.index(n), N_VOCAB] for i, t in enumerate(layout.tensors) if n in t.ne]
    return apply(layout, changes)


def encode(*shards: Layout) -> bytes:
    """The input of a file, or of a set of shards."""
    files, n_zeros = [layout.build() for layout in shards], [layout.n_data for layout in shards]
    headers = b"".join(file[: max(0, len(file) - n)] for file, n in zip(files, n_zeros, strict=True))
    return headers + struct.pack("<I", max(n_zeros) % MOST_ZEROS | (SEVERAL if len(shards) > 1 else 0))


def _shards(layout: Layout) -> list[Layout]:
    half = len(layout.tensors) // 2
    parts = [Layout(layout.records, layout.tensors[:half]), Layout([], layout.tensors[half:])]
    for i, part in enumerate(parts):
        facts = {b"no": i, b"count": len(parts), b"tensors.count": len(layout.tensors)}
        said = [Record(b"split." + key, UINT16, struct.pack("<H", n)) for key, n in facts.items()]
        part.records = part.records + said
    return parts
