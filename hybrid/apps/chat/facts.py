"""What the chat says about itself: the line after an answer, `/stats`, `/memory` and `/split`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybrid.runtime.completion import Completion
from hybrid.schedule.budget import mib
from hybrid.schedule.ledger import ledger_of

if TYPE_CHECKING:
    from hybrid import Hybrid

BAR_WIDTH = 36
SEPARATOR = " · "
EARLY = {"interrupted": "stopped", "length": "cut off"}
"""How an answer ended that is not whole: by Ctrl-C; by -n or the context's end."""
LEAST_FIRST = ("RAM", "VRAM", "layers", "first", "prompt", "tokens", "speed")
"""Of the line about an answer, what a narrow terminal has no room for: first what stays the same from answer to answer.
The context's use is never left out."""


def status(model: Hybrid, last: Completion, width: int | None = None) -> str:
    """One line about an answer, of fewer than `width` characters: what matters least is left out first, and `/stats`
    has it all."""
    timings, where = last.timings, model.placement
    new = last.n_prompt_tokens - last.n_cached_tokens
    vram = mib(last.memory.device_bytes) + (" (emulated)" if where.device == "cpu" else "")
    parts = {
        "early": EARLY.get(last.finish_reason, ""),
        "tokens": _count(len(last.tokens), "token"),
        "prompt": f"read {new:,}, reused {last.n_cached_tokens:,}",
        "first": "" if timings.ttft_s is None else f"first {_seconds(timings.ttft_s)}",
        "speed": "" if timings.decode_tok_per_s is None else f"{timings.decode_tok_per_s:.1f} tok/s",
        "context": f"context {model.n_used:,}/{model.n_ctx:,}",
        "layers": f"layers {where.n_gpu_layers}/{model.engine.spec.n_layers}",
        "VRAM": f"VRAM {vram}" if where.n_gpu_layers else "",
        "RAM": f"RAM {mib(last.memory.host_bytes)}",
    }
    line = SEPARATOR.join(filter(None, parts.values()))
    for least in LEAST_FIRST:
        if width is None or len(line) < width:
            break
        del parts[least]
        line = SEPARATOR.join(filter(None, parts.values()))
    return line


def stats(model: Hybrid, last: Completion | None) -> str:
    """What the last answer took, and what runs where."""
    where, n_layers = model.placement, model.engine.spec.n_layers
    k = where.n_gpu_layers
    kv = f"{where.kv} {where.kv_dtype}" if k else where.kv_dtype
    others = f", the other {n_layers - k} in llama.cpp" if 0 < k < n_layers else ""
    lines = [
        f"model    {model.model_path}",
        f"layers   {where.where}{others}",
        f"context  {model.n_used:,} of {model.n_ctx:,} tokens, KV cache {kv}",
    ]
    if last is not None:
        speed, reused = last.timings, last.n_cached_tokens
        prefill = "" if speed.prefill_tok_per_s is None else f", {speed.prefill_tok_per_s:,.1f} tokens per second"
        decode = "" if speed.decode_tok_per_s is None else f", {speed.decode_tok_per_s:,.1f} tokens per second"
        first = "" if speed.ttft_s is None else f", the first after {_seconds(speed.ttft_s)}"
        early = f", {EARLY[last.finish_reason]}" if last.finish_reason in EARLY else ""
        emulated = " (emulated)" * (k > 0 and where.device == "cpu")
        device, host = mib(last.memory.device_bytes), mib(last.memory.host_bytes)
        lines += [
            f"prompt   {_count(last.n_prompt_tokens, 'token')}, {reused:,} of them reused{prefill}",
            f"answer   {_count(len(last.tokens), 'token')}{early}{first}{decode}",
            f"memory   {device} on the device{emulated}, {host} on the host",
        ]
    return "\n".join(lines)


def memory(model: Hybrid) -> str:
    """The Ledger's bytes beside the measured ones, a block for each side: it fits a narrow terminal."""
    import psutil

    engine, where = model.engine, model.placement
    ledger = ledger_of(engine.spec, where)
    head, tail = engine.head, engine.tail.memory if engine.tail is not None else None
    own = ledger.device.static.n_bytes, ledger.host.static.n_bytes
    kv = sum(ledger.device.dynamic.kv), sum(ledger.host.dynamic.kv)
    tail_kv = (tail.kv_bytes if tail else 0) + (head.cache.host_nbytes if head else 0)
    weights = head.weight_bytes if head else None, tail.model_bytes if tail else None
    rest = ledger.device.n_bytes - own[0] - kv[0], ledger.host.n_bytes - own[1] - kv[1]
    used = psutil.Process().memory_info().rss
    device = (weights[0], head.cache.nbytes, None, head.nbytes) if head else (None,) * 4
    lines = _block("device", (own[0], kv[0], rest[0], ledger.vram_bytes), device) if where.n_offloaded else []
    lines += _block("host", (own[1], kv[1], rest[1], ledger.ram_bytes), (weights[1], tail_kv, None, used))
    notes = ["Measured is what can be counted by itself; the host's sum is the process's resident set."]
    if ledger.emulated:
        notes.append("The device is emulated: its bytes are in the host's sum, too.")
    if ledger.mapped_bytes:
        notes.append(f"{mib(ledger.mapped_bytes)} of the host's are the mapped file, resident where it was read.")
    return "\n".join([*lines, *notes])


def split(model: Hybrid) -> str:
    """What runs where, as a bar of layers."""
    where, n = model.placement, model.engine.spec.n_layers
    k, own = where.n_gpu_layers, min(where.llama_gpu_layers, n)
    width = min(n, BAR_WIDTH)
    device = round(width * k / n)
    last = round(width * own / n)
    device_name = "a GPU that the CPU emulates" if where.device == "cpu" else where.device
    lines = ["█" * device + "░" * (width - device - last) + "▓" * last]
    if k:
        lines.append(f"█ {_layers(0, k)} PyTorch on {device_name}, KV cache: {where.kv}")
    if k < n - own:
        lines.append(f"░ {_layers(k, n - own)} llama.cpp on the CPU")
    if own:
        lines.append(f"▓ {_layers(n - own, n)} llama.cpp on its GPU")
    if k == n:
        lines.append("  llama.cpp tokenizes and samples")
    return "\n".join(lines)


def _layers(first: int, end: int) -> str:
    return f"layer {first}:" if end - first == 1 else f"layers {first} to {end - 1}:"


def _block(side: str, predicted: Sequence[int | None], measured: Sequence[int | None]) -> list[str]:
    """A table of one side's memory: weights, KV cache, the rest and the sum."""
    lines = [f"{side:10}  {'predicted':>11}  {'measured':>11}"]
    for name, *amounts in zip(("weights", "KV cache", "the rest", "together"), predicted, measured, strict=True):
        cells = ("-" if n is None else mib(n) for n in amounts)
        lines.append(f"  {name:8}" + "".join(f"  {cell:>11}" for cell in cells))
    return lines


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' * (n != 1)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
