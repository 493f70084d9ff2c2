"""How many sequences fit beside each other, by the Ledger."""

from __future__ import annotations

from dataclasses import replace

from hybrid.model.spec import ModelSpec
from hybrid.schedule.budget import Budget, mib
from hybrid.schedule.ledger import ledger_of
from hybrid.schedule.placement import Placement


def with_sequences(spec: ModelSpec, one: Placement, most: int, budget: Budget) -> tuple[Placement, str]:
    """`one`, which has one sequence, with as many as the budget allows, `most` at most; and a line that says so.

    Nothing else changes: neither the layers on the device nor the context of a sequence gets smaller for it.
    """
    most = max(1, min(most, one.n_batch))
    fitting = [n for n in range(most, 1, -1) if budget.shortfall(ledger_of(spec, replace(one, n_sequences=n))) is None]
    chosen = replace(one, n_sequences=fitting[0] if fitting else 1)
    kv = mib(ledger_of(spec, chosen).kv_bytes)
    why = "as many as there is use for" if chosen.n_sequences == most else "as many as fit"
    many = f"{chosen.n_sequences} sequences" if chosen.n_sequences > 1 else "One sequence"
    return chosen, f"{many} at a time, {why}: {kv} of KV cache."
