"""Whenever a program is told to end, it does: with the right exit code, without a word too many, leaving nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

STAGED = """
import importlib, os, sys
module, name = sys.argv[1].split(":")
*path, last = name.split(".")
owner = importlib.import_module(module)
for part in path:
    owner = getattr(owner, part)
was, number = getattr(owner, last), int(sys.argv[2])

def at_this_stage(*args, **kwargs):
    setattr(owner, last, was)
    os.kill(os.getpid(), number)
    return was(*args, **kwargs)

setattr(owner, last, at_this_stage)
sys.argv = ["hybrid", *sys.argv[3:]]
from hybrid.cli.app import main
main()
"""
"""A program that sends itself a signal when it first comes to a certain function."""
STAGES = {
    "opening the file": ("hybrid.model.file:ModelFile.__init__", 0),
    "trying it in another process": ("hybrid.tail.preflight:_talk", 0),
    "loading the tail": ("hybrid.tail.tail:Tail.__init__", 0),
    "loading the head": ("hybrid.head.head:Head.__init__", 2),
    "reading the prompt": ("hybrid.runtime.engine:Engine.evaluate", 0),
    "evaluating": ("hybrid.tail.context:Context.decode", 0),
    "sampling": ("hybrid.runtime.engine:Engine.sample", 0),
}
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}


def run_staged(
    tmp_path: Path, environment: dict[str, str], stage: str, number: int, args: list[str], stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run it to its end, and make sure that it left no process and no temporary file."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", STAGED, stage, str(int(number)), *args],
        input=stdin,
        env={**environment, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not list(folder.iterdir())
    assert not [process for process in psutil.process_iter() if _temporary(process) == str(folder)]
    return done


def _temporary(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("TMPDIR") if process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


@pytest.mark.parametrize(
    ("stage", "number"),
    [
        *((stage, signal.SIGTERM) for stage in STAGES),
        *((stage, signal.SIGINT) for stage in ("loading the tail", "evaluating")),
    ],
)
def test_a_signal_ends_the_program_at_every_stage(
    tmp_path: Path, tiny: Path, environment: dict[str, str], stage: str, number: int
) -> None:
    where, k = STAGES[stage]
    args = [
        "generate",
        str(tiny),
        "-p",
        "Hello",
        "-n",
        "400",
        "-c",
        "512",
        "-ngl",
        str(k),
        "--device",
        "cpu",
        "-t",
        "1",
    ]
    done = run_staged(tmp_path, environment, where, number, args)
    assert done.returncode == CODES[signal.Signals(number)], done.stderr
    assert "Traceback" not in done.stderr
    assert "hybrid: " not in done.stderr or number == signal.SIGINT


@pytest.mark.parametrize("number", CODES)
def test_a_signal_amid_a_callback_of_llama_cpp_is_not_lost(
    tmp_path: Path, tiny: Path, environment: dict[str, str], number: int
) -> None:
    """ctypes prints what a callback raises, and goes on."""
    args = ["inspect", str(tiny), "--verify", "--device", "cpu", "-t", "1"]
    done = run_staged(tmp_path, environment, "hybrid.tail.reference:Tap._on_tensor", number, args)
    assert (done.returncode, done.stdout) == (CODES[signal.Signals(number)], ""), done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_signal_while_a_template_is_rendered(tmp_path: Path, tiny: Path, environment: dict[str, str]) -> None:
    args = ["chat", str(tiny), "-n", "4", "-t", "1", "-ngl", "0"]
    done = run_staged(tmp_path, environment, "hybrid.runtime.renderer:Renderer._answer", signal.SIGTERM, args, "hi\n")
    assert (done.returncode, "Traceback" in done.stderr) == (143, False), done.stderr


SLOW_TORCH = """
import threading
print(threading.current_thread().name, file=open({started!r}, "w"), flush=True)
open({never!r}).read()  # a FIFO nobody writes to
"""


@pytest.mark.parametrize("number", CODES)
def test_a_signal_does_not_wait_until_torch_is_imported(
    tmp_path: Path, tiny: Path, environment: dict[str, str], number: int
) -> None:
    started, never = tmp_path / "started", tmp_path / "never"
    os.mkfifo(started)
    os.mkfifo(never)
    (tmp_path / "torch.py").write_text(SLOW_TORCH.format(started=str(started), never=str(never)))
    args = ["generate", str(tiny), "-p", "a", "-ngl", "2", "--device", "cpu", "-c", "64", "-t", "1"]
    program = subprocess.Popen(
        [sys.executable, "-m", "hybrid.cli", *args],
        env={**environment, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's background ignores it
    )
    assert started.read_text() == "hybrid-head\n"  # blocks until the import has begun
    program.send_signal(number)
    _, err = program.communicate(timeout=120)
    assert program.returncode == CODES[signal.Signals(number)], err
    assert b"Traceback" not in err


def test_a_reader_that_was_never_there_is_no_error(tmp_path: Path, tiny: Path, environment: dict[str, str]) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "hybrid.cli", "generate", str(tiny), "-p", "a", "-n", "4", "-t", "1", "-s", "1"]
    done = subprocess.run(command, env=environment, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(write)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr
