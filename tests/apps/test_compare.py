"""Comparing: which conditions are run, in which order, and what becomes of them. Speeds are made up, except in the
last tests, which run a tiny model for real."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hybrid.apps import compare as app
from hybrid.apps import compare_modes
from hybrid.apps.compare import compare
from hybrid.apps.compare_modes import chosen_modes
from hybrid.cli.compare import command
from hybrid.errors import BadRequestError, UnsupportedError
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.model.spec import ModelSpec
from hybrid.report.comparing import CompareReport, CompareRequest
from hybrid.report.trial import Condition, Failure, PeakMemory, Trial
from hybrid.schedule.budget import Budget, needed_vram
from hybrid.schedule.ledger import ledger_of
from hybrid.schedule.placement import Placement
from tests.tiny import write_tiny

MIB = 1 << 20
DEPTHS = (16, 300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "m.gguf"
    return write_tiny(path, n_layers=12, n_embd=64, n_heads=2, n_kv_heads=2, head_dim=32, n_ff=64, n_ctx=1024)


@pytest.fixture(scope="module")
def spec(model: Path) -> ModelSpec:
    with ModelFile(model) as file:
        return read_spec(file)


class Fake:
    """Stands in for the processes; fails where it is told to, and is interrupted after a number of runs."""

    def __init__(self) -> None:
        self.ran: list[Condition] = []
        self.fails: Callable[[Placement], bool] = lambda p: False
        self.interrupt_after = 1000
        self.time_limits: set[float | None] = set()

    def run_trial(self, condition: Condition, *, timeout_s: float | None = None) -> Trial:
        self.time_limits.add(timeout_s)
        if len(self.ran) >= self.interrupt_after:
            raise KeyboardInterrupt
        self.ran.append(condition)
        if self.fails(condition.placement):
            return Trial(condition=condition, failure=Failure(kind="out of memory", message="Full.", stage="load"))
        tokens = tuple(range(condition.warmup + condition.n_decode))
        memory = PeakMemory(host_bytes=MIB)
        return Trial(condition=condition, load_s=1.0, ttft_s=(2.0,), decode_s=(0.1,), tokens=tokens, memory=memory)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    found = Fake()
    monkeypatch.setattr(app, "run_trial", found.run_trial)
    return found


def run(model: Path, save: Path | None = None, **request: Any) -> CompareReport:
    defaults = {"device": "cpu", "depths": DEPTHS, "repeats": 2, "n_decode": 6, "vram_bytes": 64 * MIB}
    return compare(model, CompareRequest(**{**defaults, **request}), save=save)


def between(spec: ModelSpec, n_ctx: int, n_batch: int, *modes: str) -> int:
    """Half-way between what two modes need of the device."""
    base = Placement(device="cpu", n_gpu_layers=0, n_ctx=n_ctx, n_batch=n_batch, n_ubatch=n_batch)
    found = [mode.placement(spec, base, Budget(ram_bytes=1 << 40)) for mode in chosen_modes(modes, spec)]
    return sum(ledger_of(spec, p).vram_bytes for p in found) // len(found)


def test_all_conditions_share_the_file_the_tokens_and_the_limits(model: Path, fake: Fake) -> None:
    report = run(model)
    assert len(fake.ran) == 2 * 2 * 6
    for depth in DEPTHS:
        ours = [c for c in fake.ran if c.depth == depth]
        assert len({(c.model, c.prompt, c.n_decode, c.warmup, c.repeats, c.prefills) for c in ours}) == 1
        shared = {(c.placement.n_ctx, c.placement.n_batch, c.placement.n_ubatch, c.placement.kv_dtype) for c in ours}
        assert len(shared) == 1
        assert all(c.n_needed <= c.placement.n_ctx for c in ours)
    assert {c.vram_budget for c in fake.ran if c.placement.n_gpu_layers} == {64 * MIB}
    assert fake.ran[0].prompt == fake.ran[-1].prompt[: DEPTHS[0]]
    assert all(len(report.differences(mode)) == 1 for mode in report.modes if mode not in ("device", "tiered"))


def test_runs_are_interleaved_there_and_back(model: Path, fake: Fake) -> None:
    run(model)
    first, second = fake.ran[:12], fake.ran[12:]
    assert first == second[::-1]


def test_what_failed_is_not_run_again_and_the_rest_is(model: Path, fake: Fake) -> None:
    fake.fails = lambda p: p.kv == "device" and p.n_gpu_layers == 12 and p.n_ctx > 256
    report = run(model)
    failed = [row for row in report.rows if row.failure]
    assert [(row.mode, row.setting.depth, len(row.trials)) for row in failed] == [("device", 300, 1)]
    assert all(len(row.trials) == 2 for row in report.rows if not row.failure)
    assert any("At 300 tokens device (out of memory while loading) fails" in line for line in report.verdict)


def test_every_run_has_the_time_limit(model: Path, fake: Fake) -> None:
    run(model, time_limit_s=7.5)
    assert fake.time_limits == {7.5}
    for wrong in (0.0, float("nan"), float("inf")):
        with pytest.raises(BadRequestError, match="time limit"):
            run(model, time_limit_s=wrong)


def test_ctrl_c_keeps_what_was_measured_and_every_trial_is_a_file(model: Path, fake: Fake, tmp_path: Path) -> None:
    fake.interrupt_after = 3
    report = run(model, tmp_path / "new" / "trials")
    assert report.interrupted
    assert [len(row.trials) for row in report.rows[:4]] == [1, 1, 1, 0]
    assert report.to_dict()["interrupted"]
    assert report.saved is not None
    files = sorted(Path(report.saved).iterdir())
    assert [file.name for file in files] == [
        "001-device-d16-s1-f16-run1.json", "002-split-6-d16-s1-f16-run1.json", "003-stream-d16-s1-f16-run1.json",
    ]  # fmt: skip
    facts = json.loads(files[2].read_text())
    assert facts.pop("mode") == "stream"
    assert Trial.from_dict(facts).condition == fake.ran[2]


def test_no_two_comparisons_share_a_folder_even_if_they_begin_in_the_same_second(
    model: Path, fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.time, "strftime", lambda _: "2026-01-02-030405")
    for _ in range(2):
        run(model, tmp_path, modes=("llama.cpp",), depths=(16,), repeats=1)
    assert {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.json")} == {
        "2026-01-02-030405/001-llama.cpp-d16-s1-f16-run1.json", "2026-01-02-030405-2/001-llama.cpp-d16-s1-f16-run1.json"
    }  # fmt: skip


def test_a_full_disk_costs_only_the_files(
    model: Path, fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hybrid.apps.compare.write_atomically", fail)
    report = run(model, tmp_path / "trials")
    assert all(row.trials for row in report.rows)
    assert [note for note in report.notes if "001-device" in note and "No space left" in note]
    assert sum("No space left" in note for note in report.notes) == 1


def test_the_default_is_a_depth_that_everything_completes_and_one_where_the_device_ends(
    model: Path, spec: ModelSpec, fake: Fake
) -> None:
    report = run(model, depths=None, vram_bytes=None)
    assert report.vram_bytes is not None
    short, long = sorted({row.setting.depth for row in report.rows})
    for row in report.rows:
        if row.mode in ("device", "stream"):
            fits = row.vram_needed <= report.vram_bytes
            assert fits == (row.mode == "stream" or row.setting.depth == short), row.mode
    assert any("between what stream" in note for note in report.notes)
    limited = run(model, depths=None, vram_bytes=between(spec, 768, 512, "device", "stream"))
    assert next(row.setting.depth for row in limited.rows if row.mode == "device") == short
    assert not any("limit does not appear" in note for note in limited.notes)
    assert any("limit does not appear" in note for note in run(model, depths=None, vram_bytes=1 << 40).notes)
    assert long < spec.n_ctx_train


def test_tiered_gets_what_the_budget_leaves(model: Path, spec: ModelSpec, fake: Fake) -> None:
    limit = between(spec, 512, 512, "device", "attend")
    report = run(model, modes=("tiered",), depths=(300,), vram_bytes=limit)
    (row,) = report.rows
    assert row.placement.kv_budget is not None
    assert needed_vram(ledger_of(spec, row.placement)) <= limit


def test_what_the_ram_cannot_hold_is_refused_and_not_run(
    model: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "ram_budget", lambda: 1000)
    report = run(model)
    assert fake.ran == []
    assert {row.failure.kind for row in report.rows if row.failure} == {"refused"}
    assert all("of RAM" in row.failure.message for row in report.rows if row.failure)


def test_a_prompt_is_measured_whole_and_from_a_short_beginning(model: Path, fake: Fake) -> None:
    report = run(model, depths=None, prompt="Hello world, this is a prompt. " * 9, modes=("llama.cpp",))
    short, whole = (row.setting.depth for row in report.rows)
    assert short == min(256, whole // 2)
    assert fake.ran[0].prompt == fake.ran[1].prompt[:short]
    with pytest.raises(BadRequestError, match="prompt or depths"):
        run(model, prompt="Hello")


def test_sequences_and_cache_types_multiply(model: Path, fake: Fake) -> None:
    report = run(model, n_sequences=(4, 1), kv_dtypes=("f16", "q8_0"), modes=("device", "llama.cpp"), repeats=1)
    assert len(fake.ran) == len(report.rows) == 2 * 2 * 2 * 2
    assert {(limit.kv_dtype, limit.n_sequences) for limit in report.limits} == {
        (kv, n) for kv in ("f16", "q8_0") for n in (1, 4)
    }
    held = {(limit.kv_dtype, limit.n_sequences): limit.n_ctx for limit in report.limits}
    assert held["f16", 1] <= held["q8_0", 1]


@pytest.mark.parametrize(
    ("request_", "error", "match"),
    [
        ({"modes": ("cloud",)}, BadRequestError, "no mode"),
        ({"modes": ("split:some",)}, BadRequestError, "number of layers"),
        ({"modes": ("split:0",)}, BadRequestError, "that is llama.cpp"),
        ({"modes": ("split:13",)}, UnsupportedError, "0 to 12"),
        ({"modes": ("llama.cpp:2",)}, UnsupportedError, "built without a GPU"),
        ({"depths": (0,)}, BadRequestError, "1 or more"),
        ({"n_decode": 0}, BadRequestError, "at least"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_run(
    model: Path,
    fake: Fake,
    monkeypatch: pytest.MonkeyPatch,
    request_: dict[str, Any],
    error: type[Exception],
    match: str,
) -> None:
    monkeypatch.setattr("hybrid.schedule.own_offload.supports_offload", lambda: False)
    with pytest.raises(error, match=match):
        run(model, **request_)
    assert fake.ran == []


def test_llama_cpp_with_a_gpu_brings_its_own_offload(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid.schedule.own_offload.supports_offload", lambda: True)
    monkeypatch.setattr(compare_modes, "supports_offload", lambda: True)
    base = Placement(device="cuda", n_gpu_layers=0, n_ctx=64)
    found = {m.name: m.placement(spec, base, Budget(ram_bytes=1)) for m in chosen_modes(("llama.cpp",), spec)}
    gpu = {name: (p.n_gpu_layers, p.llama_gpu_layers, p.offload_kqv) for name, p in found.items()}
    assert gpu == {"llama.cpp": (0, 0, False), "llama.cpp:all": (0, 13, True), "llama.cpp-nkvo": (0, 13, False)}


# -- for real ----------------------------------------------------------------------------------------------------------


def hybrid(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "hybrid.cli", "compare", *words]
    environment = {**os.environ, "COLUMNS": "200", **env}
    return subprocess.run(line, capture_output=True, text=True, timeout=300, env=environment, check=False)


def test_a_run_that_takes_too_long_is_ended_and_recorded(model: Path) -> None:
    """No process has even begun by then. Where nothing at all was measured, a script learns it from the exit code."""
    done = hybrid(
        str(model), "--device", "cpu", "--modes", "device,llama.cpp", "--depths", "16", "--time-limit", "0.01", "--json"
    )
    assert done.returncode == 2
    assert done.stderr == "hybrid: Nothing was measured; the first failure: It took longer than 0.01 s.\n"
    facts = json.loads(done.stdout)
    for row in facts["rows"]:
        assert (row["failure"]["kind"], row["failure"]["message"]) == ("too slow", "It took longer than 0.01 s.")
        assert row["decode_tok_per_s"] is None
    assert len(facts["rows"]) == 2
    assert facts["verdict"]


def test_the_command_shows_the_device_fail_and_the_others_finish(model: Path, spec: ModelSpec, tmp_path: Path) -> None:
    limit = between(spec, 1024, 64, "device", "stream")
    done = hybrid(
        str(model), "--device", "cpu", "--modes", "device,split:2,stream,llama.cpp", "--depths", "900", "-b", "64",
        "--vram-budget", str(limit), "-n", "4", "--repeats", "1", "--json", "--plot", str(tmp_path / "p.png"),
        "--save", str(tmp_path / "trials"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    rows = {row["mode"]: row for row in facts["rows"]}
    assert rows["device"]["failure"]["kind"] == "out of memory"
    assert rows["device"]["decode_tok_per_s"] is None
    for mode in ("split:2", "stream", "llama.cpp"):
        assert rows[mode]["finished"], rows[mode]
        assert rows[mode]["n_made"] == 4, "the warm-up is not what was asked for"
        assert rows[mode]["output"] == "equal", "random float32 weights leave no near-ties"
    assert rows["stream"]["peak_device_bytes"] <= limit
    assert rows["stream"]["moved_bytes_per_step"] > 0
    assert rows["split:2"]["moved_bytes_per_step"] == 0
    assert rows["llama.cpp"]["moved_bytes_per_step"] is None
    assert facts["emulated"]
    assert any("device (out of memory" in line for line in facts["verdict"])
    assert len(list(Path(facts["saved"]).glob("*.json"))) == 4
    assert facts["saved"] in done.stderr
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_the_table_is_for_people_and_ctrl_c_prints_what_there_is(model: Path, fake: Fake) -> None:
    words = [str(model), "--device", "cpu", "--depths", "16", "--repeats", "1", "-n", "6"]
    whole = CliRunner().invoke(command, words)
    assert whole.exit_code == 0, whole.output
    for text in ("decode tok/s", "baseline", "stream is device with kv: stream instead of device", "- At 16 tokens",
                 "emulated on the CPU"):  # fmt: skip
        assert text in whole.output
    fake.interrupt_after = len(fake.ran) + 2
    cut = CliRunner().invoke(command, words)
    assert cut.exit_code == 130
    assert "Interrupted: what was measured until then is shown." in cut.output
    assert cut.output.count("not measured") == 4


@pytest.mark.parametrize(
    "words", [("--depths", "0"), ("--depths", "many"), ("--kv-type", "q9"), ("--sequences", ","), ("--modes", ",")]
)
def test_lists_that_are_none_are_refused(model: Path, words: tuple[str, str]) -> None:
    assert CliRunner().invoke(command, [str(model), *words]).exit_code == 2


def test_bad_input_is_one_sentence(model: Path) -> None:
    for words in (("--modes", "cloud"), ("-f", "/none"), ("--save", str(model))):
        bad = hybrid(str(model), *words)
        assert (bad.returncode, len(bad.stderr.strip().splitlines())) == (2, 1), bad.stderr
