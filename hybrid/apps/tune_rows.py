"""What a tuning says of each placement: predicted, measured, and how it compares with the best."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hybrid.report.trial import Spread
from hybrid.report.tuning import Row
from hybrid.schedule.estimate import Estimate, measured_s
from hybrid.schedule.ledger import ledger_of
from hybrid.schedule.profile import Record


def row_of(estimate: Estimate, i: int, best: int | None, vram_bytes: int) -> Row:
    """What is known of placement `i`, where `best` is the quickest; `vram_bytes` is what it needs."""
    p, objective = estimate.placements[i], estimate.objective
    records = estimate.records_of(i)
    timed = [r for r in records if measured_s(r, objective) is not None]
    timed = [r for r in timed if r.source == "tune"] or timed  # a chat's speed is better than none
    samples = [s for r in timed for s in (r.prefill_s if objective == "ttft" else r.decode_s)]
    failures = [r for r in records if r.failure]
    verdict, message = "not measured", ""
    if failures:
        verdict, message = failures[-1].failure, failures[-1].message
    elif samples and best is not None:
        verdict = _verdict(estimate, i, best)
    return Row(
        placement=p,
        vram_bytes=vram_bytes,
        ram_bytes=ledger_of(estimate.model.spec, p).ram_bytes,
        predicted_s=_predicted_s(estimate, i, timed),
        measured=None if failures else Spread.of(samples),
        n_runs=len(timed),
        device_bytes=max((r.device_bytes for r in timed if r.device_bytes), default=None),
        host_bytes=max((r.host_bytes for r in timed if r.host_bytes), default=None),
        verdict=verdict,
        message=message,
    )


def _predicted_s(estimate: Estimate, i: int, timed: Sequence[Record]) -> float | None:
    """What was predicted before the first of the measurements `timed`: later predictions know the answer. None where
    nobody predicted, before a chat."""
    if not timed:
        return math.exp(estimate.belief.mean[i])
    return next((record.predicted_s for record in timed if record.predicted_s is not None), None)


def _verdict(estimate: Estimate, i: int, best: int) -> str:
    """ "best", "tie" where twice the spread does not tell them apart, or how much longer it takes."""
    if i == best:
        return "best"
    mean, sd = estimate.belief.apart(i, best)
    if mean <= 2 * sd:
        return "tie"
    times = math.exp(mean)
    return f"{times:.1f} x slower" if times >= 2 else f"{100 * (times - 1):.0f} % slower"
