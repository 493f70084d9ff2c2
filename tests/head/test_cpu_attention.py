"""Attention on the CPU over a cache in host memory, against float64."""

from __future__ import annotations

import os
import platform
import threading
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid import _native
from hybrid.head.kv import q8_0
from hybrid.head.kv.cpu_attention import HOST_DTYPES, Run, attend_on_cpu, decode, encode, host_rows, merge

KNOWN_SETS = ("neon", "portable") if platform.machine() in ("aarch64", "arm64") else ("avx512", "avx2", "portable")


@pytest.fixture(params=KNOWN_SETS)
def instruction_set(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name not in _native.instruction_sets():
        pytest.skip(f"this processor or this build has no {name}")
    return name


@dataclass(frozen=True)
class Shape:
    """One cache and its queries."""

    n_heads: int = 8
    n_kv_heads: int = 2
    dim_k: int = 64
    dim_v: int = 64
    n_slots: int = 80
    first: int = 0
    end: int = 80
    position: int = 79
    n: int = 1
    type_k: str = "f16"
    type_v: str = "f16"


def make(shape: Shape, seed: int = 0, *, start: int = 0) -> tuple[Tensor, Run]:
    """Random queries and a random cache; slots that hold nothing are NaN where the type has one."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(shape.n, shape.n_heads, shape.dim_k, generator=generator) * 2
    rows = []
    for dim, kv_type in ((shape.dim_k, shape.type_k), (shape.dim_v, shape.type_v)):
        held = encode(torch.randn(shape.n_slots, shape.n_kv_heads, dim, generator=generator), kv_type)
        empty = torch.ones(shape.n_slots, dtype=torch.bool)
        empty[torch.arange(shape.first, shape.end) % max(1, shape.n_slots)] = False
        held[empty] = 255 if kv_type == "q8_0" else torch.nan  # 0xffff as a scale is NaN, too
        rows.append(held)
    return q, Run(start, shape.n, shape.position, rows[0], rows[1], shape.first, shape.end)


def reference(
    q: Tensor, run: Run, *, scale: float, window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition, key by key, in float64."""
    n_heads = q.shape[1]
    k, v = decode(run.k).double(), decode(run.v).double()
    group = n_heads // k.shape[1]
    out = torch.zeros(run.n, n_heads, v.shape[2], dtype=torch.float64)
    lse = torch.full((run.n, n_heads), -torch.inf, dtype=torch.float64)
    for i in range(run.n):
        p = run.position + i
        seen = [key for key in range(run.first, run.end) if key <= p and (not window or key > p - window)]
        slots = [key % k.shape[0] for key in seen]
        for head in range(n_heads):
            scores = scale * (k[slots, head // group] @ q[run.start + i, head].double())
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            sink = torch.full((1,), -torch.inf).double() if sinks is None else sinks[head : head + 1].double()
            lse[i, head] = torch.logsumexp(torch.cat([scores, sink]), 0)
            if seen:
                out[i, head] = (scores - lse[i, head]).exp() @ v[slots, head // group]
    return out, lse


def check(q: Tensor, run: Run, *, n_threads: int = 1, instruction_set: str = "", **options: Any) -> None:
    """The result equals the reference; runs that share q are checked in its rows."""
    out, lse = attend_on_cpu(q, [run], n_threads=n_threads, instruction_set=instruction_set, **options)
    true_out, true_lse = reference(q, run, **options)
    torch.testing.assert_close(out.double(), true_out, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-5, atol=2e-5)


SHAPES = {
    "one query head a kv head": Shape(n_heads=3, n_kv_heads=3),
    "two": Shape(n_heads=4, n_kv_heads=2),
    "three": Shape(n_heads=9, n_kv_heads=3),
    "four": Shape(n_heads=8, n_kv_heads=2),
    "five": Shape(n_heads=5, n_kv_heads=1),
    "six": Shape(n_heads=12, n_kv_heads=2),
    "seven": Shape(n_heads=14, n_kv_heads=2),
    "eight": Shape(n_heads=16, n_kv_heads=2),
    "sixteen": Shape(n_heads=16, n_kv_heads=1),
    "head dimensions 128": Shape(dim_k=128, dim_v=128),
    "head dimensions 256": Shape(dim_k=256, dim_v=256),
    "head dimensions 80": Shape(dim_k=80, dim_v=80),
    "head dimensions 192 and 128": Shape(dim_k=192, dim_v=128),
    "head dimensions 40 and 24": Shape(dim_k=40, dim_v=24),
    "head dimensions 7 and 5": Shape(dim_k=7, dim_v=5),
    "head dimension 1": Shape(dim_k=1, dim_v=1),
    "one key": Shape(n_slots=4, end=1, position=0),
    "keys of a few blocks and a rest": Shape(n_slots=61, end=61, position=60),
    "a ring that wrapped": Shape(n_slots=50, first=73, end=123, position=122),
    "a ring that wrapped, not full": Shape(n_slots=50, first=90, end=117, position=116),
    "keys far before the query": Shape(first=3, end=70, position=500),
    "a chunk over its own keys": Shape(n_slots=64, end=40, position=31, n=9),
    "a chunk that also sees older keys only": Shape(n_slots=64, end=30, position=31, n=9),
    "a chunk of many queries": Shape(n_slots=64, end=50, position=10, n=40),
    "queries before any key": Shape(n_slots=64, first=20, end=50, position=10, n=30),
}


@pytest.mark.parametrize("name", SHAPES)
def test_it_is_attention(name: str, instruction_set: str) -> None:
    shape = SHAPES[name]
    check(*make(shape), scale=shape.dim_k**-0.5, instruction_set=instruction_set)


@pytest.mark.parametrize("type_v", HOST_DTYPES)
@pytest.mark.parametrize("type_k", HOST_DTYPES)
def test_every_type_of_k_and_v(type_k: str, type_v: str, instruction_set: str) -> None:
    shape = Shape(dim_k=96, dim_v=64, n_slots=70, first=5, end=64, position=63, type_k=type_k, type_v=type_v)
    check(*make(shape), scale=0.1, instruction_set=instruction_set)


@pytest.mark.parametrize("window", [1, 2, 16, 17, 33, 1000])
def test_a_window_hides_what_is_too_old(window: int, instruction_set: str) -> None:
    shape = Shape(n_slots=60, first=80, end=140, position=134, n=6)
    check(*make(shape), scale=0.1, window=window, instruction_set=instruction_set)


@pytest.mark.parametrize("softcap", [1.0, 30.0])
def test_scores_are_capped(softcap: float, instruction_set: str) -> None:
    check(*make(Shape()), scale=1.0, softcap=softcap, instruction_set=instruction_set)


def test_sinks_take_their_share(instruction_set: str) -> None:
    sinks = torch.linspace(-4, 9, 8)
    check(*make(Shape(position=3, n=4)), scale=0.1, sinks=sinks, window=2, instruction_set=instruction_set)


def test_every_half_is_read_right(instruction_set: str) -> None:
    """One key: its value comes out as it is, subnormal or large."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    halves = torch.from_numpy(bits[np.isfinite(bits.view(np.float16))].view(np.float16)).view(1, 992, 64)
    k = torch.zeros(1, 992, 16, dtype=torch.float16)
    out, _ = attend_on_cpu(
        torch.zeros(1, 992, 16), [Run(0, 1, 0, k, halves, 0, 1)], scale=1.0, instruction_set=instruction_set
    )
    assert torch.equal(out, halves.float())


def test_far_apart_scores_neither_overflow_nor_vanish(instruction_set: str) -> None:
    q, run = make(Shape(type_k="f32", type_v="f32"))
    result = attend_on_cpu(q * 20, [run], scale=1.0, instruction_set=instruction_set)
    for ours, true in zip(result, reference(q * 20, run, scale=1.0), strict=True):  # scores of some hundreds
        torch.testing.assert_close(ours.double(), true, rtol=1e-4, atol=1e-3)
    out, lse = attend_on_cpu(torch.full_like(q, 1e30), [run], scale=1e10, instruction_set=instruction_set)
    assert not lse.isfinite().any()  # overflow shows; it does not become a plausible number
    assert out.isnan().any()


def test_nan_in_a_visible_key_or_value_shows(instruction_set: str) -> None:
    for poison in ("k", "v"):
        q, run = make(Shape())
        rows = getattr(run, poison).clone()
        rows[40] = torch.nan
        out, _ = attend_on_cpu(q, [replace(run, **{poison: rows})], scale=0.1, instruction_set=instruction_set)
        assert out.isnan().all()


def test_what_a_query_does_not_see_cannot_reach_it(instruction_set: str) -> None:
    """Later tokens of the chunk and keys before the window are NaN; the query between them is untouched."""
    q, run = make(Shape(n_slots=64, end=50, position=40, n=10))
    clean, _ = attend_on_cpu(q, [run], scale=0.1, window=8, instruction_set=instruction_set)
    k, v = run.k.clone(), run.v.clone()
    for rows in (k, v):
        rows[:37] = torch.nan
        rows[45:] = torch.nan
    out, _ = attend_on_cpu(q, [replace(run, k=k, v=v)], scale=0.1, window=8, instruction_set=instruction_set)
    assert torch.equal(out[4], clean[4])
    assert out[[0, 3, 5, 9]].isnan().all()


def test_an_empty_cache_gives_nothing() -> None:
    q, run = make(Shape(n_slots=5, end=0, position=0))
    for cache in (run, replace(run, k=run.k[:0], v=run.v[:0])):
        out, lse = attend_on_cpu(q, [cache], scale=0.1)
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(lse, torch.full_like(lse, -torch.inf))
        sinks = torch.arange(8.0)
        out, lse = attend_on_cpu(q, [cache], scale=0.1, sinks=sinks)
        assert torch.equal(out, torch.zeros_like(out))
        torch.testing.assert_close(lse[0], sinks)


def test_strided_views_are_read_in_place(instruction_set: str) -> None:
    """Sequences interleaved in one tensor, heads before slots, K and V side by side."""
    q, run = make(Shape())
    expected = attend_on_cpu(q, [run], scale=0.1, instruction_set=instruction_set)
    interleaved = torch.full((80, 3, 2, 64), torch.nan, dtype=torch.float16)
    by_head = torch.full((2, 90, 64), torch.nan, dtype=torch.float16)
    side_by_side = torch.full((80, 2, 128), torch.nan, dtype=torch.float16)
    for view, rows in (
        (interleaved[:, 1], run.k),
        (by_head[:, 5:85].transpose(0, 1), run.k),
        (side_by_side[..., 64:], run.k),
    ):
        view.copy_(rows)
        out = attend_on_cpu(q, [replace(run, k=view)], scale=0.1, instruction_set=instruction_set)
        assert torch.equal(out[0], expected[0])


# -- several sequences and threads -----------------------------------------------------------------------------------


def batch() -> tuple[Tensor, list[Run]]:
    """Four sequences of very different lengths, one of them empty, one with a chunk."""
    shapes = [
        Shape(n_slots=900, end=900, position=899),
        Shape(n_slots=40, end=0, position=0),
        Shape(n_slots=300, first=350, end=640, position=633, n=7),
        Shape(n_slots=2000, end=1900, position=1899, n=20, type_k="q8_0"),
    ]
    parts, runs, start = [], [], 0
    for seed, shape in enumerate(shapes):
        q, run = make(shape, seed, start=start)
        parts.append(q)
        runs.append(run)
        start += shape.n
    return torch.cat(parts), runs


def test_sequences_do_not_see_each_other() -> None:
    q, runs = batch()
    together = attend_on_cpu(q, runs, scale=0.1, n_threads=3)
    for run in runs:
        rows = slice(run.start, run.start + run.n)
        alone = attend_on_cpu(q[rows].contiguous(), [replace(run, start=0)], scale=0.1)
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a[rows], b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_threads", [2, 3, 8])
def test_the_number_of_threads_changes_roundings_only_and_chance_nothing(n_threads: int) -> None:
    q, runs = batch()
    one = attend_on_cpu(q, runs, scale=0.1, n_threads=1)
    several = [attend_on_cpu(q, runs, scale=0.1, n_threads=n_threads) for _ in range(5)]
    for result in several:
        for a, b, c in zip(result, several[0], one, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-5)


def test_instruction_sets_agree() -> None:
    q, runs = batch()
    best = attend_on_cpu(q, runs, scale=0.1)
    for name in _native.instruction_sets():
        for a, b in zip(attend_on_cpu(q, runs, scale=0.1, instruction_set=name), best, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_callers_of_several_threads_do_not_disturb_each_other() -> None:
    q, runs = batch()
    expected, _ = attend_on_cpu(q, runs, scale=0.1, n_threads=2)
    wrong: list[int] = []

    def call(number: int) -> None:
        for _ in range(20):
            out, _ = attend_on_cpu(q, runs, scale=0.1, n_threads=2)
            if not torch.equal(out, expected):
                wrong.append(number)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own() -> None:
    q, runs = batch()
    expected, _ = attend_on_cpu(q, runs, scale=0.1, n_threads=3)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            out, _ = attend_on_cpu(q, runs, scale=0.1, n_threads=3)
            code = 0 if torch.equal(out, expected) else 1
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(attend_on_cpu(q, runs, scale=0.1, n_threads=3)[0], expected)


# -- merging ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_split_of_the_keys_merges_to_the_whole(data: st.DataObject) -> None:
    shape = Shape(
        n_heads=4,
        n_kv_heads=data.draw(st.sampled_from([1, 2, 4])),
        dim_k=32,
        dim_v=32,
        n_slots=70,
        first=30,
        end=data.draw(st.integers(30, 100)),
        position=data.draw(st.integers(0, 120)),
        n=data.draw(st.integers(1, 6)),
        type_k=data.draw(st.sampled_from(list(HOST_DTYPES))),
        type_v=data.draw(st.sampled_from(list(HOST_DTYPES))),
    )
    q, run = make(shape, data.draw(st.integers(0, 9)))
    options: dict[str, Any] = {
        "scale": 0.3,
        "window": data.draw(st.sampled_from([0, 5, 40])),
        "softcap": data.draw(st.sampled_from([0.0, 20.0])),
    }
    sinks = data.draw(st.sampled_from([None, torch.linspace(-2, 5, 4)]))
    whole = attend_on_cpu(q, [run], sinks=sinks, **options)
    cuts = sorted(data.draw(st.lists(st.integers(run.first, run.end), max_size=4)))
    edges = [run.first, *cuts, run.end]
    with_sinks = data.draw(st.integers(0, len(edges) - 2))  # exactly one part counts them
    parts = [
        attend_on_cpu(q, [replace(run, first=lo, end=hi)], sinks=sinks if i == with_sinks else None, **options)
        for i, (lo, hi) in enumerate(pairwise(edges))
    ]
    out, lse = parts[0]
    for part in parts[1:]:
        out, lse = merge(out, lse, *part)
    torch.testing.assert_close(out, whole[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, whole[1], rtol=1e-5, atol=1e-5)


def test_a_part_that_saw_nothing_does_not_count_whatever_it_holds() -> None:
    out, lse = torch.randn(2, 3, 4), torch.randn(2, 3)
    nothing = torch.full((2, 3), -torch.inf)
    for garbage in (torch.zeros_like(out), torch.full_like(out, torch.nan)):
        for merged in (merge(out, lse, garbage, nothing), merge(garbage, nothing, out, lse)):
            assert torch.equal(merged[0], out)
            assert torch.equal(merged[1], lse)
        empty, seen = merge(garbage, nothing, garbage, nothing)
        assert torch.equal(empty, torch.zeros_like(out))
        assert torch.equal(seen, nothing)


def test_merging_large_scores_does_not_overflow() -> None:
    out, lse = merge(torch.ones(1, 4), torch.tensor([2e4]), torch.zeros(1, 4), torch.tensor([2e4]))
    assert torch.equal(out, torch.full((1, 4), 0.5))
    torch.testing.assert_close(lse, torch.tensor([2e4 + np.log(2.0)], dtype=torch.float32))


# -- q8_0 ------------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([1e-30, 1e-9, 1e-3, 1.0, 1e4]))
def test_q8_0_is_what_ggml_makes(seed: int, size: float) -> None:
    x = np.random.default_rng(seed).standard_normal((5, 3, 96), np.float32) * np.float32(size)
    x[0, 0, :32] = 0
    x[1, 1, :8] = [127, -127, 63.5, -63.5, 0.5, -0.5, 1.5, 2.5]  # d is 1: halves go away from zero
    x[1, 1, 8:32] = np.nextafter(np.float32(0.5), np.float32(0))
    theirs = quants.quantize(x, GGMLQuantizationType.Q8_0)
    assert np.array_equal(q8_0.quantize(torch.from_numpy(x)).numpy(), theirs)
    ours = q8_0.dequantize(torch.from_numpy(theirs)).numpy()
    assert np.array_equal(ours, quants.dequantize(theirs, GGMLQuantizationType.Q8_0))


def test_q8_0_takes_halves_and_refuses_broken_blocks() -> None:
    x = torch.randn(4, 2, 64)
    assert torch.equal(q8_0.quantize(x.half()), q8_0.quantize(x.half().float()))
    assert q8_0.dequantize(q8_0.quantize(x), torch.bfloat16).dtype == torch.bfloat16
    assert q8_0.quantize(x[:0]).shape == (0, 2, 68)
    with pytest.raises(ValueError, match="whole blocks"):
        q8_0.quantize(torch.randn(2, 33))
    with pytest.raises(ValueError, match="blocks"):
        q8_0.dequantize(torch.zeros(2, 33, dtype=torch.uint8))


@pytest.mark.parametrize("kv_type", HOST_DTYPES)
def test_host_rows_start_at_zero_and_hold_what_was_encoded(kv_type: str) -> None:
    rows = host_rows(6, 2, 64, kv_type, n_sequences=3)
    assert decode(rows).shape == (3, 6, 2, 64)
    assert not decode(rows).any()
    x = torch.randn(4, 2, 64)
    rows[1, 2:] = encode(x, kv_type)
    torch.testing.assert_close(decode(rows[1, 2:]), x, rtol=0.01, atol=0.02)
    assert not decode(rows[[0, 2]]).any()


def test_large_host_rows_are_plain_memory_of_their_own() -> None:
    rows = host_rows(4096, 4, 128, "f16", n_sequences=2)  # in huge pages
    other = host_rows(4096, 4, 128, "f16", n_sequences=2)
    assert rows.shape == (2, 4096, 4, 128)
    assert not rows.any()
    rows.fill_(1)
    assert rows[1].is_contiguous()
    assert rows.sum(dtype=torch.float32) == rows.numel()
    assert not other.any()


# -- arguments that do not fit ---------------------------------------------------------------------------------------


def wrong_arguments() -> dict[str, dict[str, Any]]:
    q, run = make(Shape())
    return {
        "q of another type": {"q": q.double()},
        "q with a hole": {"q": torch.cat([q, q], -1)[..., :64]},
        "q of two dimensions": {"q": q[0]},
        "heads that do not divide": {"q": q[:, :7].contiguous()},
        "no heads": {"q": q[:, :0].contiguous()},
        "another head dimension": {"q": q[..., :32].contiguous()},
        "no runs": {"runs": []},
        "a row too few": {"runs": [replace(run, n=2)]},
        "a row left over": {"q": torch.cat([q, q])},
        "rows twice": {"q": torch.cat([q, q]), "runs": [run, run]},
        "no rows": {"runs": [replace(run, n=0)]},
        "a negative row": {"runs": [replace(run, start=-1)]},
        "a negative position": {"runs": [replace(run, position=-1)]},
        "a position beyond everything": {"runs": [replace(run, position=1 << 62)]},
        "a number of more than 64 bits": {"runs": [replace(run, position=1 << 70)]},
        "more positions than slots": {"runs": [replace(run, end=81)]},
        "positions backwards": {"runs": [replace(run, first=3, end=2)]},
        "a negative first": {"runs": [replace(run, first=-3)]},
        "k and v of other lengths": {"runs": [replace(run, v=run.v[:40])]},
        "k and v of other heads": {"runs": [replace(run, v=run.v[:, :1])]},
        "heads with holes": {"runs": [replace(run, k=torch.zeros(80, 2, 128, dtype=torch.float16)[..., ::2])]},
        "a type that is none": {"runs": [replace(run, k=run.k.to(torch.int32))]},
        "half a block": {"runs": [replace(run, k=torch.zeros(80, 2, 67, dtype=torch.uint8))]},
        "slots on top of each other": {"runs": [replace(run, k=run.k[:1].expand(80, -1, -1))]},
        "heads on top of each other": {"runs": [replace(run, k=run.k[:, :1].expand(-1, 2, -1))]},
        "elsewhere": {"runs": [replace(run, k=run.k.to("meta"))]},
        "sinks for other heads": {"sinks": torch.zeros(3)},
        "sinks of another type": {"sinks": torch.zeros(8, dtype=torch.float64)},
        "a negative window": {"window": -1},
        "a negative cap": {"softcap": -1.0},
        "a scale that is no number": {"scale": float("nan")},
        "no threads": {"n_threads": 0},
        "very many threads": {"n_threads": 1 << 20},
        "an unknown instruction set": {"instruction_set": "mmx"},
    }


@pytest.mark.parametrize("name", wrong_arguments())
def test_arguments_that_do_not_fit_are_a_value_error(name: str) -> None:
    q, run = make(Shape())
    arguments: dict[str, Any] = {"q": q, "runs": [run], "scale": 0.1, **wrong_arguments()[name]}
    with pytest.raises(ValueError):  # noqa: PT011 - each says something else
        attend_on_cpu(arguments.pop("q"), arguments.pop("runs"), **arguments)
