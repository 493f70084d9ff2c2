"""Memory that is not there: a sentence, nothing left behind, and the model as usable as before."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from hybrid import Hybrid
from hybrid.errors import OutOfMemoryError
from hybrid.head.kv.bus import Bus
from hybrid.head.memory import LiveBytes
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.runtime.engine import Engine
from hybrid.schedule.placement import Placement
from tests.tiny import write_tiny

SITES = 3
"""Allocations that fail, one at a time, spread over all of a stage; the slow test takes every one."""
TOKENS = list(range(5, 45))
KV: dict[str, dict[str, Any]] = {
    "device": {},
    "stream": {"kv": "stream", "kv_keep_sliding": False},
    "attend": {"kv": "attend", "kv_keep_sliding": False},
    "tiered": {"kv": "tiered", "kv_budget": 4 << 10, "kv_keep_sliding": False},
}


class Failing(LiveBytes):
    """An emulated device whose memory fails at a certain operator."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.at: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.seen += 1
        if self.at is not None and self.seen >= self.at:
            self.at = None
            raise torch.OutOfMemoryError("injected")
        return out


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Failing]:
    """Makes the device that the next engine gets."""
    made: list[Failing] = []

    def make() -> Failing:
        made.append(Failing())
        return made[-1]

    monkeypatch.setattr("hybrid.head.head.limit_memory", lambda device, n_bytes: made[-1])
    return make


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"n_embd": 64, "n_heads": 2, "n_kv_heads": 1, "head_dim": 32, "n_ff": 64}
    return write_tiny(tmp_path_factory.mktemp("tiny") / "gemma.gguf", "gemma3", n_layers=3, window=16, **sizes)


def open_engine(file: ModelFile, kv: str, n_gpu_layers: int = 2) -> Engine:
    placement = Placement(
        device="cpu", n_gpu_layers=n_gpu_layers, n_ctx=64, n_batch=16, n_ubatch=16, n_threads_head=1, **KV[kv]
    )
    return Engine(file, read_spec(file), placement, vram_budget=1 << 40)


def spread(n: int, every: bool) -> list[int]:
    """Operators to fail at."""
    return list(range(1, n + 1)) if every else sorted({1 + i * (n - 1) // (SITES - 1) for i in range(SITES)})


def check_loading(path: Path, kv: str, device: Callable[[], Failing], every: bool) -> None:
    with ModelFile(path) as file:
        counting = device()
        with closing(open_engine(file, kv)):
            sites = counting.seen
        assert sites > 20
        threads = threading.active_count()
        for at in spread(sites, every):
            failing = device()
            failing.at = at
            with pytest.raises(OutOfMemoryError, match=r"-ngl"):
                open_engine(file, kv)
            gc.collect()
            assert failing.now == 0, at
        assert threading.active_count() <= threads
        device()
        open_engine(file, kv).close()


def check_running(path: Path, kv: str, device: Callable[[], Failing], every: bool) -> None:
    with ModelFile(path) as file:
        device()
        with closing(open_engine(file, kv)) as engine:
            want = _run(engine)  # and what is made once and kept, such as tables of activations, is there now
        memory = device()
        with closing(open_engine(file, kv)) as engine:
            assert _agree(_run(engine), want)
            for part in ("prefill", "decode"):
                prompt = TOKENS if part == "prefill" else TOKENS[-1:]
                _prepare(engine, part)
                memory.seen = 0
                engine.evaluate(prompt)
                sites = memory.seen
                for at in spread(sites, every):
                    _prepare(engine, part)
                    memory.seen, memory.at = 0, at
                    with pytest.raises(OutOfMemoryError, match="more memory"):
                        engine.evaluate(prompt)
                    assert _agree(_run(engine), want), (part, at)
            gc.collect()
            held = memory.now
            _run(engine)
            gc.collect()
            assert memory.now == held
        gc.collect()
        assert memory.now == 0


def _prepare(engine: Engine, part: str) -> None:
    engine.trim(0)
    if part == "decode":
        engine.evaluate(TOKENS[:-1])


def _run(engine: Engine) -> np.ndarray:
    engine.trim(0)
    engine.evaluate(TOKENS)
    return engine.last_logits().copy()


def _agree(ours: np.ndarray, want: np.ndarray) -> bool:
    return bool(np.abs(ours - want).max() <= 1e-3 * np.abs(want).max())


@pytest.mark.parametrize("kv", KV)
def test_a_load_that_runs_out_of_memory_leaves_nothing(gemma: Path, kv: str, device: Callable[[], Failing]) -> None:
    check_loading(gemma, kv, device, every=False)


@pytest.mark.parametrize("kv", KV)
def test_an_evaluation_that_runs_out_of_memory_can_be_repeated(
    gemma: Path, kv: str, device: Callable[[], Failing]
) -> None:
    check_running(gemma, kv, device, every=False)


@pytest.mark.slow
@pytest.mark.parametrize("kv", KV)
def test_every_allocation_may_fail(gemma: Path, kv: str, device: Callable[[], Failing]) -> None:
    check_loading(gemma, kv, device, every=True)
    check_running(gemma, kv, device, every=True)


@pytest.mark.parametrize("kv", ["stream", "attend", "tiered"])
def test_host_memory_that_is_not_there_is_a_sentence(gemma: Path, kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Bus.host
    calls = 0

    def count(self: Bus, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        return host(self, *args)

    with ModelFile(gemma) as file:
        monkeypatch.setattr(Bus, "host", count)
        open_engine(file, kv).close()
        assert calls > 1
        for at in range(calls):
            left = at

            def fail(self: Bus, *args: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
                return host(self, *args)

            monkeypatch.setattr(Bus, "host", fail)
            with pytest.raises(OutOfMemoryError, match="more than"):
                open_engine(file, kv)


def test_auto_goes_on_with_a_layer_fewer(gemma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the plan believed: what cannot be had is not insisted on."""
    tried: list[int] = []
    init = Engine.__init__

    def fail_above_one(self: Engine, file: ModelFile, spec: Any, placement: Placement, **more: Any) -> None:
        tried.append(placement.n_gpu_layers)
        init(self, file, spec, placement, **more)
        if placement.n_gpu_layers > 1:
            self.close()
            raise OutOfMemoryError("injected")

    monkeypatch.setattr(Engine, "__init__", fail_above_one)
    with Hybrid(gemma, n_gpu_layers="auto", device="cpu", n_ctx=64) as model:
        assert model.placement.n_gpu_layers in (0, 1)
        assert model.chat([{"role": "user", "content": "a"}], max_tokens=1) is not None
    assert tried == sorted(tried, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 2, 3])
def test_a_hundred_loads_and_closes_take_no_memory(gemma: Path, k: int) -> None:
    """After the first twenty, in which allocators grow to what they need."""
    process = psutil.Process()

    def load() -> int:
        with Hybrid(gemma, n_gpu_layers=k, device="cpu", n_ctx=64, n_threads=1) as model:
            model.generate("Hello", max_tokens=2, ignore_eos=True)
        gc.collect()
        return process.memory_info().rss

    before = [load() for _ in range(20)][-1]
    after = [load() for _ in range(100)][-1]
    assert after - before < 5 << 20
