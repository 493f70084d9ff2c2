"""Conditions run in processes of their own; whatever happens to one is a record."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from hybrid.apps import runner
from hybrid.apps.runner import run_calibration, run_task, run_trial
from hybrid.apps.worker import failure_kind
from hybrid.errors import (
    BadFileError,
    BadRequestError,
    EngineError,
    HostMemoryError,
    OutOfMemoryError,
    UnsupportedError,
)
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.report.trial import LEAST_DECODED, Condition, Trial
from hybrid.schedule.ledger import ledger_of
from hybrid.schedule.placement import Placement
from tests.tiny import write_tiny

MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("runner") / "m.gguf", n_layers=4, n_ctx=2048)


def condition(model: Path, k: int, **other: Any) -> Condition:
    placement = Placement(device="cpu", n_gpu_layers=k, n_ctx=256, n_batch=32, n_ubatch=32)
    parts = {"prompt": tuple(range(5, 45)), "n_decode": 6, "warmup": 2, "repeats": 3}
    return Condition(model=str(model), placement=placement, **{**parts, **other})


def needed(model: Path, placement: Placement) -> int:
    with ModelFile(model) as file:
        return ledger_of(read_spec(file), placement).vram_bytes


@pytest.mark.parametrize("launch", [{}, {"launch_s": None}, {"launch_s": 0.002}])
def test_launch_overhead_goes_from_the_worker_to_the_table(
    launch: dict[str, Any], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where somebody has measured it."""
    said = {"load_s": 1.0, "warmup_s": 1.0, "ttft_s": [1.0], "decode_s": [0.1], "moved_bytes": 0.0, "tokens": [1]}
    said |= {"memory": {"host_bytes": 1}, "versions": {}, **launch}
    monkeypatch.setattr(runner, "run_task", lambda *args, **more: runner.Outcome(said, None, 1.0))
    trial = run_trial(condition(model, 2))
    assert trial.launch_s == launch.get("launch_s")
    assert Trial.from_dict(trial.to_dict()) == trial


def test_a_run_has_its_figures_apart_and_the_tokens_it_made(model: Path) -> None:
    split, alone = (run_trial(condition(model, k)) for k in (2, 0))
    for trial in (split, alone):
        assert trial.failure is None
        assert len(trial.decode_s) == 3
        assert len(trial.ttft_s) == 1
        assert len(trial.tokens) == 2 + 3 * 6
        assert trial.load_s is not None
        assert trial.load_s > 0
        assert trial.memory is not None
        assert trial.memory.host_bytes > 16 * MIB
        assert trial.wall_s is not None
        assert trial.wall_s > trial.load_s + sum(trial.ttft_s)
    assert split.difference(alone) is None  # a file in float32
    assert split.emulated
    assert not alone.emulated
    assert "torch" in split.versions
    assert "torch" not in alone.versions  # without layers on the device it is not even imported


def test_several_sequences_take_a_step_together(model: Path) -> None:
    one = condition(model, 2, prefills=0)
    many = replace(one, placement=replace(one.placement, n_sequences=3))
    trial = run_trial(many)
    assert trial.failure is None
    assert trial.ttft_s == ()
    assert trial.decode_tok_per_s == pytest.approx(3 / sorted(trial.decode_s)[1])


def test_an_emulated_device_is_full_exactly_where_it_is(model: Path) -> None:
    fits = condition(model, 3, vram_budget=needed(model, condition(model, 3).placement))
    trial = run_trial(fits)
    assert trial.failure is None
    assert trial.memory is not None
    assert trial.memory.device_bytes is not None
    assert 0.8 * fits.vram_budget <= trial.memory.device_bytes <= fits.vram_budget  # type: ignore[operator]
    tight = run_trial(replace(fits, vram_budget=trial.memory.device_bytes - 1))
    assert tight.failure is not None
    assert tight.failure.kind == "out of memory"
    assert tight.decode_tok_per_s is None
    assert "MiB" in tight.failure.message


def test_a_refused_condition_is_a_record(model: Path) -> None:
    trial = run_trial(condition(model, 9))
    assert trial.failure is not None
    assert trial.failure.kind == "refused"


def test_a_killed_process_is_a_record(model: Path) -> None:
    trial = run_trial(condition(model, 1), on_stage=lambda stage, pid: os.kill(pid, signal.SIGKILL))
    assert trial.failure is not None
    assert trial.failure.kind == "killed"
    assert trial.failure.stage == "load"
    assert trial.decode_s == ()


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        ("raise MemoryError", "out of RAM", "MemoryError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed", "SIGSEGV"),
        ("raise RuntimeError('no luck')", "crashed", "no luck"),
        ("import os; os._exit(3)", "crashed", "exit code 3"),
        ("print('half a li', end='')", "lost", "exit code 0"),
    ],
)
def test_every_death_has_a_name(code: str, kind: str, words: str) -> None:
    outcome = run_task({}, command=[sys.executable, "-c", code])
    assert outcome.result is None
    assert outcome.failure is not None
    assert (outcome.failure.kind, words in outcome.failure.message) == (kind, True), outcome.failure


def test_a_process_that_cannot_be_started_is_a_record() -> None:
    outcome = run_task({}, command=["/nowhere/python"])
    assert outcome.failure is not None
    assert (outcome.failure.kind, "could not be started" in outcome.failure.message) == ("lost", True)


@pytest.mark.parametrize(
    ("error", "stage", "kind"),
    [
        (OutOfMemoryError("Full."), "load", "out of memory"),
        (HostMemoryError("Full."), "prompt", "out of RAM"),
        (MemoryError(), "decode", "out of RAM"),
        (BadFileError("No GGUF."), "", "bad file"),
        (UnsupportedError("Not here."), "load", "refused"),
        (BadRequestError("Too long."), "prompt", "refused"),
        (EngineError("llama.cpp could not."), "load", "failed to load"),
        (EngineError("Not a number."), "decode", "failed"),
    ],
)
def test_every_error_has_an_outcome_of_its_own(error: Any, stage: str, kind: str) -> None:
    assert failure_kind(error, stage) == kind


def test_a_file_that_is_none_and_one_that_llama_cpp_cannot_load_are_told_apart(model: Path, tmp_path: Path) -> None:
    whole = model.read_bytes()
    wrong, cut = tmp_path / "wrong.gguf", tmp_path / "cut.gguf"
    wrong.write_bytes(b"not a model")
    cut.write_bytes(whole.replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz"))
    for path, kind in ((wrong, "bad file"), (tmp_path / "none.gguf", "bad file"), (cut, "failed to load")):
        trial = run_trial(condition(path, 0))
        assert trial.failure is not None
        assert trial.failure.kind == kind, trial.failure


def test_a_repeat_has_the_tokens_that_there_is_time_for(model: Path) -> None:
    slow = run_trial(condition(model, 0, n_decode=40, repeat_s=1e-9))
    assert slow.failure is None
    assert len(slow.tokens) == 2 + 3 * LEAST_DECODED
    quick = condition(model, 0, n_decode=40, repeat_s=1000.0)
    assert (quick.n_in_time(0.1), quick.n_in_time(50.0), quick.n_in_time(1e6)) == (40, 20, LEAST_DECODED)
    assert replace(quick, repeat_s=None).n_in_time(1e6) == 40
    assert replace(quick, n_decode=3).n_in_time(1e6) == 3


def test_what_takes_too_long_is_ended() -> None:
    outcome = run_task({}, command=[sys.executable, "-c", "import time; time.sleep(600)"], timeout_s=0.2)
    assert outcome.failure is not None
    assert outcome.failure.kind == "too slow"


def test_ctrl_c_ends_the_process_too(model: Path) -> None:
    pids = []

    def interrupt(stage: str, pid: int) -> None:
        pids.append(pid)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_trial(condition(model, 1), on_stage=interrupt)
    assert not psutil.pid_exists(pids[0])


def test_a_process_ends_when_its_parent_is_gone(model: Path) -> None:
    task = json.dumps({"task": "run", **condition(model, 1).to_dict()})
    worker = subprocess.Popen(
        [sys.executable, "-P", "-m", "hybrid.apps.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(task.encode() + b"\n")
    worker.stdin.close()
    assert worker.wait(timeout=60) == 1
    assert b"done" not in worker.stdout.read()
    worker.stdout.close()


def test_calibration_times_the_halves_apart(model: Path) -> None:
    found = run_calibration(str(model), condition(model, 2).placement, 64)
    assert {m.kind for m in found} == {"decode", "prefill"}
    assert all(m.head_s and m.tail_s for m in found if m.kind == "decode")
    assert run_calibration(str(model), condition(model, 9).placement, 64) == []
