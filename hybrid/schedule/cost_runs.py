"""Correcting the CostModel by what runs of the model took: chats, generations, tunings, as the profile keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from hybrid.schedule.cost import CostModel
from hybrid.schedule.profile import Record
from hybrid.schedule.rates import HalfRates

MOST_RUNS = 9
"""The youngest that count: a machine changes, and of an odd number one is in the middle."""
LEAST, MOST = 0.01, 100.0
"""What a half may be quicker or slower than predicted: beyond that something else was measured."""

Found = list[float]


def corrected(model: CostModel, device: str, records: Sequence[Record]) -> tuple[CostModel, int]:
    """The model with both halves as much slower as runs here were than predicted, in single tokens and in prompts
    apart; and how many runs told that. Where none did, it is as it was.

    A run of llama.cpp alone, and one of the whole model on the device, tell of one half each. A split's tokens tell of
    the tail, with what the head is believed to take put off; its prompts, whose halves overlap, of neither. A device
    emulated on the CPU is the same processor: both halves have the same factor.
    """
    kind, used = device.partition(":")[0], set[int]()

    def tell(prompts: bool) -> tuple[float, float]:
        of_head, of_tail, split = _ratios(model, kind, records, prompts, used)
        if kind == "cpu":
            both = _middle([*of_head, *of_tail])
            return both, both
        head = _middle(of_head)
        return head, _middle([*of_tail, *((seconds - head * h) / t for seconds, h, t in split)])

    (head, tail), (head_prompts, tail_prompts) = tell(prompts=False), tell(prompts=True)
    rates = replace(
        model.rates,
        head=_slower(model.rates.head, head, head_prompts),
        tail=_slower(model.rates.tail, tail, tail_prompts),
        token_s=model.rates.token_s * tail,
    )
    return (replace(model, rates=rates) if used else model), len(used)


def _ratios(
    model: CostModel, kind: str, records: Sequence[Record], prompts: bool, used: set[int]
) -> tuple[Found, Found, list[tuple[float, float, float]]]:
    """Seconds over predicted ones, of the head's runs and the tail's (an emulated head's all count); and of splits'
    tokens the seconds and what was predicted for each half. `used` gets the records' numbers."""
    of_head, of_tail, split = Found(), Found(), list[tuple[float, float, float]]()
    for number, seconds in _timed(records, prompts):
        r, p = records[number], records[number].placement
        k, whole = p.n_gpu_layers, p.n_gpu_layers == model.spec.n_layers
        if k and p.device.partition(":")[0] != kind:
            continue
        if prompts and k > 0 and not whole and kind != "cpu":
            continue
        if len(of_head) + len(of_tail) + len(split) == MOST_RUNS:
            break
        used.add(number)
        if k > 0 and not whole and kind != "cpu":
            split.append((seconds, model.head_s(p, r.depth), model.tpot_s(p, r.depth) - model.head_s(p, r.depth)))
            continue
        predicted = p.n_sequences * model.prefill_s(p, r.n_prompt) if prompts else model.tpot_s(p, r.depth)
        (of_head if whole else of_tail).append(seconds / predicted)
    return of_head, of_tail, split


def _timed(records: Sequence[Record], prompts: bool) -> Iterator[tuple[int, float]]:
    """Numbers of those that have such a speed, the youngest first, and the seconds."""
    for number in range(len(records) - 1, -1, -1):
        record = records[number]
        samples = record.prefill_s if prompts else record.decode_s
        if samples and not record.failure and not record.placement.llama_gpu_layers:
            yield number, median(samples)


def _middle(found: Found) -> float:
    return min(max(median(found), LEAST), MOST) if found else 1.0


def _slower(rates: HalfRates, tokens: float, prompts: float) -> HalfRates:
    """Single tokens take so many times as long, and so many times the tokens of a prompt."""
    fixed_s = prompts * (rates.layer_s + rates.chunk_layer_s)
    slower, of_prompts = rates.slower(tokens), rates.slower(prompts)
    return replace(
        slower,
        flop_per_s=of_prompts.flop_per_s,
        attention_flop_per_s=of_prompts.attention_flop_per_s,
        chunk_layer_s=max(0.0, fixed_s - slower.layer_s),
    )
