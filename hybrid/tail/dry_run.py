"""What llama.cpp would allocate for a tail: its own figures, without loading a weight. The Ledger's oracle."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hybrid.model.file import ModelFile
from hybrid.model.spec import ModelSpec
from hybrid.schedule.placement import Placement
from hybrid.tail.context import context_params
from hybrid.tail.llama import LogMark, lib
from hybrid.tail.tail import TailMemory
from hybrid.tail.unloaded import unloaded

_KV_SIZE = re.compile(r"kv_cache: *size = *([\d.]+) MiB")


def dry_run(file: ModelFile, spec: ModelSpec, placements: Iterable[Placement]) -> list[TailMemory]:
    """llama.cpp's buffers for each placement (0 <= k < L); `model_bytes` is 0, as nothing is loaded.

    The model is opened once for every stretch of placements with the same k. Figures are to 0.01 MiB a buffer.
    Raises UnsupportedError for a k that is not allowed, EngineError with llama.cpp's own reason.
    """
    found: list[TailMemory] = []
    rest = list(placements)
    while rest:
        k = rest[0].n_gpu_layers
        n = next((i for i, p in enumerate(rest) if p.n_gpu_layers != k), len(rest))
        with unloaded(file, spec, k) as model:
            found += [_context_memory(spec, model, placement) for placement in rest[:n]]
        del rest[:n]
    return found


def _context_memory(spec: ModelSpec, model: int, placement: Placement) -> TailMemory:
    log = LogMark()
    context = lib().llama_init_from_model(model, context_params(placement, placement.n_outputs))
    if not context:
        raise log.error("set up its context")
    lib().llama_free(context)
    sizes = [match[1] for line in log.lines() if (match := _KV_SIZE.search(line))]
    return TailMemory(
        model_bytes=0,
        kv_bytes=sum(round(float(size) * 2**20) for size in sizes),
        compute_bytes=log.buffer_bytes("compute"),
        output_bytes=4 * spec.n_vocab * placement.n_outputs,
    )
