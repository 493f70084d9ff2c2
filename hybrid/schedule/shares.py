"""What follows from a number of layers in the head: the chunks of a prompt, and each pool's threads."""

from __future__ import annotations

from dataclasses import replace

from hybrid.model.spec import ModelSpec
from hybrid.schedule.placement import Placement
from hybrid.schedule.request import positive

DEFAULT_N_BATCH = 512
SPLIT_N_BATCH = 128
"""The chunk where both halves work: the smaller it is, the sooner the tail starts, until overhead eats the gain
(`scripts/bench_split.py` sweeps it; 64 and 128 are equally fast there, 512 is a tenth to a sixth slower)."""


def with_batch(base: Placement, spec: ModelSpec, n_batch: int | None, n_ubatch: int | None = None) -> Placement:
    """The placement with the chunk sizes asked for, or the defaults for its k; never more than the context."""
    default = SPLIT_N_BATCH if 0 < base.n_gpu_layers < spec.n_layers else DEFAULT_N_BATCH
    n_batch = min(positive("n_batch", n_batch or default), base.n_ctx)
    n_ubatch = min(positive("n_ubatch", n_ubatch or n_batch), n_batch)
    return replace(base, n_batch=n_batch, n_ubatch=n_ubatch)


def with_threads(base: Placement, spec: ModelSpec, cores: int) -> Placement:
    """The placement with `cores` shared out: the pools that work at the same time never exceed the cores together."""
    k = base.n_gpu_layers
    if k == 0:
        head, beside = 1, cores
    elif k == spec.n_layers:
        head, beside = (cores if base.device == "cpu" else 1), cores
    else:
        head = max(1, cores // 2) if base.device == "cpu" else 1
        beside = max(1, cores - head)
    attend = cores
    if base.kv == "tiered":  # the only strategy that attends on both sides at once; an emulated one has cores for it
        attend = max(1, cores // 2 if base.device == "cpu" else cores - head)
    return replace(
        base, n_threads_head=head, n_threads_tail=cores, n_threads_tail_batch=beside, n_threads_attend=attend
    )
