"""What is believed of placements' speeds: the CostModel's predictions, corrected by what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from functools import cached_property
from statistics import median, stdev
from typing import Literal

from hybrid.model.spec import ModelSpec
from hybrid.schedule.cost import CostModel
from hybrid.schedule.kv_tiers import by_what_it_holds
from hybrid.schedule.own_offload import stand_in
from hybrid.schedule.placement import Placement
from hybrid.schedule.profile import Record
from hybrid.schedule.search import Belief, Observation, Option, believe

Objective = Literal["latency", "ttft", "throughput"]
LEAST_UNCERTAINTY = 0.1
"""Of predictions, whatever the fit says of itself."""


@dataclass(frozen=True)
class Estimate:
    """Placements, and what is known of the seconds each takes: of a step of decode at `depth`, or (`ttft`) until the
    first tokens of prompts of `depth` tokens."""

    model: CostModel
    placements: Sequence[Placement]
    records: Sequence[Record]
    depth: int
    objective: Objective = "latency"

    @cached_property
    def options(self) -> list[Option]:
        """The placements as the search sees them."""
        return [self._option(p) for p in self.placements]

    @cached_property
    def observations(self) -> list[Observation]:
        """Those records that are of one of the placements."""
        found = []
        for record, key in zip(self.records, self._keys, strict=True):
            index = self._index.get(key)
            seconds = measured_s(record, self.objective)
            if index is None or seconds is None:
                continue
            depth = record.n_prompt if self.objective == "ttft" else record.depth
            predicted = self.predicted_s(record.placement, depth)
            found.append(Observation(index, seconds, predicted, spread_of(record, self.objective)))
        return found

    @cached_property
    def belief(self) -> Belief:
        """What follows from them."""
        return believe(self.options, self.observations, max(LEAST_UNCERTAINTY, self.model.rates.uncertainty))

    def records_of(self, index: int) -> list[Record]:
        """Those of one placement, failures included."""
        wanted = self._key(self.placements[index])
        return [record for record, key in zip(self.records, self._keys, strict=True) if key == wanted]

    def predicted_s(self, p: Placement, depth: int) -> float:
        """By the CostModel alone."""
        p = stand_in(self.model.spec, p)
        if self.objective == "ttft":
            return p.n_sequences * self.model.prefill_s(p, max(1, depth))
        return self.model.tpot_s(p, depth)

    @cached_property
    def _index(self) -> dict[Placement, int]:
        return {self._key(p): i for i, p in enumerate(self.placements)}

    @cached_property
    def _keys(self) -> list[Placement]:
        """Each record's."""
        return [self._key(record.placement) for record in self.records]

    def _key(self, p: Placement) -> Placement:
        return same_speed(p, self.objective, self.model.spec)

    def _option(self, p: Placement) -> Option:
        seconds = self.predicted_s(p, self.depth)
        strategy, layers = (p.strategy, p.n_threads_tail), p.n_offloaded
        p = stand_in(self.model.spec, p)
        if self.objective == "ttft":
            head, tail = self.model.chunk_s(p, p.n_batch, self.depth // 2)
            share = head / max(head + tail, 1e-12)
        else:
            share = self.model.head_s(p, self.depth) / seconds
        return Option(strategy, min(1.0, layers / self.model.spec.n_layers), min(1.0, share), seconds)


def measured_s(record: Record, objective: Objective) -> float | None:
    """The seconds a record has for an objective; None where it has none."""
    samples = _samples(record, objective)
    return median(samples) if samples else None


def _samples(record: Record, objective: Objective) -> tuple[float, ...]:
    return record.prefill_s if objective == "ttft" else record.decode_s


def spread_of(record: Record, objective: Objective) -> float:
    """How far its seconds may be off by its own samples, relative: the standard error of the mean of their logarithms;
    0 of a single one, which tells nothing of it."""
    samples = _samples(record, objective)
    return stdev(map(math.log, samples)) / math.sqrt(len(samples)) if len(samples) > 1 else 0.0


def same_speed(p: Placement, objective: Objective, spec: ModelSpec) -> Placement:
    """The placement with everything alike that does not change how fast it is: two that agree are one measurement."""
    p = replace(by_what_it_holds(spec, p), n_ctx=1, device=p.device.partition(":")[0])
    if p.n_gpu_layers == 0:
        p = replace(p, device="cpu", kv="device", kv_budget=None, n_threads_head=1, n_threads_attend=1)
    if objective != "ttft":
        p = replace(p, n_batch=1, n_ubatch=1, n_threads_tail_batch=1)
    return p


def last_measured(records: Iterable[Record], today: date | None = None) -> str:
    """ "measured 18.2 tok/s yesterday", of the youngest record with a decode speed; empty where there is none."""
    timed = [record for record in records if record.decode_s]
    if not timed:
        return ""
    last = max(timed, key=lambda record: record.at)
    days = ((today or date.today()) - datetime.fromisoformat(last.at).date()).days
    when = {0: "today", 1: "yesterday"}.get(days, f"{days} days ago" if days > 1 else f"on {last.at[:10]}")
    return f"measured {last.placement.n_sequences / median(last.decode_s):.1f} tok/s {when}"
