"""Ways to spoil a GGUF. A mutation is a list of JSON values, so that one which ever did harm can be kept in a file."""

from __future__ import annotations

import struct
import tomllib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from hybrid.model.gguf_values import SCALARS
from tests.fuzz.layout import ARRAY, STRING, Layout, Record, Tensor, n_bytes, scalar, text

Mutation = list[Any]
INTEGERS = [0, 1, 2, 3, 5, 8, 16, 31, 32, 64, 127, 128, 255, 256, 500, 513, 4096, 65535, 1 << 20, 2**31 - 1, 2**31]
INTEGERS += [2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
FLOATS = [0.0, -1.0, 1e-45, 1e-30, 0.5, 3.0, 1e30, 3.4e38, float("inf"), float("-inf"), float("nan")]
TEXTS = ["", "x", "llama", "gpt2", "bert", "t5", "rwkv", "plamo2", "no_vocab", "none", "default", "qwen2", "llama-bpe"]
TEXTS += ["yarn", "longrope", "linear", "\x1b[2J", "\n\n", "é" * 3000, "{{ '%2000000000d' % 1 }}", "{% for %}", "\0"]
WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text())
ARCHITECTURES = WORDS["architectures"].split()
KEYS = WORDS["keys"].split()
OTHER_KEYS = WORDS["other_keys"].split()


def draw(layout: Layout, random: Random) -> list[Mutation]:
    """One to three mutations of a file."""
    drawn: list[Mutation] = []
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        kind = random.choices(list(MUTATIONS), [weight for _, _, weight in MUTATIONS.values()])[0]
        arguments = MUTATIONS[kind][0](layout, random)
        if arguments is not None:
            drawn.append([kind, *arguments])
    return drawn


def apply(layout: Layout, mutations: list[Mutation]) -> Layout:
    """A spoilt copy. What a mutation names and an earlier one took away is left alone."""
    spoilt = layout.copy()
    for kind, *arguments in mutations:
        MUTATIONS[kind][1](spoilt, *arguments)
    return spoilt


# -- values -----------------------------------------------------------------------------------------------------------


def _number(random: Random, kind: int, old: bytes | None = None) -> str:
    """A value of that scalar type, as hex: one at some border, or near the old one."""
    _, code, _ = SCALARS[kind]
    if code in "fd":
        values = list(FLOATS)
        if old is not None:
            values += [-struct.unpack("<" + code, old)[0]] * 2
        return scalar(kind, random.choice(values)).hex()
    near: list[int] = []
    if old is not None:
        was = int.from_bytes(old, "little")
        near = [was - 1, was + 1, was * 2, was // 2, was + 32, was // 3]
    return scalar(kind, random.choice(near if near and random.random() < 0.5 else INTEGERS)).hex()


def _any_value(random: Random) -> tuple[int, str]:
    """A value of any type."""
    kind = random.choice([*SCALARS, 4, 4, 4, 6, 7, STRING, STRING, ARRAY, ARRAY])
    if kind == STRING:
        return kind, text(random.choice(TEXTS).encode()).hex()
    if kind == ARRAY:
        item, n = random.choice([4, 5, 6, 7, STRING]), random.choice([0, 1, 2, 4, 5, 6, 7, 366, 600])
        one = text(random.choice(TEXTS[:13]).encode()) if item == STRING else bytes.fromhex(_number(random, item))
        return kind, (struct.pack("<IQ", item, n) + one * n).hex()
    return kind, _number(random, kind)


def _record(layout: Layout, random: Random) -> str:
    """A record's key, hyperparameters twice as often."""
    keys = [r.key.decode() for r in layout.records]
    return random.choice([*keys, *(key for key in keys if not key.startswith(("general.", "tokenizer.")))])


def _prefix(layout: Layout) -> str:
    architecture = layout.find("general.architecture")
    return "" if architecture is None else architecture.value[8:].decode(errors="replace")


def _draw_value(layout: Layout, random: Random) -> list[Any] | None:
    key = _record(layout, random)
    record = layout.find(key)
    assert record is not None
    if record.kind in SCALARS:
        return [key, record.kind, _number(random, record.kind, record.value)]
    if record.kind == STRING:
        return [key, STRING, text(random.choice(TEXTS).encode()).hex()]
    return [key, *_any_value(random)]


def _draw_retyped(layout: Layout, random: Random) -> list[Any]:
    return [_record(layout, random), *_any_value(random)]


def _draw_added(layout: Layout, random: Random) -> list[Any]:
    key = random.choice(OTHER_KEYS) if random.random() < 0.3 else f"{_prefix(layout)}.{random.choice(KEYS)}"
    return [key, *_any_value(random)]


def _set_value(layout: Layout, key: str, kind: int, value: str) -> None:
    record = layout.find(key)
    if record is None:
        layout.records.append(Record(key.encode(), kind, bytes.fromhex(value)))
    else:
        record.kind, record.value = kind, bytes.fromhex(value)


def _draw_item(layout: Layout, random: Random) -> list[Any] | None:
    arrays = [record for record in layout.records if record.array is not None and record.array[1]]
    if not arrays:
        return None
    record = random.choice(arrays)
    assert record.array is not None
    kind, n = record.array
    value = text(random.choice(TEXTS).encode()).hex() if kind == STRING else _number(random, kind)
    if random.random() < 0.3:
        value = random.choice(record.items()).hex()  # one that is there already
    return [record.key.decode(), random.randrange(n), value]


def _set_item(layout: Layout, key: str, i: int, value: str) -> None:
    record = layout.find(key)
    if record is None or record.array is None:
        return
    items = record.items()
    if i < len(items):
        items[i] = bytes.fromhex(value)
        record.value = record.value[:12] + b"".join(items)


def _draw_resized(layout: Layout, random: Random) -> list[Any] | None:
    arrays = [record for record in layout.records if record.array is not None and record.array[1]]
    if not arrays:
        return None
    record = random.choice(arrays)
    assert record.array is not None
    n = record.array[1]
    return [record.key.decode(), random.choice([0, 1, n - 1, n + 1, n // 2, 2 * n])]


def _resize(layout: Layout, key: str, n: int) -> None:
    record = layout.find(key)
    if record is None or record.array is None or not record.items():
        return
    items = record.items()
    items = (items * (n // len(items) + 1))[:n]
    record.value = struct.pack("<IQ", record.array[0], n) + b"".join(items)


def _draw_claimed(layout: Layout, random: Random) -> list[Any] | None:
    arrays = [record for record in layout.records if record.array is not None]
    return [random.choice(arrays).key.decode(), random.choice(INTEGERS)] if arrays else None


def _claim(layout: Layout, key: str, n: int) -> None:
    record = layout.find(key)
    if record is not None and record.array is not None:
        record.value = struct.pack("<IQ", record.array[0], n) + record.value[12:]


def _rename_architecture(layout: Layout, name: str) -> None:
    old = _prefix(layout)
    for record in layout.records:
        if record.key.startswith(f"{old}.".encode()):
            record.key = f"{name}.".encode() + record.key[len(old) + 1 :]
    _set_value(layout, "general.architecture", STRING, text(name.encode()).hex())


def _drop_record(layout: Layout, key: str) -> None:
    layout.records = [record for record in layout.records if record.key != key.encode()]


def _double_record(layout: Layout, key: str) -> None:
    record = layout.find(key)
    if record is not None:
        layout.records.append(record)


def _rename_record(layout: Layout, key: str, name: str) -> None:
    record = layout.find(key)
    if record is not None:
        record.key = bytes.fromhex(name)


# -- tensors ----------------------------------------------------------------------------------------------------------


def _tensor(layout: Layout, random: Random) -> int:
    return random.randrange(max(1, len(layout.tensors)))


def _on_tensor(change: Callable[..., None]) -> Callable[..., None]:
    def at(layout: Layout, i: int, *arguments: Any) -> None:
        if layout.tensors:
            change(layout, layout.tensors[i % len(layout.tensors)], *arguments)

    return at


@_on_tensor
def _reshape(layout: Layout, tensor: Tensor, dim: int, n: int) -> None:
    """Another size, and as much data as that takes."""
    ne = [*tensor.ne, *[1] * (dim + 1 - len(tensor.ne))]
    ne[dim] = n
    size = n_bytes(ne, tensor.kind)
    if size is not None:
        tensor.ne = ne
        tensor.data = (tensor.data * (size // max(1, len(tensor.data)) + 1))[:size]


@_on_tensor
def _retype_tensor(layout: Layout, tensor: Tensor, kind: int) -> None:
    size = n_bytes(tensor.ne, kind)
    if size is not None:
        tensor.kind = kind
        tensor.data = (tensor.data * (size // max(1, len(tensor.data)) + 1))[:size]


@_on_tensor
def _set_dimension(layout: Layout, tensor: Tensor, dim: int, n: int) -> None:
    tensor.ne[dim % len(tensor.ne)] = n


@_on_tensor
def _set_kind(layout: Layout, tensor: Tensor, kind: int) -> None:
    tensor.kind = kind


@_on_tensor
def _set_offset(layout: Layout, tensor: Tensor, offset: int) -> None:
    tensor.offset = offset


@_on_tensor
def _set_dimensions(layout: Layout, tensor: Tensor, n: int) -> None:
    tensor.n_dims = n


@_on_tensor
def _rename_tensor(layout: Layout, tensor: Tensor, name: str) -> None:
    tensor.name = bytes.fromhex(name)


@_on_tensor
def _drop_tensor(layout: Layout, tensor: Tensor) -> None:
    layout.tensors.remove(tensor)


@_on_tensor
def _double_tensor(layout: Layout, tensor: Tensor) -> None:
    layout.tensors.append(tensor)


@_on_tensor
def _fill(layout: Layout, tensor: Tensor, pattern: str) -> None:
    piece = bytes.fromhex(pattern)
    tensor.data = (piece * (len(tensor.data) // len(piece) + 1))[: len(tensor.data)]


def _draw_tensor_name(layout: Layout, random: Random) -> list[Any]:
    names = [tensor.name for tensor in layout.tensors] or [b"t"]
    other = random.choice(names)
    block = random.choice([b"999", b"-1", b"00", b"1"])
    made = [
        other,
        b"blk." + block + b"." + other.split(b".")[-1],
        b"output.weight",
        b"\xff",
        b"",
        b"x" * 64,
        b"rope_freqs.weight",
    ]
    return [_tensor(layout, random), random.choice(made).hex()]


FILLS = ["0000c07f", "0000807f", "ff", "00", "80", "007c", "ffff7f7f", "01000000"]
"""NaN, infinity, all ones, zeros, minus zeros, half precision's infinity, the largest number, a denormal."""

# -- the table --------------------------------------------------------------------------------------------------------

Drawing = Callable[[Layout, Random], list[Any] | None]


def _set(name: str) -> Callable[..., None]:
    return lambda layout, value: setattr(layout, name, value)


def _damage(layout: Layout, at: int, replacement: str) -> None:
    layout.damage.append((at, bytes.fromhex(replacement)))


def _append(layout: Layout, behind: str) -> None:
    layout.behind += bytes.fromhex(behind)


def _position(layout: Layout, random: Random) -> int:
    """In the metadata, the tensor table, or anywhere."""
    return random.choice([random.randrange(1200), random.randrange(1 << 14), random.randrange(1 << 26)])


MUTATIONS: dict[str, tuple[Drawing, Callable[..., None], int]] = {
    "value": (_draw_value, _set_value, 30),
    "retyped": (_draw_retyped, _set_value, 8),
    "added": (_draw_added, _set_value, 16),
    "item": (_draw_item, _set_item, 12),
    "resized": (_draw_resized, _resize, 6),
    "claimed": (_draw_claimed, _claim, 3),
    "dropped record": (lambda layout, random: [_record(layout, random)], _drop_record, 6),
    "doubled record": (lambda layout, random: [_record(layout, random)], _double_record, 1),
    "renamed record": (
        lambda layout, random: [_record(layout, random), random.choice(["", "ff", b"general.name".hex()])],
        _rename_record,
        1,
    ),
    "architecture": (lambda layout, random: [random.choice(ARCHITECTURES)], _rename_architecture, 12),
    "reshaped": (
        lambda layout, random: [
            _tensor(layout, random),
            random.randrange(4),
            random.choice([1, 2, 16, 32, 48, 64, 366]),
        ],
        _reshape,
        8,
    ),
    "requantised": (
        lambda layout, random: [_tensor(layout, random), random.choice([0, 1, 2, 8, 12, 24, 26, 28, 30, 34, 39, 41])],
        _retype_tensor,
        8,
    ),
    "dimension": (
        lambda layout, random: [_tensor(layout, random), random.randrange(4), random.choice(INTEGERS)],
        _set_dimension,
        3,
    ),
    "tensor type": (lambda layout, random: [_tensor(layout, random), random.randrange(64)], _set_kind, 2),
    "offset": (lambda layout, random: [_tensor(layout, random), random.choice(INTEGERS)], _set_offset, 2),
    "dimensions": (lambda layout, random: [_tensor(layout, random), random.choice(INTEGERS)], _set_dimensions, 1),
    "renamed tensor": (_draw_tensor_name, _rename_tensor, 5),
    "dropped tensor": (lambda layout, random: [_tensor(layout, random)], _drop_tensor, 4),
    "doubled tensor": (lambda layout, random: [_tensor(layout, random)], _double_tensor, 1),
    "filled": (lambda layout, random: [_tensor(layout, random), random.choice(FILLS)], _fill, 10),
    "version": (lambda layout, random: [random.choice([0, 1, 2, 4, 3 << 24, 2**32 - 1])], _set("version"), 1),
    "n_records": (lambda layout, random: [random.choice(INTEGERS)], _set("n_records"), 1),
    "n_tensors": (lambda layout, random: [random.choice(INTEGERS)], _set("n_tensors"), 1),
    "cut": (lambda layout, random: [_position(layout, random)], _set("size"), 3),
    "behind": (lambda layout, random: [random.choice(["00" * 64, "47475546", "3c68746d6c3e"])], _append, 1),
    "damage": (
        lambda layout, random: [_position(layout, random), random.randbytes(random.choice([1, 1, 4, 8])).hex()],
        _damage,
        20,
    ),
}
"""Name -> how its arguments are drawn, what it does, and how often it is chosen."""
