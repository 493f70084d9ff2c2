"""Fitting the CostModel's rates to measurements of a model on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import numpy as np

from hybrid.model.spec import ModelSpec
from hybrid.schedule import head_size
from hybrid.schedule.cost import CostModel
from hybrid.schedule.kv_size import kv_bytes_per_token, visible_tokens
from hybrid.schedule.layer_work import works
from hybrid.schedule.machine import Machine
from hybrid.schedule.placement import Placement
from hybrid.schedule.rates import Coefficients, HalfRates, thread_factor

PRIOR_WEIGHT = 0.001
"""How strongly each step is held at the one before."""
STEPS, SHRINK = 60, 0.5
LEAST = 0.02
"""The least a fitted reciprocal may be of its prior's: a measurement cannot make a rate infinite."""
LEAST_UNCERTAINTY = 0.05


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Seconds of one step: a token (`decode`) or a chunk of a prompt (`prefill`) at a depth, one sequence."""

    placement: Placement
    kind: Literal["decode", "prefill"]
    depth: int
    n_tokens: int = 1
    head_s: float | None = None
    """The head alone; None where there is none, or it was not measured apart."""
    tail_s: float | None = None
    total_s: float | None = None
    """The whole step as the engine does it."""


def fit(spec: ModelSpec, machine: Machine, prior: Coefficients, measurements: Sequence[Measurement]) -> Coefficients:
    """Coefficients that explain the measurements; what they do not determine stays at the prior."""
    decode = [m for m in measurements if m.kind == "decode"]
    prefill = [m for m in measurements if m.kind == "prefill"]
    head = _fit_head(spec, prior.head, decode, prefill)
    tail = _fit_tail(spec, prior.tail, decode, prefill)
    fitted = replace(prior, head=head, tail=tail, measured=True)
    whole = [m for m in decode if m.total_s is not None]
    fitted = _fit_rest(CostModel(spec, machine, fitted), whole)
    return replace(fitted, uncertainty=_uncertainty(CostModel(spec, machine, fitted), measurements))


def _fit_head(
    spec: ModelSpec, prior: HalfRates, decode: Sequence[Measurement], prefill: Sequence[Measurement]
) -> HalfRates:
    rates = prior
    timed = [m for m in decode if m.head_s is not None]
    if timed:
        rows = [_decode_row(spec, m, head=True) for m in timed]
        c, w, a, _ = _solve(rows, [m.head_s for m in timed], _decode_prior(prior))
        threads = timed[0].placement.n_threads_head if prior.threads else 0
        rates = replace(rates, layer_s=c, weight_bytes_per_s=1 / w, kv_bytes_per_s=1 / a, threads=threads)
    chunks = [m for m in prefill if m.head_s is not None]
    if chunks:
        rates = _fit_chunks(spec, rates, chunks, [m.head_s for m in chunks], head=True)
    return rates


def _fit_tail(
    spec: ModelSpec, prior: HalfRates, decode: Sequence[Measurement], prefill: Sequence[Measurement]
) -> HalfRates:
    rates = prior
    timed = [m for m in decode if m.tail_s is not None]
    if timed:
        rows = [_decode_row(spec, m, head=False) for m in timed]
        c, w, a, o = _solve(rows, [m.tail_s for m in timed], _decode_prior(prior))
        rates = replace(
            rates,
            layer_s=c,
            weight_bytes_per_s=1 / w,
            kv_bytes_per_s=1 / a,
            output_bytes_per_s=1 / o,
            threads=timed[0].placement.n_threads_tail,
        )
    chunks = [m for m in prefill if m.tail_s is not None]
    if chunks:
        rates = _fit_chunks(spec, rates, chunks, [m.tail_s for m in chunks], head=False)
    return rates


def _decode_prior(prior: HalfRates) -> list[float]:
    output = prior.output_bytes_per_s or prior.weight_bytes_per_s
    return [prior.layer_s, 1 / prior.weight_bytes_per_s, 1 / prior.kv_bytes_per_s, 1 / output]


def _decode_row(spec: ModelSpec, m: Measurement, head: bool) -> list[float]:
    """What c, 1/W, 1/A and 1/O multiply in equation (1), summed over a half. The head's output counts with W."""
    p, k = m.placement, m.placement.n_gpu_layers
    half = works(spec.layers, p.device)[:k] if head else works(spec.layers, p.device)[k:]
    weights = sum((work.held_bytes if head else work.file_bytes) * work.active_share for work in half)
    kv = sum((visible_tokens(w.layer, m.depth) + 1) * kv_bytes_per_token(w.layer, p.kv_dtype) for w in half)
    if head and k == spec.n_layers:
        return [len(half) + 1, weights + head_size.output_head_bytes(spec, p.device), kv, 0]
    return [len(half) + (not head), weights, kv, 0 if head else spec.output_tensor.n_bytes]


def _fit_chunks(
    spec: ModelSpec, rates: HalfRates, chunks: Sequence[Measurement], seconds: Sequence[float | None], head: bool
) -> HalfRates:
    """chunk_layer_s, F and G, at the threads that the half has for single tokens."""
    rows = []
    for m in chunks:
        k, whole = m.placement.n_gpu_layers, works(spec.layers, m.placement.device)
        work = [one.chunk(m.n_tokens, m.depth) for one in (whole[:k] if head else whole[k:-1])]
        if not head:
            work.append(whole[-1].chunk(m.n_tokens, m.depth, ffn=False))
        rows.append([len(work), sum(matmul for matmul, _ in work), sum(attention for _, attention in work)])
    p = chunks[0].placement
    factor = 1.0
    if not head and rates.threads:
        factor = thread_factor(rates.threads, p.n_threads_tail_batch)
    prior = [
        rates.layer_s + rates.chunk_layer_s,
        factor / rates.flop_per_s,
        factor / rates.attention_flop_per_s,
    ]
    c, f, g = _solve(rows, seconds, prior)
    return replace(
        rates,
        chunk_layer_s=max(0.0, c - rates.layer_s),
        flop_per_s=factor / f,
        attention_flop_per_s=factor / g,
    )


def _fit_rest(model: CostModel, whole: Sequence[Measurement]) -> Coefficients:
    """What the engine's tokens take beyond both halves: t_0, and x where there are two halves."""
    rates = model.rates
    apart: dict[bool, list[float]] = {False: [], True: []}
    for m in whole:
        halves = (m.head_s or 0.0) + (m.tail_s or 0.0)
        if halves and m.total_s is not None:
            k = m.placement.n_gpu_layers
            apart[0 < k < model.spec.n_layers].append(m.total_s - halves)
    token_s = max(0.0, median(apart[False])) if apart[False] else rates.token_s
    crossing_s = max(0.0, median(apart[True]) - token_s) if apart[True] else rates.crossing_s
    return replace(rates, token_s=token_s, crossing_s=crossing_s)


def _uncertainty(model: CostModel, measurements: Sequence[Measurement]) -> float:
    """Twice the root mean square of the relative residuals."""
    errors = []
    for m in measurements:
        p = m.placement
        if m.kind == "decode":
            pairs = [(m.head_s, model.head_s(p, m.depth)), (m.tail_s, model.tail_s(p, m.depth))]
        else:
            head, tail = model.chunk_s(p, m.n_tokens, m.depth)
            pairs = [(m.head_s, head), (m.tail_s, tail)]
        errors += [predicted / measured - 1 for measured, predicted in pairs if measured]
    if not errors:
        return model.rates.uncertainty
    return max(LEAST_UNCERTAINTY, 2 * float(np.sqrt(np.mean(np.square(errors)))))


def _solve(rows: Sequence[Sequence[float]], seconds: Sequence[float | None], prior: Sequence[float]) -> list[float]:
    """Positive reciprocals that minimise the squares of relative errors. What changes together in all rows (a layer's
    weights and its fixed cost) is not determined; there the result stays near the prior, because every step is held
    weakly at the last (the proximal point method)."""
    x, y, floor = np.array(rows, float), np.array(seconds, float), LEAST * np.array(prior, float)
    found = np.array(prior, float)
    ridge = np.sqrt(PRIOR_WEIGHT * len(y)) * np.eye(len(found))
    for _ in range(STEPS):
        scaled = x * found / y[:, None]  # unknowns in units of the last step, rows in units of what was measured
        matrix = np.concatenate([scaled, ridge])
        step = np.linalg.lstsq(matrix, np.concatenate([np.ones(len(y)), np.diag(ridge)]), rcond=None)[0]
        found = np.maximum(found * np.maximum(step, SHRINK), floor)
    return [float(value) for value in found]
