"""What runs a placement: the command line, and the arguments in Python."""

from __future__ import annotations

import shlex
from typing import Any

from hybrid.model.spec import ModelSpec
from hybrid.schedule.limits import usable_cores
from hybrid.schedule.placement import Placement
from hybrid.schedule.shares import with_batch


def command(name: str, p: Placement, spec: ModelSpec) -> str:
    """What to type for `p` of the model called `name`. Several sequences are decoded together by `hybrid summarize`,
    which reads as many chunks at a time."""
    words = ["hybrid", "chat", name]
    if p.n_sequences > 1:
        words = ["hybrid", "summarize", "FILE", "-m", name]
    return shlex.join([*words, *flags(p, spec, usable_cores())])


def flags(p: Placement, spec: ModelSpec, cores: int) -> list[str]:
    """Layers, context, and everything in which `p` differs from what they have by default on so many cores."""
    words = []
    if p.n_sequences > 1:
        words += ["--parallel", str(p.n_sequences), "--speculate", str(p.n_draft) if p.n_draft else "off"]
    words += [*_layers(p, spec), "-c", str(p.n_ctx)]
    if p.n_gpu_layers and p.device not in ("cuda", "cuda:0"):
        words += ["--device", p.device]
    if p.n_gpu_layers and p.kv != "device":
        words += ["--kv", p.kv]
        words += ["--kv-budget", str(p.kv_budget)] if p.kv_budget is not None else []
        words += [] if p.kv_keep_sliding else ["--no-kv-keep-sliding"]
    if p.kv_dtype != "f16":
        words += ["--kv-type", p.kv_dtype]
    if p.n_batch != with_batch(p, spec, None).n_batch:
        words += ["-b", str(p.n_batch)]
    if p.n_ubatch != p.n_batch:
        words += ["-ub", str(p.n_ubatch)]
    if p.n_threads_tail != cores:
        words += ["-t", str(p.n_threads_tail)]
    return words


def arguments(p: Placement) -> dict[str, Any]:
    """The arguments of `Hybrid` that give `p`: every one that says what runs where, as by default or not."""
    own = p.llama_gpu_layers > 0
    return {
        "n_gpu_layers": p.n_offloaded,
        "device": p.device if p.n_gpu_layers else None,
        "n_ctx": p.n_ctx,
        "n_batch": p.n_batch,
        "n_ubatch": p.n_ubatch,
        "n_threads": p.n_threads_tail,
        "kv": p.kv,
        "kv_dtype": p.kv_dtype,
        "kv_budget": p.kv_budget,
        "kv_keep_sliding": p.kv_keep_sliding,
        "engine": "llama.cpp" if own else "hybrid",
        "offload_kqv": p.offload_kqv or not own,
    }


def _layers(p: Placement, spec: ModelSpec) -> list[str]:
    """Whose layers, and how many; llama.cpp's output head counts as one more, which only "all" takes along."""
    if not p.llama_gpu_layers:
        return ["-ngl", str(p.n_gpu_layers)]
    own = "all" if p.llama_gpu_layers > spec.n_layers else str(p.llama_gpu_layers)
    return ["--engine", "llama.cpp", "-ngl", own, *([] if p.offload_kqv else ["-nkvo"])]
