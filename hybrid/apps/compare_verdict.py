"""What a comparison says, in plain sentences: a function of its rows alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

from hybrid.apps.compare_modes import ALONE
from hybrid.report.comparing import LEAST_APART_ONCE, CompareReport, CompareRow, Setting, told_apart
from hybrid.report.trial import Spread

EMULATION = (
    "The GPU was emulated on the CPU (--device cpu): what fits and what comes out is as on a GPU, but these speeds are "
    "the CPU's and say nothing about a GPU's."
)
MUCH_SLOWER = 0.5
"""Below this share of the speed that the device alone has where it fits, a smaller model or context is worth more."""
MOST_CROSSINGS = 4
NOISY = 0.25
"""Half of least to most, relative to the median: more than that is no spread of a quiet machine."""
Rows = Sequence[CompareRow]


def verdict(report: CompareReport) -> tuple[str, ...]:
    """Sentences: what completes, what is fastest where, what it costs, where two change places, whether it is worth it,
    whether the outputs agree."""
    groups = [(setting, [row for row in rows if row.trials]) for setting, rows in report.groups]
    groups = [(setting, rows) for setting, rows in groups if rows]
    if not groups:
        return ("Nothing was measured.",)
    lines: list[str] = []
    for kind in dict.fromkeys((setting.kv_dtype, setting.n_sequences) for setting, _ in groups):
        ours = [(s, rows) for s, rows in groups if (s.kv_dtype, s.n_sequences) == kind]
        found = [*_completes(ours), *_fastest(ours), *_costs(ours, report), *_crossings(ours), *_worth(ours, report)]
        label = _label(groups, *kind)
        lines += [label + line for line in found]
    lines += _by_sequences(groups)
    lines += _outputs(groups, report)
    lines += _noise(groups)
    if report.emulated:
        lines.append(EMULATION)
    return tuple(lines)


def _label(groups: Sequence[tuple[Setting, Rows]], kv_dtype: str, n_sequences: int) -> str:
    """What sets a group of settings apart from the others, to begin its sentences with."""
    parts = []
    if len({setting.n_sequences for setting, _ in groups}) > 1:
        parts.append(f"{n_sequences} sequence{'s' * (n_sequences > 1)}")
    if len({setting.kv_dtype for setting, _ in groups}) > 1:
        parts.append(f"{kv_dtype} cache")
    return f"[{', '.join(parts)}] " if parts else ""


def _completes(groups: Sequence[tuple[Setting, Rows]]) -> Iterator[str]:
    for setting, rows in groups:
        failed, done = [row for row in rows if row.failure], [row for row in rows if row.finished]
        at = f"At {setting.depth:,} tokens"
        if not failed:
            yield f"{at} {'everything completes' if len(done) > 1 else f'{done[0].mode} completes'}."
            continue
        how = listed([f"{row.mode} ({_how(row)})" for row in failed])
        rest = f"; {listed([row.mode for row in done])} complete{'s' * (len(done) == 1)}" if done else ""
        yield f"{at} {how} fail{'s' * (len(failed) == 1)}{rest or ', and nothing completes'}."


def _how(row: CompareRow) -> str:
    assert row.failure is not None
    stages = {"load": "while loading", "prompt": "while it read the prompt", "decode": "while decoding"}
    stage = stages.get(row.failure.stage, "")
    return f"{row.failure.kind} {stage}".strip()


def _fastest(groups: Sequence[tuple[Setting, Rows]]) -> Iterator[str]:
    for setting, rows in groups:
        ranked = by_speed(rows)
        if len(ranked) < 2:
            continue
        best, ties, slower = _ranking(ranked)
        line = f"At {setting.depth:,} tokens {best.mode} decodes fastest, {best.tok_per_s:.1f} tok/s"
        if ties:
            line += f", which the runs do not tell apart from {listed([row.mode for row in ties])}"
        if slower:
            second = slower[0]
            line += f"; {second.mode} follows with {second.tok_per_s:.1f}"
        soonest = min(ranked, key=lambda row: row.ttft.median if row.ttft else float("inf"))
        if soonest.ttft is not None:
            line += f". The first token comes soonest with {soonest.mode}, after {soonest.ttft.median:.2f} s"
        yield line + "."


def _costs(groups: Sequence[tuple[Setting, Rows]], report: CompareReport) -> Iterator[str]:
    """What the modes that take less VRAM take of RAM instead, at the greatest depth; by the Ledger, which also knows
    what failed."""
    setting, rows = groups[-1]
    cheaper = [row for row in rows if row.finished and row.placement.n_gpu_layers and (row.vram_saved or 0) > 0]
    if cheaper:
        costs = [f"{row.mode} {_mib(row.vram_saved)} for {_mib(max(0, row.host_cost or 0))} of RAM" for row in cheaper]
        yield (
            f"VRAM saved against everything on the device at {setting.depth:,} tokens, and the host memory it costs "
            f"(by the Ledger): {listed(costs)}."
        )
    seen = [(row.mode, n) for row in rows if row.finished and (n := row.most("host_bytes")) is not None]
    if len(seen) > 1:
        share = ", with what the emulated device holds" if report.emulated else ""
        (least, low), (most, high) = min(seen, key=lambda p: p[1]), max(seen, key=lambda p: p[1])
        yield (
            f"The processes held {_mib(low)} ({least}) to {_mib(high)} ({most}) of RAM at {setting.depth:,} tokens, "
            f"libraries included{share}."
        )


def _crossings(groups: Sequence[tuple[Setting, Rows]]) -> Iterator[str]:
    if len(groups) < 2:
        return
    found: list[tuple[float, str]] = []
    for (near, rows_near), (far, rows_far) in pairwise(groups):
        before, after = {r.mode: r for r in rows_near}, {r.mode: r for r in rows_far}
        for a, b in combinations([mode for mode in before if mode in after], 2):
            depth = crossover(before[a], before[b], after[a], after[b])
            if depth is not None:
                loser, winner = (a, b) if _quicker(before[a], before[b]) else (b, a)
                measured = f"(measured at {near.depth:,} and {far.depth:,})"
                what = f"From about {_round(depth):,} tokens on {winner} decodes faster than {loser} {measured}."
                found.append((depth, what))
    yield from (what for _, what in sorted(found)[:MOST_CROSSINGS])
    if len(found) > MOST_CROSSINGS:
        yield f"{len(found) - MOST_CROSSINGS} more pairs change places; the table has their speeds."
    many = any(len(by_speed(rows)) > 1 for _, rows in groups[1:])
    if not found and many:
        yield (
            f"No two modes change places between {groups[0][0].depth:,} and {groups[-1][0].depth:,} tokens, as far as "
            "the runs tell them apart."
        )


def crossover(a_near: CompareRow, b_near: CompareRow, a_far: CompareRow, b_far: CompareRow) -> float | None:
    """The depth at which two modes change places, by a straight line between two depths where each is clearly the
    faster one once; None where they do not, or where one of them has no speed."""
    spreads = [row.decode for row in (a_near, b_near, a_far, b_far)]
    if any(spread is None for spread in spreads):
        return None
    a0, b0, a1, b1 = (spread for spread in spreads if spread is not None)
    flips = (told_apart(a0, b0) and told_apart(b1, a1)) or (told_apart(b0, a0) and told_apart(a1, b1))
    if not flips:
        return None
    before, after = a0.median - b0.median, a1.median - b1.median
    near, far = a_near.setting.depth, a_far.setting.depth
    return near + (far - near) * before / (before - after)


def _worth(groups: Sequence[tuple[Setting, Rows]], report: CompareReport) -> Iterator[str]:
    idle: list[str] = []
    for setting, rows in groups:
        ranked = by_speed(rows)
        alone = next((row for row in ranked if _cpu_only(row)), None)
        if alone is None or len(ranked) < 2 or not any(row.placement.n_gpu_layers for row in ranked):
            continue
        best, ties, _ = _ranking(ranked)
        if alone is best or alone in ties:
            idle.append(f"{setting.depth:,}")
    if idle:
        but = " (which an emulated device cannot beat)" if report.emulated else ""
        yield (
            f"At {listed(idle)} tokens nothing on the device pays: {ALONE} on the CPU alone decodes as fast as the "
            f"rest or faster{but}, and takes no VRAM."
        )
    yield from _too_long(groups, report)


def _too_long(groups: Sequence[tuple[Setting, Rows]], report: CompareReport) -> Iterator[str]:
    """Advice where the device alone does not hold it all: how far it reaches, and whether going on is worth it."""
    whole = [(s, row, rows) for s, rows in groups for row in rows if row.mode == "device"]
    failed = [(s, rows) for s, row, rows in whole if row.failure and row.failure.kind == "out of memory"]
    if not failed:
        return
    setting, rows = failed[-1]
    reach = [
        f"{limit.n_ctx:,} tokens of {limit.kv_dtype} cache"
        for limit in report.limits
        if limit.n_sequences == setting.n_sequences and limit.n_ctx > 0
    ]
    far = f"By the Ledger the device holds {listed(reach)} beside all layers" if reach else ""
    if not far and report.limits:
        far = "By the Ledger the device does not hold all layers with any cache"
    fits = max((row for _, row, _ in whole if row.tok_per_s is not None), key=lambda r: r.setting.depth, default=None)
    best = next(iter(by_speed(rows)), None)
    smaller = "a shorter context, a q8_0 cache or a smaller quantisation of the model"
    if best is None or best.tok_per_s is None:
        yield f"{far + '. ' if far else ''}Nothing here completes {setting.depth:,} tokens: take {smaller}."
    elif fits is not None and fits.tok_per_s is not None and best.tok_per_s < MUCH_SLOWER * fits.tok_per_s:
        yield (
            f"{far + '. ' if far else ''}What does complete {setting.depth:,} tokens makes {best.tok_per_s:.1f} tok/s "
            f"at most, less than half of the {fits.tok_per_s:.1f} that device makes at {fits.setting.depth:,}: "
            f"{smaller} is likely to be worth more."
        )
    elif far:
        yield f"{far}; for more, {best.mode} is the fastest way at {setting.depth:,}."


def _by_sequences(groups: Sequence[tuple[Setting, Rows]]) -> Iterator[str]:
    """Where another mode wins with another number of sequences."""
    winners: dict[tuple[str, int], dict[int, str]] = {}
    for setting, rows in groups:
        ranked = by_speed(rows)
        if len(ranked) > 1:
            best, ties, _ = _ranking(ranked)
            name = "none clearly" if ties else best.mode
            winners.setdefault((setting.kv_dtype, setting.depth), {})[setting.n_sequences] = name
    for (kv_dtype, depth), by_count in winners.items():
        if len(set(by_count.values())) > 1:
            each = listed([f"{name} for {n} sequence{'s' * (n > 1)}" for n, name in by_count.items()])
            cache = f" ({kv_dtype})" if len({kind for kind, _ in winners}) > 1 else ""
            yield f"The number of sequences decides at {depth:,} tokens{cache}: {each} is fastest."


def _outputs(groups: Sequence[tuple[Setting, Rows]], report: CompareReport) -> Iterator[str]:
    rows = [row for _, rows in groups for row in rows if row.comparable and row.mode != report.baseline]
    if not rows:
        return
    differ = [row for row in rows if row.difference is not None]
    if not differ:
        yield f"All outputs that can be compared equal {report.baseline}'s, token by token."
        return
    many = len({(row.setting.kv_dtype, row.setting.n_sequences) for row in rows}) > 1

    def where(row: CompareRow) -> str:
        s = row.setting
        more = f", {s.n_sequences} sequences, {s.kv_dtype}" if many else ""
        return f"{row.mode} at {s.depth:,} tokens{more} from token {row.difference} on"

    others = "; the other outputs are equal" if len(differ) < len(rows) else ""
    yield f"The output differs from {report.baseline}'s: {listed([where(row) for row in differ])}{others}."


def _noise(groups: Sequence[tuple[Setting, Rows]]) -> Iterator[str]:
    """How much the speeds are worth."""
    timed = [(row, row.decode) for _, rows in groups for row in rows if row.decode is not None]
    if timed and max(spread.n for _, spread in timed) == 1:
        yield f"Everything was run once: only speeds more than {LEAST_APART_ONCE:.0%} apart are told apart (--repeats)."
    noisy = [(spread.relative, row) for row, spread in timed if spread.relative > NOISY]
    if noisy:
        most, row = max(noisy, key=lambda pair: pair[0])
        yield (
            f"Speeds varied by up to ±{most:.0%} ({row.mode} at {row.setting.depth:,} tokens): the machine had other "
            "things to do, and a quiet one would say more."
        )


# -- helpers -----------------------------------------------------------------------------------------------------------


def by_speed(rows: Rows) -> list[CompareRow]:
    """Those that have a speed, the fastest first."""
    return sorted((row for row in rows if row.decode), key=lambda row: row.decode.median if row.decode else 0.0)


def _ranking(ranked: Rows) -> tuple[CompareRow, list[CompareRow], list[CompareRow]]:
    """The fastest, what the runs do not tell apart from it, and what is slower."""
    best = ranked[0]
    ties = [row for row in ranked[1:] if not _quicker(best, row)]
    return best, ties, [row for row in ranked[1:] if row not in ties]


def _quicker(a: CompareRow, b: CompareRow) -> bool:
    quick, slow = a.decode, b.decode
    return isinstance(quick, Spread) and isinstance(slow, Spread) and told_apart(quick, slow)


def _cpu_only(row: CompareRow) -> bool:
    return row.placement.n_gpu_layers == 0 and row.placement.llama_gpu_layers == 0


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def _round(depth: float) -> int:
    """To two figures: a crossover is no more certain than that."""
    step = 10 ** max(0, len(str(int(depth))) - 2)
    return int(round(depth / step) * step)


def _mib(n_bytes: int | None) -> str:
    return "0 MiB" if not n_bytes else f"{n_bytes / 2**20:,.0f} MiB"
