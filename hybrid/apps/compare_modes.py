"""The modes that are compared, by name: each is a Placement and nothing else."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from hybrid.errors import BadRequestError, UnsupportedError
from hybrid.model.spec import ModelSpec
from hybrid.model.splits import find_splits
from hybrid.schedule.budget import Budget
from hybrid.schedule.candidates import with_kv_left
from hybrid.schedule.limits import usable_cores
from hybrid.schedule.own_offload import asked_layers, supports_offload
from hybrid.schedule.placement import KV_STRATEGIES, Placement
from hybrid.schedule.shares import with_threads

SPLIT = "split"
ALONE = "llama.cpp"
KV_IN_RAM = "llama.cpp-nkvo"
"""llama.cpp's own GPU layers with their KV cache in RAM (its `offload_kqv=False`)."""
NAMES = ("device", SPLIT, "stream", "attend", "tiered", ALONE, KV_IN_RAM)
DEFAULT = ("device", SPLIT, "stream", "attend", "tiered", ALONE)


@dataclass(frozen=True)
class Mode:
    """A name and what it means. `n_gpu_layers` are the head's, `own` are llama.cpp's; at most one of them is not 0."""

    name: str
    kind: str
    n_gpu_layers: int
    own: int = 0

    def placement(self, spec: ModelSpec, base: Placement, budget: Budget) -> Placement:
        """The placement in a setting, of which `base` gives the device, the context, the chunk and the cache's type.

        `tiered` gets what VRAM the rest leaves; none of it where nothing is left, and then it will fail honestly.
        """
        p = replace(base, n_gpu_layers=self.n_gpu_layers)
        if self.own:
            p = replace(p, llama_gpu_layers=self.own, offload_kqv=self.kind == ALONE)
        p = replace(p, kv=next((kv for kv in KV_STRATEGIES if kv == self.kind), p.kv))
        p = with_threads(p, spec, usable_cores())
        if self.kind != "tiered":
            return p
        return with_kv_left(spec, p, budget) or replace(p, kv_budget=0)


def chosen_modes(names: tuple[str, ...] | None, spec: ModelSpec) -> tuple[Mode, ...]:
    """The modes of these names, each once; without names those that this model and this machine can have.

    Where llama.cpp was built with a GPU, plain `llama.cpp` brings along all layers there, with and without its cache.
    Raises BadRequestError for what is no mode, UnsupportedError for a split that the model does not allow.
    """
    if names is None:
        splittable = len(find_splits(spec).allowed) > 1
        names = tuple(name for name in DEFAULT if splittable or name == ALONE)
    found: dict[str, Mode] = {}
    for name in names:
        for mode in _modes(name.strip().lower(), spec):
            found.setdefault(mode.name, mode)
    if not found:
        raise BadRequestError(f"There is nothing to compare: give one or more of {', '.join(NAMES)}.")
    return tuple(found.values())


def _modes(name: str, spec: ModelSpec) -> list[Mode]:
    kind, colon, layers = name.partition(":")
    if kind not in NAMES:
        raise BadRequestError(f"{name!r} is no mode; there are {', '.join(NAMES)}, each with :LAYERS if you like.")
    if colon and layers != "all" and not re.fullmatch("[0-9]{1,6}", layers):
        raise BadRequestError(f"{name!r} is no mode: {layers!r} is not a number of layers or 'all'.")
    if kind in (ALONE, KV_IN_RAM):
        return _own(name, kind, layers, spec)
    splits = find_splits(spec)
    if len(splits.allowed) < 2:
        raise UnsupportedError(f"This model cannot run with layers on the device: {splits.refusal(1)}.")
    if layers == "all":
        k = spec.n_layers
    elif layers:
        k = int(layers)
    elif kind == SPLIT:
        k = min((k for k in splits.allowed if k), key=lambda k: abs(2 * k - spec.n_layers))
        name = f"{SPLIT}:{k}"
    else:
        k = splits.allowed[-1]
    if k == 0:
        raise BadRequestError(f"{name!r} has no layers on the device; that is {ALONE}.")
    if refusal := splits.refusal(k):
        raise UnsupportedError(f"{name!r} cannot be: {refusal}.")
    return [Mode(name, kind, k)]


def _own(name: str, kind: str, layers: str, spec: ModelSpec) -> list[Mode]:
    if layers or kind == KV_IN_RAM:
        own = asked_layers(layers or "all", spec)
        if not own:
            return [Mode(ALONE, ALONE, 0)]
        return [Mode(name, kind, 0, own)]
    modes = [Mode(ALONE, ALONE, 0)]
    if supports_offload():
        own = asked_layers("all", spec)
        modes += [Mode(f"{ALONE}:all", ALONE, 0, own), Mode(KV_IN_RAM, KV_IN_RAM, 0, own)]
    return modes
