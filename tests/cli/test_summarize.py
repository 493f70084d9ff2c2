"""Claims about `hybrid summarize`, run as a person runs it, on a tiny random model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pexpect
import pytest

from hybrid.apps.summarize.progress import Progress
from hybrid.cli.summarize_bar import clock, line_of
from hybrid.files import write_atomically
from tests.apps.files import pdf
from tests.cli.conftest import HYBRID, Run
from tests.tiny import write_tiny

KEYS = {
    *("text", "document", "model", "strategy", "chunks", "overlap", "levels", "n_levels", "phases", "flagged"),
    *("truncated", "complete", "wall_s", "options", "placement", "notes"),
}
LINE = "In the year {0} the town built house number {0} of the old street.\n\n"


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama, small and "trained" for a long context."""
    path = tmp_path_factory.mktemp("models") / "long.gguf"
    return write_tiny(path, n_layers=2, n_embd=64, n_heads=2, n_kv_heads=1, head_dim=32, n_ff=64, n_ctx=8192)


@pytest.fixture
def options(long_model: Path) -> tuple[str, ...]:
    return ("-m", str(long_model), "-c", "700", "-t", "1", "--length", "12 words")


def wait_for_lines(program: subprocess.Popen[bytes], folder: Path, n: int) -> None:
    """Until the checkpoints in `folder` have `n` lines, or the program is over."""
    while program.poll() is None and sum(p.read_bytes().count(b"\n") for p in folder.glob("*")) < n:
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(timeout=0.02)


def test_help_is_a_manual_and_needs_neither_torch_nor_llama_cpp(run: Run) -> None:
    done = run("summarize", "--help")
    assert done.returncode == 0
    for word in ("--resume", "map-reduce", "JSON", "tokens_read", "state", "EXAMPLES", "pip install"):
        assert word in done.stdout
    code = "import sys, hybrid.cli.summarize; print([m for m in ('torch', 'llama_cpp', 'numpy') if m in sys.modules])"
    assert subprocess.run([HYBRID[0], "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_the_built_in_prompts_are_shown(run: Run) -> None:
    done = run("summarize", "--show-prompts")
    assert done.returncode == 0
    assert done.stdout.count("{text}") == 5


def test_stdin_to_one_json_object_that_accounts_for_every_token(run: Run, options: tuple[str, ...]) -> None:
    done = run("summarize", "-", "--json", *options, input="".join(map(LINE.format, range(12))))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert set(result) == KEYS
    document = result["document"]
    assert document["tokens"] == document["tokens_read"] > 0
    assert document["share_read"] == 1.0
    assert result["strategy"] == "map-reduce"
    assert result["phases"]["map"]["jobs"] == result["chunks"] > 1


@pytest.mark.parametrize(
    ("lines", "least_tokens"), [(150, 9_000), pytest.param(1000, 60_000, marks=pytest.mark.slow, id="60k tokens")]
)
def test_killed_three_times_and_resumed_it_writes_the_same_file(
    lines: int,
    least_tokens: int,
    run: Run,
    options: tuple[str, ...],
    environment: dict[str, str],
    tmp_path: Path,
) -> None:
    document = tmp_path / "town.txt"
    document.write_text("".join(map(LINE.format, range(lines))))
    options = (*options, "--parallel", "1")
    done = run("summarize", document, "-o", tmp_path / "whole.txt", *options)
    assert done.returncode == 0, done.stderr
    command = [*HYBRID, "summarize", str(document), "-o", str(tmp_path / "out.txt"), *options]
    folder = Path(environment["HOME"], ".local/state/hybrid/summaries")
    saved = 0
    for n in range(3):
        program = subprocess.Popen(
            command + ["--resume"] * (n > 0), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_for_lines(program, folder, saved + 4)
        program.send_signal(signal.SIGKILL)
        assert program.wait(timeout=60) == -signal.SIGKILL  # it had not finished
        assert not (tmp_path / "out.txt").exists()
        (path,) = folder.glob("*")
        saved = path.read_bytes().count(b"\n") - 1  # less the head
    done = run("summarize", document, "-o", tmp_path / "out.txt", "--resume", "--json", *options)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.txt").read_bytes() == (tmp_path / "whole.txt").read_bytes()
    result = json.loads(done.stdout)
    assert sum(phase["from_checkpoint"] for phase in result["phases"].values()) == saved
    assert result["document"]["share_read"] == 1.0
    assert result["document"]["tokens_read"] >= least_tokens
    assert list(folder.glob("*")) == []


def test_several_chunks_at_a_time_are_all_read_and_a_killed_run_goes_on(
    run: Run, options: tuple[str, ...], environment: dict[str, str], tmp_path: Path
) -> None:
    document = tmp_path / "town.txt"
    document.write_text("".join(map(LINE.format, range(60))))
    options = (*options, "--parallel", "3", "--speculate", "3")
    command = [*HYBRID, "summarize", str(document), *options]
    folder = Path(environment["HOME"], ".local/state/hybrid/summaries")
    program = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_lines(program, folder, 3)
    program.send_signal(signal.SIGKILL)
    assert program.wait(timeout=60) == -signal.SIGKILL
    (path,) = folder.glob("*")
    saved = path.read_bytes().count(b"\n") - 1
    for curve in Path(environment["HOME"], ".cache/hybrid").glob("batch-*"):
        curve.unlink()  # what it measures now may differ; the run goes on by what it measured then
    done = run("summarize", document, "--resume", "--json", *options)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["document"]["share_read"] == 1.0
    assert result["placement"]["n_sequences"] == 3
    assert result["placement"]["n_draft"] == 3
    assert sum(phase["from_checkpoint"] for phase in result["phases"].values()) == saved > 0


def test_auto_takes_what_there_is_use_for_and_says_so(run: Run, options: tuple[str, ...], tmp_path: Path) -> None:
    document = tmp_path / "town.txt"
    for lines, words in ((3, "One sequence at a time"), (60, "2 sequences at a time")):
        document.write_text("".join(map(LINE.format, range(lines))))
        done = run("summarize", document, *options, "--speculate", "off")
        assert done.returncode == 0, done.stderr
        assert words in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_told_to_end_it_says_how_to_go_on(
    number: signal.Signals, options: tuple[str, ...], environment: dict[str, str], tmp_path: Path
) -> None:
    document = tmp_path / "town.txt"
    document.write_text("".join(map(LINE.format, range(150))))
    folder = Path(environment["HOME"], ".local/state/hybrid/summaries")
    program = subprocess.Popen(
        [*HYBRID, "summarize", str(document), *options], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_for_lines(program, folder, 3)
    program.send_signal(number)
    out, err = program.communicate(timeout=60)
    assert program.returncode == 128 + number, err
    assert out == b""
    assert b"--resume" in err
    assert b"Traceback" not in err


def test_a_state_folder_that_cannot_be_used_costs_only_the_resuming(
    run: Run, options: tuple[str, ...], environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("".join(map(LINE.format, range(60))))
    Path(environment["HOME"], ".local").write_text("in the way, for root too")
    for resume in ((), ("--resume",)):
        done = run("summarize", tmp_path / "a.txt", *options, *resume)
        assert done.returncode == 0, done.stderr
        assert done.stdout
        assert done.stderr.count("No answer is saved on the way") == 1


def test_several_files_make_a_summary_each_and_one_of_all(run: Run, options: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    (tmp_path / "a.txt").write_text(LINE.format(1))
    (tmp_path / "b.pdf").write_bytes(pdf(["The second document."]))
    done = run(
        "summarize", tmp_path / "a.txt", tmp_path / "b.pdf", "--combine", "-o", tmp_path / "out", "--json", *options
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [one["document"]["format"] for one in result["documents"]] == ["text", "pdf"]
    assert set(result["combined"]) == KEYS
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "a.txt.summary.txt",
        "b.pdf.summary.txt",
        "combined.summary.txt",
    ]
    assert (tmp_path / "out/a.txt.summary.txt").read_text() == result["documents"][0]["text"].rstrip("\n") + "\n"


@pytest.mark.parametrize(
    ("name", "data", "more", "words"),
    [
        ("empty.txt", b"", (), "is empty"),
        ("binary.txt", bytes(range(256)) * 9, (), "binary"),
        ("scan.pdf", pdf(["", ""]), (), "scan"),
        ("a.txt", b"text", ("--parallel", "0"), "--parallel"),
        ("a.txt", b"text", ("--parallel", "many"), "--parallel"),
        ("a.txt", b"text", ("--parallel", "9" * 30), "--parallel"),
        ("a.txt", b"text", ("--speculate", "-3"), "--speculate"),
        ("a.txt", b"text", ("--parallel", "1000000"), "RAM"),
        ("a.txt", b"text", ("--length", "much"), "--length"),
        ("a.txt", b"text", ("--prompts", "/"), "map.txt"),
        ("a.txt", b"text", ("-o", "/nowhere/at/all"), "cannot be written"),
        ("a.txt", b"text " * 300, ("--strategy", "single"), "--strategy map-reduce"),
        ("a.txt", b"text " * 300, ("-c", "100"), "context of 100 tokens is too small"),
        ("a.txt", b"text " * 300, ("-c", "1"), "context of 1 tokens is too small"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    name: str, data: bytes, more: tuple[str, ...], words: str, run: Run, options: tuple[str, ...], tmp_path: Path
) -> None:
    if name.endswith(".pdf"):
        pytest.importorskip("pypdf")
    (tmp_path / name).write_bytes(data)
    done = run("summarize", tmp_path / name, *options, *more)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_the_document_is_not_overwritten(run: Run, options: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    done = run("summarize", tmp_path / "a.txt", "-o", tmp_path / "a.txt", *options)
    assert done.returncode == 2
    assert (tmp_path / "a.txt").read_text() == "text"


def test_an_output_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.txt"
    path.write_text("before")
    path.chmod(0o640)

    def full(source: str, target: str) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="disk full"):
            write_atomically(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    write_atomically(path, "after")
    assert path.read_text() == "after"
    assert path.stat().st_mode & 0o777 == 0o640


def test_the_bar_tells_tokens_and_time_left() -> None:
    line = line_of(Progress("a", "map", 12_000, 60_000, 7, 34, 185.0))
    assert line.startswith("Reading █")
    assert line.endswith("12000 of 60000 tokens, 7 of 34, 3:05 left")
    assert clock(3723) == "1:02:03"


def test_a_terminal_sees_the_bar_and_a_pipe_does_not(
    run: Run, options: tuple[str, ...], environment: dict[str, str], tmp_path: Path
) -> None:
    document = tmp_path / "town.txt"
    document.write_text("".join(map(LINE.format, range(40))))
    args = ["-m", "hybrid.cli", "summarize", str(document), *options]
    program = pexpect.spawn(HYBRID[0], args, env=environment, timeout=120, encoding="utf-8", dimensions=(30, 100))
    try:
        program.expect(r"Reading .* tokens, \d+ of \d+, \d+:\d\d left")
        program.expect(r"read (\d+) of \1 tokens")
        program.expect(pexpect.EOF)
    finally:
        program.close(force=True)
    assert "\x1b" not in run("summarize", document, *options).stderr
