"""Tables, verdicts and pictures of a comparison are functions of its Trials: here of made-up ones."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hybrid.apps.compare_verdict import crossings, verdict
from hybrid.cli.compare import failures, table
from hybrid.report import plot_compare
from hybrid.report.comparing import (
    CompareReport,
    CompareRequest,
    CompareRow,
    Limit,
    Setting,
    compared,
    placement_differences,
    told_apart,
)
from hybrid.report.plot_compare import plot_comparison
from hybrid.report.trial import Condition, Failure, PeakMemory, Spread, Trial
from hybrid.schedule.placement import Placement

MIB = 1 << 20
MODES: Mapping[str, dict[str, Any]] = {
    "device": {"n_gpu_layers": 4},
    "split:2": {"n_gpu_layers": 2},
    "stream": {"n_gpu_layers": 4, "kv": "stream"},
    "tiered": {"n_gpu_layers": 4, "kv": "tiered", "kv_budget": 3 << 19},
    "llama.cpp": {"n_gpu_layers": 0},
}
OOM = Failure(kind="out of memory", message="The device has 10 MiB and 11 MiB are needed.", stage="load")
TOKENS = tuple(range(10))


def row(
    mode: str,
    depth: int,
    seconds: float | tuple[float, ...] | Failure,
    *,
    n_sequences: int = 1,
    tokens: tuple[int, ...] = TOKENS,
    saved: int = 0,
) -> CompareRow:
    """A row of runs that took so many seconds a step, one a run; or that failed."""
    placement = Placement(device="cpu", n_ctx=depth + 64, n_sequences=n_sequences, **MODES[mode])
    condition = Condition(model="m.gguf", placement=placement, prompt=tuple(range(depth)), repeats=1)
    if isinstance(seconds, Failure):
        trials: tuple[Trial, ...] = (Trial(condition=condition, failure=seconds),)
    else:
        memory = PeakMemory(device_bytes=5 * MIB if placement.n_gpu_layers else None, host_bytes=50 * MIB)
        runs = seconds if isinstance(seconds, tuple) else (seconds * 0.995, seconds, seconds * 1.005)
        trials = tuple(
            Trial(condition=condition, load_s=0.5, ttft_s=(10 * s,), decode_s=(s,), tokens=tokens, memory=memory)
            for s in runs
        )
    setting = Setting("f16", n_sequences, depth)
    return CompareRow(
        mode=mode,
        setting=setting,
        placement=placement,
        trials=trials,
        vram_needed=11 * MIB - saved,
        vram_saved=saved,
        host_cost=saved,
    )


def report(*rows: CompareRow, **others: Any) -> CompareReport:
    """With outputs compared and the verdict drawn, as `compare` does it."""
    found = CompareReport(
        request=CompareRequest(n_decode=6),
        model="m.gguf",
        device="cpu",
        vram_bytes=10 * MIB,
        n_ctx_train=8192,
        baseline="llama.cpp" if any(r.mode == "llama.cpp" for r in rows) else rows[0].mode,
        reference="device" if any(r.mode == "device" for r in rows) else rows[0].mode,
        rows=rows,
        **others,
    )
    outputs = []
    for _, group in found.groups:
        first = next(r for r in group if r.mode == found.baseline)
        for r, (comparable, difference) in zip(group, compared(group, first), strict=True):
            outputs.append(replace(r, comparable=comparable, difference=difference))
    found = replace(found, rows=tuple(outputs))
    return replace(found, verdict=verdict(found))


def said(found: CompareReport, word: str) -> list[str]:
    return [line for line in found.verdict if word in line]


def spread(*samples: float) -> Spread:
    return Spread(median=sum(samples) / len(samples), least=min(samples), most=max(samples), n=len(samples))


def printed(found: CompareReport) -> str:
    out = io.StringIO()
    Console(file=out, width=250).print(table(found))
    return out.getvalue()


def test_a_failure_has_no_speed_and_no_ratio_is_made_from_it() -> None:
    ran = row("device", 64, 0.01)
    failed = replace(ran, trials=(*ran.trials, Trial(condition=ran.trials[0].condition, failure=OOM)))
    assert (failed.decode, failed.ttft, failed.tok_per_s, failed.prefill_tok_per_s) == (None, None, None, None)
    assert failed.to_dict()["failure"]["kind"] == "out of memory"
    found = report(failed, row("stream", 64, 0.02), row("llama.cpp", 64, 0.03))
    line = next(line for line in printed(found).splitlines() if "device" in line)
    assert "out of memory" in line
    assert "100.0" not in line
    assert "stream decodes fastest" in said(found, "fastest")[0]
    assert not any("device" in line for line in said(found, "decodes"))
    assert failures(found) == ["device failed at 64 tokens: The device has 10 MiB and 11 MiB are needed."]


def test_the_verdict_says_what_completes_and_what_is_fastest() -> None:
    found = report(
        row("device", 64, 0.01),
        row("stream", 64, 0.02),
        row("llama.cpp", 64, 0.04),
        row("device", 1024, OOM),
        row("stream", 1024, 0.03),
        row("llama.cpp", 1024, 0.06),
        limits=(Limit(kv_dtype="f16", n_sequences=1, n_ctx=512), Limit(kv_dtype="q8_0", n_sequences=1, n_ctx=963)),
    )
    text = "\n".join(found.verdict)
    assert "At 64 tokens everything completes." in text
    assert "At 1,024 tokens device (out of memory while loading) fails; stream and llama.cpp complete." in text
    assert "At 64 tokens device decodes fastest, 100.0 tok/s; stream follows with 50.0" in text
    assert "512 tokens of f16 cache and 963 tokens of q8_0 cache" in text
    assert "less than half of the 100.0" in text  # 33 tok/s, where the device alone made 100 at a shorter context
    assert "emulated on the CPU" in text


def test_what_is_faster_than_half_of_the_device_is_recommended_for_more() -> None:
    found = report(
        row("device", 64, 0.01),
        row("stream", 64, 0.012),
        row("device", 1024, OOM),
        row("stream", 1024, 0.015),
        limits=(Limit(kv_dtype="f16", n_sequences=1, n_ctx=512),),
    )
    (line,) = said(found, "By calculation the device holds")
    assert line.endswith("for more, stream is the fastest way at 1,024.")
    not_run = replace(row("split:2", 1024, 0.01), trials=())
    cut = report(*found.rows, row("split:2", 64, 0.012), not_run, limits=found.limits, interrupted=True)
    assert said(cut, "for more, stream is the fastest way at 1,024, of what was run.")


def test_runs_that_overlap_are_a_tie() -> None:
    found = report(row("device", 64, (0.010, 0.011, 0.012)), row("stream", 64, (0.0115, 0.012, 0.013)))
    (line,) = said(found, "fastest")
    assert line.startswith("At 64 tokens the fastest decoding is not told apart by the runs: device (90.9) and stream")
    assert "The times to the first token are not told apart (0.11 to 0.12 s)" in line
    assert told_apart(spread(1.0, 1.01), spread(1.1, 1.2))
    assert not told_apart(spread(1.0, 1.01), spread(1.02, 1.03))
    assert not told_apart(spread(1.0), spread(1.09))
    assert told_apart(spread(1.0), spread(1.2))


def test_a_crossover_lies_where_the_lines_between_two_depths_cross() -> None:
    a0, a1 = row("stream", 100, 0.01), row("stream", 1100, 0.04)
    b0, b1 = row("llama.cpp", 100, 0.02), row("llama.cpp", 1100, 0.02)
    for ours, theirs in (((a0, a1), (b0, b1)), ((b0, b1), (a0, a1))):
        (one,) = crossings(ours, theirs)
        assert one.depth == pytest.approx(100 + 1000 / 3)
        assert (one.near, one.far, one.winner, one.loser, one.doubtful) == (100, 1100, "llama.cpp", "stream", False)
    assert crossings((a0, row("stream", 1100, 0.0199)), (b0, b1)) == []
    assert crossings((a0, row("stream", 1100, OOM)), (b0, b1)) == []
    found = report(a0, b0, a1, b1)
    expected = "From about 430 tokens on llama.cpp decodes faster than stream (measured at 100 and 1,100)."
    assert said(found, "From about") == [expected]
    steady = report(a0, b0, row("stream", 1100, 0.01), b1)
    assert said(steady, "No two modes change places between 100 and 1,100 tokens")


def test_a_crossover_is_found_across_depths_at_which_nothing_is_clear() -> None:
    slow, fast, depths = [0.01, 0.0199, 0.03, 0.04], [0.02] * 4, (100, 200, 300, 400)
    ours = [row("stream", depth, s) for depth, s in zip(depths, slow, strict=True)]
    theirs = [row("llama.cpp", depth, s) for depth, s in zip(depths, fast, strict=True)]
    (one,) = crossings(ours, theirs)
    assert (one.near, one.far, one.doubtful) == (100, 300, True)
    assert 200 < one.depth < 210
    expected = "(measured at 100 and 300; in between the runs do not tell them apart)"
    assert expected in said(report(*ours, *theirs), "From about")[0]
    failed = [ours[0], row("stream", 200, OOM), *ours[2:]]
    (one,) = crossings(failed, theirs)
    assert (one.near, one.far, one.doubtful) == (100, 300, False)
    there_and_back = [row("stream", depth, s) for depth, s in zip(depths, (0.01, 0.03, 0.01, 0.03), strict=True)]
    assert [one.winner for one in crossings(there_and_back, theirs)] == ["llama.cpp", "stream", "llama.cpp"]


def test_the_first_token_has_a_winner_only_where_the_runs_tell_it() -> None:
    def with_ttft(found: CompareRow, *seconds: float) -> CompareRow:
        trials = (replace(t, ttft_s=(s,)) for t, s in zip(found.trials, seconds, strict=True))
        return replace(found, trials=tuple(trials))

    device, stream = row("device", 64, 0.01), row("stream", 64, 0.02)
    alone = with_ttft(row("llama.cpp", 64, 0.04), 5.0, 5.1, 5.2)
    clear = report(with_ttft(device, 2.0, 2.1, 2.2), with_ttft(stream, 1.0, 1.1, 1.2), alone)
    assert said(clear, "The first token comes soonest with stream, after 1.10 s.")
    close = report(with_ttft(device, 1.1, 1.2, 1.3), with_ttft(stream, 1.0, 1.1, 1.2), alone)
    assert said(close, "soonest with stream, after 1.10 s, not told apart from device.")


def test_how_much_the_speeds_are_worth_is_said() -> None:
    assert said(report(row("device", 64, (0.01,)), row("llama.cpp", 64, (0.02,))), "Everything was run once")
    noisy = report(row("device", 64, (0.01, 0.03)), row("llama.cpp", 64, 0.02))
    assert said(noisy, "±50% (device at 64 tokens)")
    assert not said(report(row("device", 64, 0.01), row("llama.cpp", 64, 0.02)), "varied")


def test_where_llama_cpp_alone_is_as_fast_nothing_on_the_device_pays() -> None:
    found = report(row("device", 64, 0.02), row("llama.cpp", 64, 0.01))
    (line,) = said(found, "nothing on the device pays")
    assert "decodes faster than the rest" in line
    tied = report(row("device", 64, (0.010, 0.012)), row("llama.cpp", 64, (0.0115, 0.013)))
    (line,) = said(tied, "clearly faster")
    assert line.startswith("At 64 tokens nothing on the device is clearly faster than llama.cpp on the CPU alone")
    assert "do not tell it apart from device" in line
    assert not said(tied, "pays")
    assert not said(report(row("device", 64, 0.01), row("llama.cpp", 64, 0.02)), "pays")


def test_vram_that_is_saved_is_told_apart_from_what_is_moved() -> None:
    moving = row("stream", 64, 0.02, saved=4 * MIB)
    moving = replace(moving, trials=tuple(replace(t, moved_bytes=7.0 * MIB) for t in moving.trials))
    found = report(row("device", 64, 0.01), moving)
    assert "stream 4 MiB for 4 MiB of RAM" in said(found, "VRAM saved")[0]
    facts = found.to_dict()["rows"][1]
    assert (facts["moved_bytes_per_step"], facts["vram_saved_bytes"]) == (7.0 * MIB, 4 * MIB)
    heading, *lines = printed(found).splitlines()
    assert "moved/step" in heading
    assert "VRAM saved" in heading
    assert "7 MiB" in lines[-1]
    assert "4 MiB" in lines[-1]


def test_the_first_token_that_differs_in_any_run_is_named() -> None:
    other = row("stream", 64, 0.02)
    last = replace(other.trials[-1], tokens=(0, 1, 2, 9, 9, 9))
    found = report(row("llama.cpp", 64, 0.01), replace(other, trials=(*other.trials[:-1], last)))
    assert found.rows[1].output == "differs at token 3"
    assert said(found, "The output differs from llama.cpp's: stream at 64 tokens from token 3 on. Rounding decides")
    many = report(row("llama.cpp", 64, 0.01), *(row(mode, 64, 0.02, tokens=(0, 9)) for mode in ("device", "stream")))
    assert said(many, "llama.cpp's: device and stream at 64 tokens from token 1 on.")
    assert said(report(row("llama.cpp", 64, 0.01), other), "All outputs that can be compared equal llama.cpp's")


def test_nothing_is_said_of_outputs_where_the_baseline_failed() -> None:
    found = report(row("llama.cpp", 64, OOM), row("stream", 64, 0.01))
    assert [r.output for r in found.rows] == ["-", "-"]
    assert not said(found, "utput")


def test_the_number_of_sequences_may_decide() -> None:
    found = report(
        row("stream", 64, 0.02),
        row("llama.cpp", 64, 0.01),
        row("stream", 64, 0.02, n_sequences=4),
        row("llama.cpp", 64, 0.03, n_sequences=4),
    )
    assert said(found, "llama.cpp for 1 sequence and stream for 4 sequences is fastest")
    assert said(found, "[4 sequences] At 64 tokens stream decodes fastest, 200.0 tok/s")
    assert "seqs" in printed(found)


def test_fewer_tokens_than_asked_for_are_named() -> None:
    found = report(row("stream", 64, 0.02, tokens=(1, 2, 3, 4, 5, 6)), row("llama.cpp", 64, 0.01))
    assert "only 2 tokens" in printed(found), "four of them were the warm-up"
    assert " 6 tokens, 3 runs" in printed(found)


def test_what_was_interrupted_shows_what_there_is() -> None:
    nothing = replace(row("stream", 64, 0.02), trials=())
    assert report(nothing).verdict == ("Nothing was measured.",)
    found = report(nothing, row("llama.cpp", 64, 0.01), interrupted=True)
    assert "not measured" in printed(found)
    assert found.to_dict()["rows"][0]["finished"] is False
    assert said(found, "Not all of it was run: not stream at 64 tokens. What follows is of the rest.")


def test_nothing_is_concluded_of_what_an_interruption_left_out() -> None:
    def unmeasured(found: CompareRow) -> CompareRow:
        return replace(found, trials=())

    found = report(
        row("device", 64, 0.01),
        row("stream", 64, 0.02),
        unmeasured(row("llama.cpp", 64, 0.01)),
        row("device", 1024, OOM),
        row("stream", 1024, 0.03),
        unmeasured(row("llama.cpp", 1024, 0.01)),
        *(unmeasured(row(mode, 4096, 0.01)) for mode in ("device", "stream", "llama.cpp")),
        interrupted=True,
    )
    first = "not llama.cpp at 64 tokens; not llama.cpp at 1,024 tokens; nothing at 4,096 tokens"
    assert found.verdict[0] == f"Not all of it was run: {first}. What follows is of the rest."
    assert not said(found, "everything completes")
    assert said(found, "At 64 tokens device and stream complete.")
    assert said(found, "At 64 tokens, of what was run, device decodes fastest")
    assert said(found, "Of what was run no two modes") or not said(found, "change places")
    lost = report(row("device", 64, OOM), unmeasured(row("stream", 64, 0.01)), interrupted=True)
    assert said(lost, "device (out of memory while loading) fails, and nothing that was run completes.")
    many = report(
        row("device", 64, 0.01), row("llama.cpp", 64, 0.02),
        unmeasured(row("device", 64, 0.01, n_sequences=4)), row("llama.cpp", 64, 0.02, n_sequences=4),
        interrupted=True,
    )  # fmt: skip
    assert not said(many, "The number of sequences decides")
    fewer = row("device", 64, (0.01, 0.01))
    once = report(fewer, row("llama.cpp", 64, (0.02, 0.02, 0.02)), interrupted=True)
    assert said(once, "Of 3 runs of everything some had only 2 before the interruption.")


def test_modes_differ_from_the_reference_in_what_is_named() -> None:
    placements = {mode: row(mode, 64, 0.01).placement for mode in MODES}
    found = {mode: placement_differences(p, placements["device"]) for mode, p in placements.items()}
    assert found == {
        "device": [],
        "split:2": ["n_gpu_layers: 2 instead of 4"],
        "stream": ["kv: stream instead of device"],
        "tiered": ["kv: tiered instead of device", "kv_budget: 1.5 MiB"],
        "llama.cpp": ["n_gpu_layers: 0 instead of 4"],
    }


def test_a_picture_is_drawn_of_failures_and_several_kinds(tmp_path: Path) -> None:
    found = report(
        *(row(mode, depth, 0.01 * (1 + number), n_sequences=n) for depth in (64, 2048) for n in (1, 4)
          for number, mode in enumerate(MODES) if (mode, depth) != ("device", 2048)),
        row("device", 2048, OOM),
        row("device", 2048, OOM, n_sequences=4),
    )  # fmt: skip
    plot_comparison(found, tmp_path / "all.svg")
    assert (tmp_path / "all.svg").read_text().rstrip().endswith("</svg>")
    plot_comparison(report(replace(row("stream", 64, 0.02), trials=())), tmp_path / "none.png")
    assert (tmp_path / "none.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"all.svg", "none.png"}


def test_what_failed_is_named_inside_the_axes_at_every_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(plot_compare, "save_figure", lambda figure, path: figures.append(figure))
    found = report(*(row(mode, depth, OOM) for depth in (64, 512, 2048) for mode in ("device", "stream")))
    plot_comparison(found, tmp_path / "none.png")
    figures[0].canvas.draw()
    axes, places = figures[0].axes[0], set()
    for label in axes.texts:
        box = label.get_window_extent()
        assert axes.bbox.x0 <= box.x0 < box.x1 <= axes.bbox.x1, label
        places.add((round(box.x0), round(box.y0)))
    assert len(places) == 6, "none lies on another"
    plot_compare.pyplot().close(figures[0])
