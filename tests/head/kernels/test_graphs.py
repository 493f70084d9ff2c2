"""Decode recorded once and replayed at other positions is decode: on the CPU a tape stands in for CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as T

from hybrid.errors import BadRequestError
from hybrid.head import graphs
from hybrid.head.graphs import MAX_SHAPES
from hybrid.head.head import Head
from hybrid.head.kernels.choice import Kernels
from hybrid.head.recorder import CudaRecorder, Recorder
from hybrid.schedule import kv_tiers
from scripts.graph_tape import Tape
from tests.head.heads import relative, some_tokens
from tests.head.kernels.test_head import MIXED, SMALL, compute
from tests.tiny import write_tiny

PLACED: dict[str, Any] = {"n_ctx": 64, "n_batch": 24, "n_sequences": 2, "kv_dtype": "f32"}
STRATEGIES: dict[str, dict[str, Any]] = {
    "device": {},
    "stream": {"kv": "stream"},
    "attend": {"kv": "attend"},
    "tiered": {"kv": "tiered", "kv_budget": 2 * 2 * 8 * 2 * 32 * 4},
}
STEPS = [
    [(0, 20)], [(1, 9)], [(0, 1)], [(0, 1)], [(1, 1)], [(0, 1), (1, 1)], [(1, 1), (0, 1)], [(0, 3)], [(1, 3)],
    [(0, 12)], [(0, 1)], [(0, 1), (1, 1)],
]  # fmt: skip
"""(sequence, tokens) of each batch; the third and the sixth shape are recorded for the first time."""


SLOW = pytest.mark.slow  # the interpreter is


def recorder(device: torch.device) -> Recorder:
    return CudaRecorder(device) if device.type == "cuda" else Tape()


@pytest.fixture
def opened(heads: Callable[..., Head], tmp_path: Path, device: torch.device) -> Callable[..., Head]:
    def open_one(
        tape: Recorder | None, architecture: str = "llama", n_layers: int = 2, kind: Any = T.F32, **placed: Any
    ) -> Head:
        """In F32: torch multiplies by it, which spares the interpreter what does not depend on positions."""
        path = tmp_path / f"{architecture}.gguf"
        if not path.exists():
            sizes = {**SMALL, "n_layers": n_layers}
            write_tiny(path, architecture, kind=kind, window=8, **sizes)
        how = replace(compute(device, Kernels(2)), recorder=tape)
        return heads(path, compute=how, **{"device": device.type, **PLACED, **placed})

    return open_one


def feed(head: Head, batch: list[tuple[int, int]], ends: dict[int, int]) -> torch.Tensor:
    """The tokens that come next in each sequence."""
    where = np.concatenate([np.arange(ends[seq], ends[seq] + n) for seq, n in batch])
    seqs = np.concatenate([np.full(n, seq) for seq, n in batch])
    for seq, n in batch:
        ends[seq] += n
    return head.forward(some_tokens(64)[where] + seqs, where, seqs)


def compare(ours: Head, theirs: Head, steps: list[list[tuple[int, int]]]) -> None:
    ends, their_ends = {0: 0, 1: 0}, {0: 0, 1: 0}
    kept = []
    for batch in steps:
        got, want = feed(ours, batch, ends), feed(theirs, batch, their_ends)
        kept.append((got, want.cpu().numpy()))
    for got, want in kept:  # what a step returned is not overwritten by the next
        assert relative(got.cpu().numpy(), want) < 1e-5
    for seq in (0, 1):
        assert ours.cache.save(seq)[:64] == theirs.cache.save(seq)[:64]
    assert ours.notes == theirs.notes == []


@pytest.mark.parametrize(
    "strategy", ["device", pytest.param("stream", marks=SLOW), "tiered", pytest.param("attend", marks=SLOW)]
)
def test_replayed_steps_are_steps_whatever_the_kv_strategy(
    strategy: str, opened: Callable[..., Head], device: torch.device
) -> None:
    tape = recorder(device)
    compare(opened(tape, **STRATEGIES[strategy]), opened(None, **STRATEGIES[strategy]), STEPS)
    if isinstance(tape, Tape):
        segments = 3 if strategy in ("attend", "tiered") else 1  # cut where the host attends, in two layers
        shapes = 4 if strategy == "stream" else 3  # one token, one of either sequence, three; whose the copies are
        assert len(tape.recorded) == shapes * segments + 1  # and the output head


def test_tiered_is_recorded_like_device_until_its_budget_is_full(
    opened: Callable[..., Head], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And then with the CPU in between, which attends to what has been moved."""
    monkeypatch.setattr(kv_tiers, "SPILL_TOKENS", 4)
    tape = recorder(device)
    budget = 2 * 2 * 16 * 2 * 32 * 4  # layers, sequences, positions, K and V, values of four bytes
    ours, theirs = (opened(how, n_layers=2, kv="tiered", kv_budget=budget) for how in (tape, None))
    assert [kv.tier.device for kv in ours.cache.layers] == [16, 16]
    compare(ours, theirs, [[(0, 13)], *[[(0, 1)]] * 6, [(1, 2)], [(1, 1)], [(0, 1)]])
    assert ours.cache.moved == theirs.cache.moved
    assert ours.cache.moved.to_device > 0
    if isinstance(tape, Tape):
        assert len(tape.recorded) == 1 + 1 + 3 + 1  # one token: near, and far; two tokens; the output head


def test_copies_are_recorded_for_buckets_and_rows_that_no_bucket_held_yet_are_seen(
    opened: Callable[..., Head], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences grow through several buckets, beside each other and together; what is copied is whole buckets. In
    three layers, of which two share a buffer."""
    monkeypatch.setattr(kv_tiers, "BUCKET_TOKENS", 4)
    monkeypatch.setattr(graphs, "IDLE_STEPS", 3)
    tape = recorder(device)
    ours, theirs = (opened(how, n_layers=3, kv="stream") for how in (tape, None))
    compare(ours, theirs, [[(0, 9)], *[[(0, 1)]] * 9, [(1, 2)], [(1, 1)], *[[(0, 1), (1, 1)]] * 3])
    depth, moved = ours.cache.length(0), replace(ours.cache.moved)
    assert depth == 21
    for more in range(2):  # of one bucket, recorded for the first
        placed = replace(ours.placement, n_sequences=1)
        want = kv_tiers.step_traffic(ours.spec, placed, depth + more, recorded=True)
        feed(ours, [(0, 1)], {0: depth + more})
        times = 2 - more  # launched, then replayed
        now = ours.cache.moved
        assert (now.to_device - moved.to_device, now.to_host - moved.to_host) == (
            times * want.to_device, times * want.to_host
        )  # fmt: skip
        assert want.to_device == 3 * 24 * 2 * 32 * 4  # layers, positions, K and V, values of four bytes
        moved = replace(now)


@pytest.mark.slow
def test_replayed_products_are_products(opened: Callable[..., Head], device: torch.device) -> None:
    """Of quantised weights, joined and not."""
    compare(*(opened(tape, kind=MIXED) for tape in (recorder(device), None)), STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kv_dtype", ["f16", "q8_0"])
def test_windows_wrap_in_replays_too(
    strategy: str, kv_dtype: str, opened: Callable[..., Head], device: torch.device
) -> None:
    placed = {**STRATEGIES[strategy], "kv_dtype": kv_dtype, "kv_keep_sliding": False, "n_batch": 8}
    steps = [[(0, 8)], [(0, 8)], [(1, 5)], *[[(0, 1), (1, 1)]] * 12, [(0, 1)], [(1, 1)]]
    heads = [opened(tape, "gemma3", 6, **placed) for tape in (recorder(device), None)]
    compare(*heads, steps)


@pytest.mark.slow
def test_later_shapes_than_the_first_few_are_not_recorded(opened: Callable[..., Head], device: torch.device) -> None:
    tape = recorder(device)
    steps = [[(0, n)] for n in (2, 3, 4, 5, 6, 2, 5)]
    compare(opened(tape, n_layers=1), opened(None, n_layers=1), steps)
    if isinstance(tape, Tape):
        assert len(tape.recorded) == MAX_SHAPES + 1


def test_a_sequence_goes_on_after_what_is_not_recorded(opened: Callable[..., Head], device: torch.device) -> None:
    """Trimmed, copied and refused."""
    ours, theirs = (opened(tape, n_layers=1) for tape in (recorder(device), None))
    for head in (ours, theirs):
        ends = {0: 0, 1: 0}
        for batch in ([(0, 5)], [(0, 1)], [(0, 1)]):
            feed(head, batch, ends)
        with pytest.raises(BadRequestError):
            feed(head, [(0, 1)], {0: 9})
        assert head.cache.trim(0, 4) == 4
        head.cache.copy(0, 1, 4)
    rest = [feed(head, [(1, 1)], {1: 4}).cpu().numpy() for head in (ours, theirs)]
    assert relative(*rest) < 1e-5


def test_the_output_head_is_recorded_too(opened: Callable[..., Head], device: torch.device) -> None:
    """For one row and for two; what it returned is not overwritten."""
    tape = recorder(device)
    ours, theirs = (opened(how, n_layers=1) for how in (tape, None))
    if isinstance(tape, Tape):
        assert len(tape.recorded) == 2  # when the model was loaded: a token, and the row of its logits
    hidden = torch.from_numpy(np.random.default_rng(0).standard_normal((8, 64), np.float32)).to(device)
    parts = [hidden[:1], hidden[1:2], hidden[2:4], hidden[4:6], hidden[6:7]]
    got = [ours.logits(part) for part in parts]
    for logits, part in zip(got, parts, strict=True):
        assert relative(logits.cpu().numpy(), theirs.logits(part).cpu().numpy()) < 1e-5
    assert ours.notes == theirs.notes == []
    if isinstance(tape, Tape):
        assert len(tape.recorded) == 3


class Refusing(Tape):
    """Records so many segments."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.left = n

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return super().record(run)


@pytest.mark.parametrize(
    ("n", "strategy", "output"),
    [
        pytest.param(0, "device", False, marks=SLOW),
        (1, "attend", False),
        pytest.param(2, "device", True, marks=SLOW),
    ],
)
def test_where_recording_fails_the_step_is_right_and_a_sentence_says_so(
    n: int, strategy: str, output: bool, opened: Callable[..., Head], device: torch.device
) -> None:
    """At the first segment, in the middle of a step, or when a later shape is recorded, behind the output head."""
    if device.type == "cuda":
        pytest.skip("the tape is the CPU's")
    ours, theirs = (opened(how, **STRATEGIES[strategy]) for how in (Refusing(n), None))
    ends, their_ends = {0: 0, 1: 0}, {0: 0, 1: 0}
    for batch in STEPS[:6]:
        assert relative(feed(ours, batch, ends).numpy(), feed(theirs, batch, their_ends).numpy()) < 1e-5
    why = "(RuntimeError: operation not permitted when stream is capturing)."
    assert (
        ours.notes
        == [
            f"Decode is launched kernel by kernel instead of as graphs, more slowly {why}",
            f"The output head is launched kernel by kernel, more slowly {why}",
        ][: 1 if output else 2]
    )


def test_what_torch_has_to_compute_is_not_recorded(
    opened: Callable[..., Head], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its attention is given positions as numbers: replayed, it would attend to those of the first step."""
    monkeypatch.setattr(Kernels, "attend", lambda *args: None)
    ours, theirs = opened(recorder(device), n_layers=1), opened(None, n_layers=1)
    ends, their_ends = {0: 0, 1: 0}, {0: 0, 1: 0}
    for batch in STEPS[:4]:
        got, want = feed(ours, batch, ends), feed(theirs, batch, their_ends)
        assert relative(got.cpu().numpy(), want.cpu().numpy()) < 1e-5
    assert ours.notes == [
        "Decode is launched kernel by kernel instead of as graphs, more slowly (in steps of 1: PyTorch's attention has "
        "to know the positions)."
    ]


def test_the_tape_notices_what_python_decides() -> None:
    """So that the tests above can fail."""
    x, kept, calls = torch.ones(2), [], []

    def run() -> None:
        calls.append(1)
        kept[:] = [x * len(calls)]

    run()
    with torch.inference_mode():
        replay = Tape().record(run)
        x.fill_(5.0)
        replay()
        assert kept[0].tolist() == [10.0, 10.0]
    with pytest.raises(RuntimeError, match="would wait"):
        Tape().record(lambda: x.sum().item())
