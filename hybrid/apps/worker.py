"""The process that runs one condition: a JSON line in on stdin, JSON lines out on stdout, and nothing else there.

Lines out: {"event": "load" | "prompt" | "decode"} when a stage begins, {"event": "done", …} with what was measured, or
{"event": "failed", "kind", "message"}. Whatever kills the process is seen by its parent (`hybrid.apps.runner`). When
stdin ends, the parent is gone, and so is the process.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybrid.errors import (
    BadFileError,
    BadRequestError,
    HostMemoryError,
    HybridError,
    OutOfMemoryError,
    UnsupportedError,
)
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.report.trial import Condition, FailureKind, PeakMemory
from hybrid.runtime.engine import Engine
from hybrid.runtime.sampling import Sampler, SamplingParams
from hybrid.schedule.limits import read_text
from hybrid.schedule.nvml import nvidia_gpus
from hybrid.schedule.placement import Placement

Say = Callable[..., None]


def main() -> None:
    """Read a task, run it, say what came of it."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # what a library prints must not get between the lines
        task = json.loads(sys.stdin.readline())
        threading.Thread(target=_end_with_parent, daemon=True).start()

        stage = ""

        def say(event: str, **facts: Any) -> None:
            nonlocal stage
            stage = event
            out.write(json.dumps({"event": event, **facts}) + "\n")
            out.flush()

        try:
            say("done", **TASKS[task.pop("task")](task, say))
        except (HybridError, MemoryError) as e:
            say("failed", kind=failure_kind(e, stage), message=str(e) or "The machine is out of memory.")


def failure_kind(error: HybridError | MemoryError, stage: str) -> FailureKind:
    """What an error at a stage means to whoever compares conditions."""
    if isinstance(error, OutOfMemoryError):
        return "out of RAM" if isinstance(error, HostMemoryError) else "out of memory"
    if isinstance(error, MemoryError):
        return "out of RAM"
    if isinstance(error, BadFileError):
        return "bad file"
    if isinstance(error, (UnsupportedError, BadRequestError)):
        return "refused"
    return "failed to load" if stage == "load" else "failed"


def run_condition(condition: Condition, say: Say) -> dict[str, Any]:
    """The figures of a Trial."""
    say("load")
    start = time.perf_counter()
    with ModelFile(condition.model) as file:
        spec = read_spec(file)
        with closing(Engine(file, spec, condition.placement, vram_budget=condition.vram_budget)) as engine:
            load_s = time.perf_counter() - start
            say("prompt")
            start = time.perf_counter()
            _warm_up(engine, condition)
            warmup_s = time.perf_counter() - start
            ttft_s = [_prefill(engine, condition) for _ in range(condition.prefills)]
            say("decode")
            before = _moved(engine)
            tokens, decode_s, decode_warmup_s = _decode(engine, condition)
            moved = _moved(engine) - before
            return {
                "load_s": load_s,
                "warmup_s": warmup_s + decode_warmup_s,
                "ttft_s": ttft_s,
                "decode_s": decode_s,
                "moved_bytes": moved / len(tokens) if decode_s and engine.head is not None else None,
                "tokens": tokens,
                "memory": asdict(peak_memory(engine)),
                "versions": versions(engine),
            }


def _run(task: dict[str, Any], say: Say) -> dict[str, Any]:
    return run_condition(Condition.from_dict(task), say)


def _calibrate(task: dict[str, Any], say: Say) -> dict[str, Any]:
    """Measurements of the halves apart, for the CostModel's rates."""
    from hybrid.apps.calibrate import measure

    say("load")
    placement = Placement(**task["placement"])
    with ModelFile(Path(task["model"])) as file:
        spec = read_spec(file)
        with closing(Engine(file, spec, placement, vram_budget=task["vram_budget"])) as engine:
            if engine.head is not None:
                engine.head.counting = False
            say("prompt")
            return {"measurements": [asdict(m) for m in measure(engine, task["depth"])]}


TASKS: dict[str, Callable[[dict[str, Any], Say], dict[str, Any]]] = {"run": _run, "calibrate": _calibrate}


def _warm_up(engine: Engine, condition: Condition) -> None:
    """The prompt and a step: every kernel has then run, and an emulated device has counted what each shape takes; what
    is timed afterwards repeats that uncounted. A GPU counts by itself: there a chunk is enough, unless decoding begins
    where the warm-up ends."""
    counted = engine.head is not None and engine.head.memory is not None
    whole = counted or not condition.prefills
    for seq in range(engine.placement.n_sequences):
        engine.evaluate(condition.prompt if whole else condition.prompt[: engine.placement.n_batch], seq)
    _step(engine, [condition.prompt[0]] * engine.placement.n_sequences)
    if engine.head is not None:
        engine.head.counting = False


def _prefill(engine: Engine, condition: Condition) -> float:
    """Seconds until every sequence's first token; leaves the context at the condition's depth."""
    _empty(engine)
    with Sampler(SamplingParams(temperature=0), engine.vocabulary.n_vocab) as sampler:
        gc.collect()
        start = time.perf_counter()
        for seq in range(engine.placement.n_sequences):
            engine.evaluate(condition.prompt, seq)
            engine.sample(sampler)
        return time.perf_counter() - start


def _decode(engine: Engine, condition: Condition) -> tuple[list[int], list[float], float]:
    """Greedy tokens of the first sequence, seconds a step of each repeat, and of the warm-up in all.

    Several sequences take a step together, and each is fed the first one's token.
    """
    n_sequences, made, times = engine.placement.n_sequences, list[int](), list[float]()
    with Sampler(SamplingParams(temperature=0), engine.vocabulary.n_vocab) as sampler:
        token = engine.sample(sampler)

        def stretch(n: int) -> float:
            nonlocal token
            start = time.perf_counter()
            for _ in range(n):
                made.append(token)
                _step(engine, [token] * n_sequences)
                token = engine.sample(sampler)
            return time.perf_counter() - start

        if condition.repeats == 0:
            return [token], [], 0.0
        warmup_s = stretch(condition.warmup)
        n = condition.n_in_time(warmup_s / condition.warmup) if condition.warmup else condition.n_decode
        gc.collect()
        times += [stretch(n) / n for _ in range(condition.repeats)]
    return made, times, warmup_s


def _step(engine: Engine, tokens: list[int]) -> None:
    if len(tokens) == 1:
        engine.evaluate(tokens)
    else:
        engine.complete(engine.begin({seq: [token] for seq, token in enumerate(tokens)}))


def _moved(engine: Engine) -> int:
    """Bytes that have crossed the bus for the head's KV cache so far."""
    if engine.head is None:
        return 0
    moved = engine.head.cache.moved
    return moved.to_device + moved.to_host


def _empty(engine: Engine) -> None:
    for seq in range(engine.placement.n_sequences):
        engine.trim(0, seq)


def peak_memory(engine: Engine) -> PeakMemory:
    """What this process has held at most."""
    device = reserved = tool = None
    if engine.head is not None:
        kind = engine.head.compute.device.type
        if engine.head.memory is not None:
            device = engine.head.memory.peak
        elif kind == "cuda":
            import torch

            device = torch.cuda.max_memory_allocated()
            reserved = torch.cuda.max_memory_reserved()
        tool = _driver_bytes() if kind == "cuda" else None
    elif engine.placement.llama_gpu_layers:
        tool = _driver_bytes()
    return PeakMemory(
        device_bytes=device, device_reserved_bytes=reserved, device_tool_bytes=tool, host_bytes=_peak_resident()
    )


def _driver_bytes() -> int | None:
    """What the GPU's driver says that this process holds now; None where it does not say."""
    users = [user for gpu in nvidia_gpus() for user in gpu.users if user.pid == os.getpid()]
    return sum(user.n_bytes or 0 for user in users) or None


def _peak_resident() -> int:
    for line in read_text(Path("/proc/self/status")).splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # bytes on macOS


def versions(engine: Engine) -> dict[str, str]:
    """Of what made the figures."""
    import hybrid
    from hybrid.tail.llama import LLAMA_CPP_PYTHON

    found = {"hybrid": hybrid.__version__, "llama_cpp": LLAMA_CPP_PYTHON}
    if engine.head is not None:
        import torch

        found["torch"] = str(torch.__version__)
    return found


def _end_with_parent() -> None:
    while sys.stdin.read(4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
