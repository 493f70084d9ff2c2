"""Tuning: what is measured, what is concluded, what is remembered. Speeds are made up, except in the last tests."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pexpect
import psutil
import pytest

from hybrid.apps import tune as app
from hybrid.apps import tune_candidates
from hybrid.apps.tune import TuneReport, TuneRequest, tune
from hybrid.cli.tune_table import tuning_text
from hybrid.errors import BadRequestError, UnsupportedError
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.report import plot
from hybrid.schedule.budget import needed_vram
from hybrid.schedule.identity import identify
from hybrid.schedule.ledger import ledger_of
from hybrid.schedule.placement import Placement
from hybrid.schedule.profile import ProfileStore
from tests.apps.tuning import MIB, Fake, inner, run, small_model


def best(report: TuneReport) -> int:
    assert report.best is not None
    return report.rows[report.best].placement.n_gpu_layers


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return small_model(tmp_path)


def test_the_quickest_is_found_without_measuring_everything(model: Path, faked: Callable[..., Fake]) -> None:
    fake = faked(inner)
    report = run(model)
    assert best(report) == 5
    ran = Counter(condition.placement.n_gpu_layers for condition in fake.ran)
    assert len(ran) < 13
    (row,) = [row for row in report.rows if row.verdict == "best"]
    assert row.measured is not None
    assert row.measured.median == pytest.approx(inner(row.placement), rel=0.05)
    assert row.device_bytes == MIB


def test_every_condition_differs_only_in_its_placement(model: Path, faked: Callable[..., Fake]) -> None:
    fake = faked(inner)
    run(model, vram_bytes=100 * MIB)
    assert len({(c.model, c.prompt, c.vram_budget, c.prefills) for c in fake.ran}) == 1
    assert fake.ran[0].vram_budget == 100 * MIB
    assert fake.ran[0].depth == 128
    assert all(c.n_needed <= c.placement.n_ctx for c in fake.ran)


def test_nothing_is_run_that_the_ledger_says_cannot_fit(model: Path, faked: Callable[..., Fake]) -> None:
    with ModelFile(model) as file:
        spec = read_spec(file)
    limit = needed_vram(ledger_of(spec, run_placement(model, 6)))
    fake = faked(lambda p: 0.1 / (1 + p.n_gpu_layers))
    report = run(model, vram_bytes=limit)
    assert max(row.placement.n_gpu_layers for row in report.rows if row.placement.kv == "device") == 6
    for condition in fake.ran:
        assert needed_vram(ledger_of(spec, condition.placement)) <= limit


def run_placement(model: Path, k: int) -> Placement:
    """The placement that `run` has for k layers."""
    return Placement(device="cpu", n_gpu_layers=k, n_ctx=256, n_batch=128, n_ubatch=128)


def test_where_the_kv_cache_lies_is_one_more_thing_to_try(model: Path, faked: Callable[..., Fake]) -> None:
    with ModelFile(model) as file:
        spec = read_spec(file)
    limit = needed_vram(ledger_of(spec, run_placement(model, 6)))
    faked(lambda p: 0.05 if p.kv == "device" else 0.02 - 0.001 * p.n_gpu_layers * (p.kv == "attend"))
    report = run(model, vram_bytes=limit)
    offloaded = [row.placement for row in report.rows if row.placement.kv != "device"]
    assert {p.kv for p in offloaded} == {"stream", "attend", "tiered"}
    assert min(p.n_gpu_layers for p in offloaded) > 6  # with as many layers the cache fits beside them
    winner = report.rows[report.best or 0].placement
    assert winner.kv == "attend"
    assert "--kv attend" in report.command
    tiered = next(p for p in offloaded if p.kv == "tiered")
    assert f"--kv-budget {tiered.kv_budget}" in app.command("m", tiered, spec)


def test_a_condition_that_dies_is_a_record_and_the_rest_goes_on(model: Path, faked: Callable[..., Fake]) -> None:
    faked(inner, fails=lambda p: "crashed" if p.n_gpu_layers in (0, 4) else None)
    report = run(model, exhaustive=True)
    assert best(report) == 5
    for row in report.rows:
        assert (row.measured is None) == (row.placement.n_gpu_layers in (0, 4))
        if row.measured is None:
            assert (row.verdict, row.message) == ("crashed", "It was bad.")


def test_more_layers_than_ran_out_of_memory_are_not_tried(model: Path, faked: Callable[..., Fake]) -> None:
    fake = faked(inner, fails=lambda p: "out of memory" if p.n_gpu_layers >= 3 else None)
    report = run(model)
    assert best(report) == 2
    tried = [c.placement.n_gpu_layers for c in fake.ran]
    assert len(tried) == len([k for k in tried if k < 3]) + len({k for k in tried if k >= 3})
    after = [k for i, k in enumerate(tried) if any(k >= earlier >= 3 for earlier in tried[:i])]
    assert after == []


@pytest.mark.parametrize("kind", ["killed", "out of RAM"])
def test_where_the_ram_was_too_small_more_of_it_is_not_tried_and_less_is(
    model: Path, faked: Callable[..., Fake], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, the more layers are there, the less RAM the rest takes: a kill shuts the way down, not up."""
    monkeypatch.setattr(app, "vram_limit", lambda device, asked, reserve: asked)
    fake = faked(lambda p: 0.02 - 0.001 * p.n_gpu_layers, fails=lambda p: kind if 0 < p.n_gpu_layers <= 9 else None)
    report = run(model, device="cuda")
    needs = {row.placement.n_gpu_layers: row.ram_bytes for row in report.rows}
    assert needs[1] > needs[11]
    tried = [c.placement.n_gpu_layers for c in fake.ran]
    failed = [k for k in tried if 0 < k <= 9]
    assert failed
    assert failed == sorted(failed), "below what was killed nothing is tried"
    assert best(report) > 9


def test_what_a_busy_machine_measured_is_measured_again(model: Path, faked: Callable[..., Fake]) -> None:
    busy = faked(inner)
    busy.slowed = 5.0
    first = run(model)
    assert len(first.trials) >= 2
    busy.slowed = 1.0
    again = run(model)
    assert again.reused == 0
    assert best(again) == 5
    assert run(model).reused == len(again.trials)


def test_what_crashed_earlier_is_tried_again(model: Path, faked: Callable[..., Fake]) -> None:
    faked(inner, fails=lambda p: "crashed")
    assert run(model).best is None
    faked(inner)
    assert best(run(model)) == 5


def test_what_was_out_of_memory_under_the_same_budget_is_not(model: Path, faked: Callable[..., Fake]) -> None:
    faked(inner, fails=lambda p: "out of memory" if p.n_gpu_layers >= 3 else None)
    run(model, vram_bytes=100 * MIB)
    fake = faked(inner)
    assert best(run(model, vram_bytes=100 * MIB)) == 2
    assert all(c.placement.n_gpu_layers < 5 for c in fake.ran)
    assert best(run(model, vram_bytes=200 * MIB)) == 5


def test_what_the_spread_does_not_separate_is_a_tie(model: Path, faked: Callable[..., Fake]) -> None:
    faked(lambda p: 0.01 if p.n_gpu_layers in (3, 4) else 0.02)
    report = run(model, exhaustive=True)
    verdicts = {row.placement.n_gpu_layers: row.verdict for row in report.rows}
    assert {verdicts[3], verdicts[4]} == {"best", "tie"}
    assert all("slower" in verdict for k, verdict in verdicts.items() if k not in (3, 4))


def test_an_exhaustive_sweep_measures_everything_there_and_back(model: Path, faked: Callable[..., Fake]) -> None:
    fake = faked(inner)
    run(model, exhaustive=True)
    ks = [c.placement.n_gpu_layers for c in fake.ran]
    assert ks == [*range(13), *reversed(range(13))]


def test_ctrl_c_keeps_what_was_measured_and_the_next_tune_goes_on_from_it(
    model: Path, faked: Callable[..., Fake]
) -> None:
    fake = faked(inner)
    fake.interrupt_after = 3
    report = run(model)
    assert report.interrupted
    assert len(report.trials) == 3
    assert best(report) in {c.placement.n_gpu_layers for c in fake.ran}
    whole = faked(inner)
    again = run(model)
    assert again.reused == 3
    assert f"{len(again.trials)} measurements and 3 earlier in " in tuning_text(again, None)
    assert best(again) == 5
    alone = Counter(c.placement.n_gpu_layers for c in whole.ran)
    assert len(whole.ran) > 0
    assert run(model).reused == 3 + sum(alone.values())


def test_a_leader_known_from_chats_alone_has_their_speed(model: Path, faked: Callable[..., Fake]) -> None:
    faked(inner)
    report = run(model, exhaustive=True)
    with ModelFile(model) as file:
        store = ProfileStore(identify(file))
    chats = [replace(r, source="run", decode_s=(0.5 * r.decode_s[0],)) for r in store.load().records]
    store.path.unlink()
    leading = [r for r in chats if r.placement.n_gpu_layers == 5]
    store.add(*leading, *(r for r in chats if r.placement.n_gpu_layers in (0, 12)))
    faked(inner).interrupt_after = 0
    report = run(model)
    row = report.rows[report.best or 0]
    assert (row.placement.n_gpu_layers, row.verdict, row.n_runs) == (5, "best", len(leading))
    assert row.measured is not None
    assert row.measured.median == pytest.approx(0.5 * inner(row.placement), rel=0.05)


def test_when_all_is_known_nothing_more_is_run(model: Path, faked: Callable[..., Fake]) -> None:
    faked(inner)
    first = run(model)
    fake = faked(inner)
    assert best(run(model)) == best(first)
    assert fake.ran == []
    fake = faked(lambda p: 0.1)
    run(model, objective="ttft")  # another objective is another question
    assert fake.ran
    assert {(c.repeats, c.prefills) for c in fake.ran} == {(0, 2)}


def test_the_time_budget_ends_it(model: Path, faked: Callable[..., Fake]) -> None:
    fake = faked(inner)
    report = run(model, budget_s=1e-9)
    assert len(fake.ran) == 1  # something has to be measured
    assert report.best is not None
    assert any("time is up" in note for note in report.notes)
    assert not any("time is up" in note for note in run(model).notes)


def test_a_busy_machine_is_said(model: Path, faked: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    faked(inner)
    for load, said in ((100.0, True), (0.0, False)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert any("busy" in note for note in run(model).notes) == said


def test_thread_counts_are_tried_where_asked(model: Path, faked: Callable[..., Fake], monkeypatch: Any) -> None:
    monkeypatch.setattr(tune_candidates, "usable_cores", lambda: 4)
    faked(lambda p: inner(p) * (1 + abs(p.n_threads_tail - 3)))
    report = run(model, threads="auto")
    assert {row.placement.n_threads_tail for row in report.rows} == {2, 3, 4}
    assert report.rows[report.best or 0].placement.n_threads_tail == 3
    assert "-t 3" in report.command


def test_the_command_is_the_winners(model: Path, faked: Callable[..., Fake]) -> None:
    faked(inner)
    report = tune(model, TuneRequest(n_ctx=256, device="cpu", kv_dtype="f32"), name="my model.gguf")
    words = shlex.split(report.command)
    assert words[:3] == ["hybrid", "chat", "my model.gguf"]
    for flag, value in (("-ngl", "5"), ("-c", "256"), ("--device", "cpu"), ("--kv-type", "f32")):
        assert words[words.index(flag) + 1] == value


def test_emulation_is_said_everywhere(model: Path, faked: Callable[..., Fake]) -> None:
    faked(inner)
    report = run(model)
    assert report.emulated
    assert report.to_dict()["emulated"]
    assert any("emulated" in note for note in report.notes)


def test_a_budget_smaller_than_one_layer_says_what_the_smallest_is(model: Path, faked: Callable[..., Fake]) -> None:
    faked(inner)
    report = run(model, vram_bytes=1000)
    (line,) = [note for note in report.notes if "smallest budget" in note]
    smallest = int(line.split("is ")[-1].split(" MiB")[0].replace(",", "")) * MIB
    assert max(row.placement.n_gpu_layers for row in report.rows) == 0
    assert max(row.placement.n_gpu_layers for row in run(model, vram_bytes=smallest).rows) >= 1


def test_without_a_gpu_only_the_cpu_is_tried(model: Path, faked: Callable[..., Fake], monkeypatch: Any) -> None:
    monkeypatch.setattr(tune_candidates, "default_device", lambda: None)
    faked(inner)
    report = run(model, device=None)
    assert [row.placement.n_gpu_layers for row in report.rows] == [0]
    assert any("No GPU" in note for note in report.notes)


def test_a_context_longer_than_trained_is_warned_of(model: Path, faked: Callable[..., Fake]) -> None:
    faked(inner)
    assert any("trained for" in note for note in run(model, n_ctx=1024, budget_s=1e-9).notes)


def test_what_is_shown_as_predicted_was_predicted_before_it_was_measured(
    model: Path, faked: Callable[..., Fake]
) -> None:
    """The last ones measured are foretold well by the others, the first one by nothing; a second tune says the same."""
    faked(inner)
    report = run(model, exhaustive=True)
    rows = {row.placement.n_gpu_layers: row for row in report.rows}
    errors = {
        k: abs(row.predicted_s / row.measured.median - 1) for k, row in rows.items() if row.measured and row.predicted_s
    }
    assert len(errors) == 13
    assert errors[12] < 0.3 < errors[0]
    faked(inner)
    again = run(model, exhaustive=True)
    assert [row.predicted_s for row in again.rows] == [row.predicted_s for row in report.rows]


@pytest.mark.parametrize(
    "request_", [{"depth": 256}, {"depth": 0}, {"n_ctx": 8}, {"threads": 0}, {"threads": 9999}, {"threads": "many"}]
)
def test_senseless_requests_are_refused(model: Path, faked: Callable[..., Fake], request_: dict[str, Any]) -> None:
    faked(inner)
    with pytest.raises(BadRequestError):
        run(model, **request_)


# -- the picture -------------------------------------------------------------------------------------------------------


def test_a_plot_is_drawn_whole_or_not_at_all(
    model: Path, faked: Callable[..., Fake], tmp_path: Path, monkeypatch: Any
) -> None:
    faked(inner, fails=lambda p: "crashed" if p.n_gpu_layers == 9 else None)
    report = run(model, vram_bytes=100 * MIB)
    for objective in ("latency", "ttft"):
        shown = replace(report, request=replace(report.request, objective=objective))  # type: ignore[arg-type]
        plot.plot_tuning(shown, tmp_path / f"{objective}.png")
        assert (tmp_path / f"{objective}.png").read_bytes().startswith(b"\x89PNG")
    plot.plot_tuning(replace(report, best=None), tmp_path / "none.svg")
    drawn = {path.name for path in tmp_path.iterdir() if path.suffix in (".png", ".svg")}
    assert drawn == {"latency.png", "ttft.png", "none.svg"}
    text = (tmp_path / "none.svg").read_text()
    assert text.rstrip().endswith("</svg>")


def test_a_plot_that_could_not_be_drawn_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadRequestError, match="png"):
        plot.check_plot(tmp_path / "picture.doc")
    with pytest.raises(BadRequestError, match="no folder"):
        plot.check_plot(tmp_path / "none" / "picture.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match="pip install matplotlib"):
        plot.check_plot(tmp_path / "picture.png")


def test_a_plot_that_cannot_be_written_is_one_sentence_and_leaves_nothing(
    model: Path, faked: Callable[..., Fake], tmp_path: Path
) -> None:
    faked(inner)
    report = run(model)
    with pytest.raises(BadRequestError, match=r"gone/tune\.png cannot be written: No such file"):
        plot.plot_tuning(report, tmp_path / "gone" / "tune.png")


def test_a_plot_of_a_file_with_a_long_name_has_room_for_it() -> None:
    import matplotlib.pyplot as plt

    name = "DeepSeek-R1-Distill-Qwen-32B-Uncensored-Q4_K_M-00001-of-00002.gguf, 131072 tokens of context"
    figure = plt.figure(figsize=(8, 7), dpi=120)
    text = figure.suptitle(plot.title(name + " (the GPU is emulated on the CPU)"))
    box = text.get_window_extent(figure.canvas.get_renderer())  # type: ignore[attr-defined]
    assert 0 <= box.x0 < box.x1 <= 960
    plt.close(figure)


@pytest.mark.parametrize("device", ["bogus", "", "cuda:x", "cpu:1"])
def test_a_device_there_is_none_of_is_refused_before_anything_is_measured(
    model: Path, faked: Callable[..., Fake], device: str
) -> None:
    fake = faked(inner)
    with pytest.raises(UnsupportedError, match="no device called"):
        run(model, device=device, vram_bytes=100 * MIB)
    assert fake.ran == []


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_measures_for_real(model: Path, tmp_path: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "120"}

    def hybrid(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hybrid.cli", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False)

    common = ["tune", str(model), "--device", "cpu", "--vram-budget", "64MiB", "-c", "128"]
    done = hybrid(*common, "--budget", "40s", "--json", "--plot", str(tmp_path / "tune.png"))
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["emulated"]
    assert facts["vram_budget_bytes"] == 64 * MIB
    assert len(facts["trials"]) >= 1
    finished = [trial for trial in facts["trials"] if trial["failure"] is None]
    assert finished
    assert all(trial["failure"]["kind"] == "too slow" for trial in facts["trials"] if trial not in finished)
    winner = facts["candidates"][facts["best"]]
    assert winner["verdict"] == "best"
    assert winner["measured_least_s"] <= winner["measured_s"] <= winner["measured_most_s"]
    assert f"-ngl {winner['placement']['n_gpu_layers']}" in facts["command"]
    assert (tmp_path / "tune.png").stat().st_size > 1000
    table = hybrid(*common, "--budget", "1s")
    assert table.returncode == 0, table.stderr
    assert "emulated" in table.stdout
    assert "Use" in table.stdout
    bad = hybrid("tune", str(model), "--threads", "lots")
    assert (bad.returncode, len(bad.stderr.strip().splitlines())) == (2, 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_told_to_end_the_command_shows_what_it_has_and_no_process_stays(
    model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "TERM": "xterm", "COLUMNS": "120"}
    words = ["-m", "hybrid.cli", "tune", str(model), "--device", "cpu", "-c", "128", "--exhaustive"]
    with pexpect.spawn(sys.executable, words, env=env, timeout=120, encoding="utf-8") as terminal:
        terminal.expect("Measuring -ngl 1")  # the first is done
        family = psutil.Process(terminal.pid).children(recursive=True)
        terminal.sendintr() if number == signal.SIGINT else terminal.kill(number)
        terminal.expect("Interrupted: what was measured is kept")
        terminal.expect("best")
        terminal.expect("Use")
        terminal.expect(pexpect.EOF)
        terminal.wait()
    assert terminal.exitstatus == 128 + number
    assert psutil.wait_procs(family, timeout=30)[1] == []
