"""What the chat says about itself: the line after an answer, `/stats`, `/memory` and `/split`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid.runtime.completion import Completion
from hybrid.schedule.ledger import ledger_of

if TYPE_CHECKING:
    from hybrid import Hybrid

BAR_WIDTH = 60


def status(model: Hybrid, last: Completion) -> str:
    """One line about an answer."""
    timings, memory, where = last.timings, last.memory, model.placement
    new = last.n_prompt_tokens - last.n_cached_tokens
    parts = ["stopped"] * (last.finish_reason == "interrupted")
    parts.append(f"{_count(len(last.tokens), 'token')} (prompt {new:,} new, {last.n_cached_tokens:,} reused)")
    if timings.ttft_s is not None:
        parts.append(f"first {_seconds(timings.ttft_s)}")
    if timings.decode_tok_per_s is not None:
        parts.append(f"{timings.decode_tok_per_s:.1f} tok/s")
    parts.append(f"context {model.n_used:,}/{model.n_ctx:,}")
    parts.append(f"layers {where.n_gpu_layers}/{model.engine.spec.n_layers}")
    if where.n_gpu_layers:
        parts.append(f"VRAM {_mib(memory.device_bytes)}" + (" (emulated)" if where.device == "cpu" else ""))
    parts.append(f"RAM {_mib(memory.host_bytes)}")
    return " · ".join(parts)


def stats(model: Hybrid, last: Completion | None) -> str:
    """What the last answer took, and what runs where."""
    where = model.placement
    lines = [
        f"model    {model.model_path}",
        f"layers   {where.where}, the others in llama.cpp" if where.n_gpu_layers else f"layers   {where.where}",
        f"context  {model.n_used:,} of {model.n_ctx:,} tokens, KV cache {where.kv} {where.kv_dtype}",
    ]
    if last is not None:
        speed, reused = last.timings, last.n_cached_tokens
        prefill = "" if speed.prefill_tok_per_s is None else f", {speed.prefill_tok_per_s:,.1f} tokens per second"
        decode = "" if speed.decode_tok_per_s is None else f", {speed.decode_tok_per_s:,.1f} tokens per second"
        first = "" if speed.ttft_s is None else f", the first after {_seconds(speed.ttft_s)}"
        lines += [
            f"prompt   {_count(last.n_prompt_tokens, 'token')}, {reused:,} of them reused{prefill}",
            f"answer   {_count(len(last.tokens), 'token')}{first}{decode}",
            f"memory   {_mib(last.memory.device_bytes)} on the device, {_mib(last.memory.host_bytes)} on the host",
        ]
    return "\n".join(lines)


def memory(model: Hybrid) -> str:
    """The Ledger's bytes beside the measured ones, on both sides."""
    import psutil

    engine, where = model.engine, model.placement
    ledger = ledger_of(engine.spec, where)
    rows = [("", "device", "measured", "host", "measured")]
    head, tail = engine.head, engine.tail.memory if engine.tail is not None else None
    own = ledger.device.static.n_bytes, ledger.host.static.n_bytes
    kv = sum(ledger.device.dynamic.kv), sum(ledger.host.dynamic.kv)
    tail_kv = (tail.kv_bytes if tail else 0) + (head.cache.host_nbytes if head else 0)
    weights = head.weight_bytes if head else None, tail.model_bytes if tail else None
    rows.append(_row("weights", own[0], weights[0], own[1], weights[1]))
    rows.append(_row("KV cache", kv[0], head.cache.nbytes if head else None, kv[1], tail_kv))
    rest = ledger.device.n_bytes - own[0] - kv[0], ledger.host.n_bytes - own[1] - kv[1]
    rows.append(_row("the rest", rest[0], None, rest[1], None))
    used = psutil.Process().memory_info().rss
    rows.append(_row("together", ledger.vram_bytes, head.nbytes if head else None, ledger.ram_bytes, used))
    notes = ["Predicted by the ledger, measured where a part is counted; the host's sum is the process's resident set."]
    if ledger.emulated:
        notes.append("The device is emulated: its bytes are in the host's sum, too.")
    if ledger.mapped_bytes:
        notes.append(f"{_mib(ledger.mapped_bytes)} of the host's are the mapped file, resident where it was read.")
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    table = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    return "\n".join([*table, *notes])


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


def _row(name: str, *amounts: int | None) -> tuple[str, str, str, str, str]:
    device, device_now, host, host_now = ("-" if n is None else _mib(n) for n in amounts)
    return name, device, device_now, host, host_now


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' * (n != 1)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.0f} MiB"
