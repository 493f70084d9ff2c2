"""What a comparison says, in plain sentences: a function of its rows alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from hybrid.apps.compare_modes import ALONE
from hybrid.report.comparing import LEAST_APART_ONCE, CompareReport, CompareRow, Setting, told_apart
from hybrid.report.trial import Spread
from hybrid.schedule.budget import mib

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
    lines = list(_left_out(report))
    asked = len(report.modes)
    for kind in dict.fromkeys((setting.kv_dtype, setting.n_sequences) for setting, _ in groups):
        ours = [(s, rows) for s, rows in groups if (s.kv_dtype, s.n_sequences) == kind]
        found = [
            *_completes(ours, asked),
            *_fastest(ours, asked),
            *_costs(ours, report),
            *_crossings(ours, asked),
            *_worth(ours, report),
        ]
        label = _label(groups, *kind)
        lines += [label + line for line in found]
    lines += _by_sequences([(setting, rows) for setting, rows in groups if len(rows) == asked])
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


def _left_out(report: CompareReport) -> Iterator[str]:
    """What an interruption left unmeasured: whatever is said afterwards is not said of that."""
    parts = []
    for setting, rows in report.groups:
        missing = [row.mode for row in rows if not row.trials]
        where = f"at {setting.depth:,} tokens{_more(report, setting)}"
        if missing:
            parts.append(f"{'nothing' if len(missing) == len(rows) else 'not ' + listed(missing)} {where}")
    if parts:
        yield f"Not all of it was run: {'; '.join(parts)}. What follows is of the rest."
    runs = [len(row.trials) for row in report.rows if row.finished]
    if runs and min(runs) < report.request.repeats and report.interrupted:
        yield f"Of {report.request.repeats} runs of everything some had only {min(runs)} before the interruption."


def _more(report: CompareReport, setting: Setting) -> str:
    """What beside the depth sets a setting apart, where there are others."""
    settings = [s for s, _ in report.groups]
    parts = [f", {setting.n_sequences} sequences"] if len({s.n_sequences for s in settings}) > 1 else []
    return "".join(parts + ([f", {setting.kv_dtype} cache"] if len({s.kv_dtype for s in settings}) > 1 else []))


def _completes(groups: Sequence[tuple[Setting, Rows]], asked: int) -> Iterator[str]:
    for setting, rows in groups:
        failed, done = [row for row in rows if row.failure], [row for row in rows if row.finished]
        at = f"At {setting.depth:,} tokens"
        if not failed:
            names = listed([row.mode for row in done])
            everything = len(done) == asked > 1
            yield f"{at} {'everything' if everything else names} complete{'s' * (everything or len(done) == 1)}."
            continue
        how = listed([f"{row.mode} ({_how(row)})" for row in failed])
        rest = f"; {listed([row.mode for row in done])} complete{'s' * (len(done) == 1)}" if done else ""
        nothing = ", and nothing" + ("" if len(rows) == asked else " that was run") + " completes"
        yield f"{at} {how} fail{'s' * (len(failed) == 1)}{rest or nothing}."


def _how(row: CompareRow) -> str:
    assert row.failure is not None
    stages = {"load": "while loading", "prompt": "while it read the prompt", "decode": "while decoding"}
    stage = stages.get(row.failure.stage, "")
    return f"{row.failure.kind} {stage}".strip()


def _fastest(groups: Sequence[tuple[Setting, Rows]], asked: int) -> Iterator[str]:
    for setting, rows in groups:
        ranked = by_speed(rows)
        if len(ranked) < 2:
            continue
        at = f"At {setting.depth:,} tokens" + ("" if len(rows) == asked else ", of what was run,")
        leaders, slower = _ranking(ranked)
        best = leaders[0]
        if len(leaders) == 1:
            line = f"{at} {best.mode} decodes fastest, {best.tok_per_s:.1f} tok/s"
        else:
            names = listed([f"{row.mode} ({row.tok_per_s:.1f})" for row in leaders])
            line = f"{at} the fastest decoding is not told apart by the runs: {names}, in tok/s"
        if slower:
            line += f"; {slower[0].mode} follows with {slower[0].tok_per_s:.1f}"
        yield line + _soonest(ranked) + "."


def _soonest(rows: Rows) -> str:
    """Where the first token comes soonest, as a sentence that goes on from another one."""
    ranked = sorted(((row, row.ttft) for row in rows if row.ttft), key=lambda pair: pair[1].median)
    if len(ranked) < 2:
        return ""
    (best, soonest), *others = ranked
    ties = [row.mode for row, ttft in others if not told_apart(soonest, ttft)]
    if len(ties) == len(others):
        span = f"{soonest.median:.2f} to {ranked[-1][1].median:.2f} s"
        return f". The times to the first token are not told apart ({span})"
    close = f", not told apart from {listed(ties)}" if ties else ""
    return f". The first token comes soonest with {best.mode}, after {soonest.median:.2f} s{close}"


def _costs(groups: Sequence[tuple[Setting, Rows]], report: CompareReport) -> Iterator[str]:
    """What the modes that take less VRAM take of RAM instead, at the greatest depth; by the Ledger, which also knows
    what failed."""
    setting, rows = groups[-1]
    cheaper = [row for row in rows if row.finished and row.placement.n_gpu_layers and (row.vram_saved or 0) > 0]
    if cheaper:
        costs = [
            f"{row.mode} {mib(row.vram_saved or 0)} for {mib(max(0, row.host_cost or 0))} of RAM" for row in cheaper
        ]
        yield (
            f"VRAM saved against everything on the device at {setting.depth:,} tokens, and the host memory it costs "
            f"(both calculated): {listed(costs)}."
        )
    seen = [(row.mode, n) for row in rows if row.finished and (n := row.most("host_bytes")) is not None]
    if len(seen) > 1:
        share = ", with what the emulated device holds" if report.emulated else ""
        (least, low), (most, high) = min(seen, key=lambda p: p[1]), max(seen, key=lambda p: p[1])
        yield (
            f"The processes held {mib(low)} ({least}) to {mib(high)} ({most}) of RAM at {setting.depth:,} tokens, "
            f"libraries included{share}."
        )


def _crossings(groups: Sequence[tuple[Setting, Rows]], asked: int) -> Iterator[str]:
    if len(groups) < 2:
        return
    found: list[Crossing] = []
    for a, b in combinations(dict.fromkeys(row.mode for _, rows in groups for row in rows), 2):
        ours, theirs = ([row for _, rows in groups for row in rows if row.mode == mode] for mode in (a, b))
        found += crossings(ours, theirs)
    found.sort(key=lambda crossing: crossing.depth)
    for one in found[:MOST_CROSSINGS]:
        doubt = "; in between the runs do not tell them apart" if one.doubtful else ""
        yield (
            f"From about {_round(one.depth):,} tokens on {one.winner} decodes faster than {one.loser} "
            f"(measured at {one.near:,} and {one.far:,}{doubt})."
        )
    if len(found) > MOST_CROSSINGS:
        yield f"{len(found) - MOST_CROSSINGS} more pairs change places; the table has their speeds."
    many = any(len(by_speed(rows)) > 1 for _, rows in groups[1:])
    if not found and many:
        which = "No two modes" if all(len(rows) == asked for _, rows in groups) else "Of what was run no two modes"
        yield (
            f"{which} change places between {groups[0][0].depth:,} and {groups[-1][0].depth:,} tokens, as far as "
            "the runs tell them apart."
        )


@dataclass(frozen=True)
class Crossing:
    """Two modes change places at about `depth`: at `near` the loser was clearly the faster one, at `far` the winner
    is. `doubtful`: they were measured in between too, without being told apart."""

    depth: float
    near: int
    far: int
    winner: str
    loser: str
    doubtful: bool


def crossings(ours: Rows, theirs: Rows) -> list[Crossing]:
    """Where two modes change places, given their rows by depth: between two depths, however far apart, at each of which
    one of them is clearly faster, and not the same. The place is where straight lines through the medians cross. Depths
    at which one has no speed say nothing."""
    there = {row.setting.depth: row for row in theirs if row.decode}
    pairs = [(row, there[row.setting.depth]) for row in ours if row.decode and row.setting.depth in there]
    found: list[Crossing] = []
    clear: int | None = None
    for i, (a, b) in enumerate(pairs):
        if not (_quicker(a, b) or _quicker(b, a)):
            continue
        if clear is not None and _quicker(*pairs[clear]) != _quicker(a, b):
            winner, loser = (a, b) if _quicker(a, b) else (b, a)
            near, far = pairs[clear][0].setting.depth, a.setting.depth
            depth = _place(pairs[clear : i + 1])
            found.append(Crossing(depth, near, far, winner.mode, loser.mode, doubtful=i > clear + 1))
        clear = i
    return found


def _place(pairs: Sequence[tuple[CompareRow, CompareRow]]) -> float:
    """The first depth at which the lines through two modes' medians cross; they do."""
    points = [(a.setting.depth, a.decode.median - b.decode.median) for a, b in pairs if a.decode and b.decode]
    for (near, before), (far, after) in pairwise(points):
        if before * after <= 0 and before != after:
            return near + (far - near) * before / (before - after)
    return float(points[-1][0])


def _worth(groups: Sequence[tuple[Setting, Rows]], report: CompareReport) -> Iterator[str]:
    slower: list[str] = []
    for setting, rows in groups:
        ranked = by_speed(rows)
        alone = next((row for row in ranked if _cpu_only(row)), None)
        if alone is None or not any(row.placement.n_offloaded for row in ranked):
            continue
        others = [row for row in ranked if row is not alone]
        if any(_quicker(row, alone) for row in others):
            continue
        ties = [row.mode for row in others if not _quicker(alone, row)]
        if not ties:
            slower.append(f"{setting.depth:,}")
            continue
        yield (
            f"At {setting.depth:,} tokens nothing on the device is clearly faster than {ALONE} on the CPU alone, which "
            f"takes no VRAM; the runs do not tell it apart from {listed(ties)}."
        )
    if slower:
        but = " (which an emulated device cannot beat)" if report.emulated else ""
        yield (
            f"At {listed(slower)} tokens nothing on the device pays: {ALONE} on the CPU alone decodes faster than the "
            f"rest{but}, and takes no VRAM."
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
    far = f"By calculation the device holds {listed(reach)} beside all layers" if reach else ""
    if not far and report.limits:
        far = "By calculation the device does not hold all layers with any cache"
    fits = max((row for _, row, _ in whole if row.tok_per_s is not None), key=lambda r: r.setting.depth, default=None)
    leaders, _ = _ranking(by_speed(rows))
    best = leaders[0] if leaders else None
    smaller = "a shorter context, a q8_0 cache or a smaller quantisation of the model"
    if best is None or best.tok_per_s is None:
        ran = "Nothing here" if len(rows) == len(report.modes) else "Nothing that was run"
        yield f"{far + '. ' if far else ''}{ran} completes {setting.depth:,} tokens: take {smaller}."
    elif fits is not None and fits.tok_per_s is not None and best.tok_per_s < MUCH_SLOWER * fits.tok_per_s:
        yield (
            f"{far + '. ' if far else ''}What does complete {setting.depth:,} tokens makes {best.tok_per_s:.1f} tok/s "
            f"at most, less than half of the {fits.tok_per_s:.1f} that device makes at {fits.setting.depth:,}: "
            f"{smaller} is likely to be worth more."
        )
    elif far:
        ways = "is the fastest way" if len(leaders) == 1 else "are the fastest ways, not told apart,"
        run = "" if len(rows) == len(report.modes) else ", of what was run"
        yield f"{far}; for more, {listed([row.mode for row in leaders])} {ways} at {setting.depth:,}{run}."


def _by_sequences(groups: Sequence[tuple[Setting, Rows]]) -> Iterator[str]:
    """Where another mode wins with another number of sequences."""
    winners: dict[tuple[str, int], dict[int, str]] = {}
    for setting, rows in groups:
        ranked = by_speed(rows)
        if len(ranked) > 1:
            leaders, _ = _ranking(ranked)
            name = "none clearly" if len(leaders) > 1 else leaders[0].mode
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

    alike: dict[tuple[Setting, int | None], list[str]] = {}
    for row in differ:
        alike.setdefault((row.setting, row.difference), []).append(row.mode)

    def where(setting: Setting, token: int | None, modes: Sequence[str]) -> str:
        more = f", {setting.n_sequences} sequences, {setting.kv_dtype}" if many else ""
        return f"{listed(modes)} at {setting.depth:,} tokens{more} from token {token} on"

    found = "; ".join(where(setting, token, modes) for (setting, token), modes in alike.items())
    others = "; the other outputs are equal" if len(differ) < len(rows) else ""
    yield (
        f"The output differs from {report.baseline}'s: {found}{others}. Rounding decides between tokens that are about "
        "equally likely; whether it is no more than that, `hybrid inspect --verify` tells."
    )


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


def _ranking(ranked: Rows) -> tuple[list[CompareRow], list[CompareRow]]:
    """The fastest with what the runs do not tell apart from it, and what is slower."""
    leaders = [row for row in ranked if not _quicker(ranked[0], row)]
    return leaders, [row for row in ranked if row not in leaders]


def _quicker(a: CompareRow, b: CompareRow) -> bool:
    quick, slow = a.decode, b.decode
    return isinstance(quick, Spread) and isinstance(slow, Spread) and told_apart(quick, slow)


def _cpu_only(row: CompareRow) -> bool:
    return row.placement.n_offloaded == 0


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def _round(depth: float) -> int:
    """To two figures: a crossover is no more certain than that."""
    step = 10 ** max(0, len(str(int(depth))) - 2)
    return int(round(depth / step) * step)
