"""Claims about `hybrid generate` and `hybrid chat`, run as a person runs them, on a tiny random model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import gguf
import pexpect
import pytest

from hybrid.cli import takes_more
from hybrid.cli.progress import ProgressBar
from hybrid.cli.session import emit
from hybrid.errors import BadRequestError
from tests.cli.conftest import HYBRID, Run
from tests.tiny import write_tiny

KEYS = {
    "model",
    "text",
    "tokens",
    "n_prompt_tokens",
    "n_cached_tokens",
    "finish_reason",
    "placement",
    "timings",
    "memory",
}
SPLITS = [[], ["-ngl", "0"], ["-ngl", "2", "--device", "cpu"], ["-ngl", "all", "--device", "cpu"]]


@pytest.mark.parametrize("split", SPLITS)
def test_generate_prints_one_json_object_and_nothing_else(split: list[str], tiny: Path, run: Run) -> None:
    done = run("generate", tiny, "-p", "Hello world", "-n", "8", "--temp", "0", "-t", "1", "--json", *split)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert set(result) == KEYS
    k = {"0": 0, "2": 2, "all": 4}.get(split[1] if split else "0")
    assert result["placement"]["n_gpu_layers"] == k
    assert result["model"] == str(tiny)
    assert result["finish_reason"] in ("length", "stop")
    assert len(result["tokens"]) == 8 or result["finish_reason"] == "stop"
    assert set(result["timings"]) == {"load_s", "ttft_s", "prefill_tok_per_s", "decode_tok_per_s"}
    assert set(result["memory"]) == {"device_bytes", "host_bytes"}


def test_a_kv_strategy_changes_where_the_cache_is_and_not_the_text(tiny_gemma: Path, run: Run) -> None:
    options = (
        "-p",
        "the world " * 40,
        "-n",
        "12",
        "--temp",
        "0",
        "-t",
        "1",
        "-ngl",
        "all",
        "--device",
        "cpu",
        "--json",
    )
    device, tiered = (
        json.loads(run("generate", tiny_gemma, *options, *more).stdout)
        for more in ((), ("--kv", "tiered", "--kv-budget", "500K", "--no-kv-keep-sliding", "--kv-type", "f16"))
    )
    assert tiered["tokens"] == device["tokens"]
    placed = {"kv": "tiered", "kv_budget": 500 << 10, "kv_keep_sliding": False, "kv_dtype": "f16"}
    assert {key: tiered["placement"][key] for key in placed} == placed


def test_text_and_json_say_the_same_whatever_the_prompt_comes_through(tiny: Path, run: Run, tmp_path: Path) -> None:
    options = ("-n", "12", "--temp", "0", "-t", "1")
    text = json.loads(run("generate", tiny, "-p", "the world", "--json", *options).stdout)["text"]
    (tmp_path / "prompt.txt").write_text("the world\n")
    ways = [
        run("generate", tiny, "-p", "the world", *options),
        run("generate", tiny, "-f", str(tmp_path / "prompt.txt"), *options),
        run("generate", tiny, *options, input="the world\n"),
        run("generate", tiny, "-f", "-", *options, input="the world"),
    ]
    assert {way.stdout.removesuffix("\n") for way in ways} == {text.removesuffix("\n")}


def test_a_seed_gives_the_same_text_again(tiny: Path, run: Run) -> None:
    texts = {run("generate", tiny, "-p", "a", "-n", "16", "-s", "7", "-t", "1").stdout for _ in range(2)}
    others = {run("generate", tiny, "-p", "a", "-n", "16", "-s", str(s), "-t", "1").stdout for s in (8, 9)}
    assert len(texts) == 1
    assert others != texts


def test_chat_answers_what_is_piped_into_it(tiny: Path, run: Run, tmp_path: Path) -> None:
    options = ("-n", "8", "--temp", "0", "-t", "1")
    piped = run("chat", tiny, *options, input="Hello world\n")
    assert piped.returncode == 0, piped.stderr
    given = json.loads(run("chat", tiny, "-p", "Hello world", "--json", *options).stdout)
    assert piped.stdout.strip() == given["text"].strip()
    assert set(given) == KEYS
    (tmp_path / "system.txt").write_text("Be kind\n")
    from_file = json.loads(
        run("chat", tiny, "-p", "Hello world", "--system-file", tmp_path / "system.txt", "--json", *options).stdout
    )
    # The template of the tiny model: BOS, <|user|>, one token a character (a space before), <|end|>, <|user|>, …
    system = json.loads(run("chat", tiny, "-p", "Hello world", "--system", "Be kind", "--json", *options).stdout)
    assert from_file["n_prompt_tokens"] == system["n_prompt_tokens"] > given["n_prompt_tokens"]


def test_a_model_without_a_chat_template_chats_in_a_plain_format_and_says_so(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf.GGUFWriter, "add_chat_template", lambda self, template: None)
    path = write_tiny(tmp_path / "plain.gguf", n_layers=2)
    done = run("chat", path, "-p", "Hello", "-n", "2", "-t", "1")
    assert done.returncode == 0, done.stderr
    assert "plain 'User: … Assistant: …' format" in done.stderr


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(tiny: Path, run: Run) -> None:
    done = run("generate", tiny, "-p", "!" * 100, "-c", "64", "-t", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "64" in done.stderr.splitlines()[-1]
    assert any(n in done.stderr.splitlines()[-1] for n in ("100", "101", "102"))


def test_a_full_context_ends_the_text_and_is_said(tiny: Path, run: Run) -> None:
    done = run("generate", tiny, "-p", "the", "-c", "32", "-t", "1", "--json", "--seed", "3")
    result = json.loads(done.stdout)
    if result["finish_reason"] == "stop":
        pytest.skip("this random model ended by itself")
    assert result["finish_reason"] == "length"
    assert result["n_prompt_tokens"] + len(result["tokens"]) >= 32
    assert "context of 32 tokens is full" in done.stderr


def test_gpu_layers_without_a_gpu_are_an_error_that_names_the_way_out(tiny: Path, run: Run) -> None:
    import torch

    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("there is a GPU here")
    done = run("generate", tiny, "-p", "x", "-ngl", "2")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--device cpu" in done.stderr


def test_a_reader_that_takes_one_line_and_goes_ends_the_program_silently(
    tiny: Path, environment: dict[str, str]
) -> None:
    command = [*HYBRID, "generate", str(tiny), "-p", "the", "-s", "1", "-t", "1", "-c", "512"]
    program = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert program.stdout is not None
    assert program.stderr is not None
    program.stdout.read(1)
    program.stdout.close()
    err = program.stderr.read()
    assert program.wait(timeout=120) in (0, 141)  # 0: it had written everything before the pipe closed
    assert b"Traceback" not in err
    assert b"Broken" not in err


def test_an_interrupted_generation_is_exit_code_130_without_a_traceback(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    path = write_tiny(tmp_path / "long.gguf", n_layers=4, n_ctx=1 << 16)
    command = [*HYBRID, "generate", str(path), "-p", "the", "-s", "1", "-t", "1", "-c", "60000"]
    program = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert program.stdout is not None
    program.stdout.read(1)
    program.send_signal(signal.SIGINT)
    _, err = program.communicate(timeout=120)
    if program.returncode == 0:
        pytest.skip("this random model ended by itself")
    assert program.returncode == 130, err
    assert b"Traceback" not in err


def test_a_terminated_chat_leaves_the_terminal_as_it_was(tmp_path: Path, environment: dict[str, str]) -> None:
    path = write_tiny(tmp_path / "long.gguf", n_layers=4, n_ctx=1 << 16)
    args = ["-m", "hybrid.cli", "chat", str(path), "-t", "1", "-s", "1", "-c", "60000"]
    chat = pexpect.spawn(HYBRID[0], args, env=environment, timeout=120, encoding="utf-8", codec_errors="replace")
    try:
        before = termios.tcgetattr(chat.child_fd)
        chat.expect("Ctrl-D leaves")
        chat.expect(">")
        chat.send("Hello\r")
        chat.waitnoecho()  # the answer has begun
        chat.kill(signal.SIGTERM)
        chat.expect(pexpect.EOF)
        assert termios.tcgetattr(chat.child_fd) == before
        chat.wait()
    finally:
        chat.close(force=True)
    assert (chat.exitstatus, chat.signalstatus) == (143, None)


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_the_chat_on_a_terminal(term: str, tiny: Path, environment: dict[str, str]) -> None:
    args = ["-m", "hybrid.cli", "chat", str(tiny), "-n", "6", "-t", "1", "-s", "1"]
    env = {**environment, "TERM": term, "NO_COLOR": "1"}
    chat = pexpect.spawn(HYBRID[0], args, env=env, timeout=120, encoding="utf-8", dimensions=(30, 100))
    try:
        chat.expect("Ctrl-D leaves")
        chat.expect(">")
        chat.send("Hello\r")
        chat.expect(r"\d+ tokens? · .*context \d+/\d+")
        chat.send("/stats\r")
        chat.expect("layers   all layers on the CPU")
        chat.send("\x03")
        chat.expect("Ctrl-D or /exit leaves")
        chat.send("\x04")
        chat.expect(pexpect.EOF)
        chat.wait()
    finally:
        chat.close(force=True)
    assert chat.exitstatus == 0
    history = Path(environment["HOME"], ".local/state/hybrid/chat_history")
    if os.name == "posix" and history.exists():
        assert "+Hello" in history.read_text()


def test_the_chat_remembers_what_was_typed_last_time(tiny: Path, environment: dict[str, str]) -> None:
    args = ["-m", "hybrid.cli", "chat", str(tiny), "-n", "2", "-t", "1"]
    for typed, expected in (("unforgettable\r", r"tokens? ·"), ("\x1b[A", "unforgettable")):
        chat = pexpect.spawn(HYBRID[0], args, env=environment, timeout=120, encoding="utf-8", dimensions=(30, 100))
        try:
            chat.expect("Ctrl-D leaves")
            chat.expect(">")
            chat.send(typed)
            chat.expect(expected)
            chat.send("\x03\x04")
            chat.expect(pexpect.EOF)
        finally:
            chat.close(force=True)


@pytest.mark.parametrize(("pieces", "shown"), [(("Rome", " is"), "Rome is\n"), (("Rome\n",), "Rome\n"), ((), "")])
def test_what_is_said_of_an_error_amid_a_line_goes_on_its_own(
    pieces: tuple[str, ...], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing() -> Iterator[str]:
        yield from pieces
        raise BadRequestError("The model's output is not a number.")

    session = SimpleNamespace(progress=ProgressBar(), model=None, say_notes=lambda: None)
    with pytest.raises(BadRequestError):
        emit(session, failing(), as_json=False, max_tokens=None)  # type: ignore[arg-type]
    assert capsys.readouterr().out == shown


def test_a_signal_does_not_wait_for_a_reader_that_has_stopped_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    late = threading.Event()

    def read_on() -> None:
        late.set()
        os.read(read, 1 << 20)

    def told_to_end() -> Iterator[str]:
        yield "Rome"
        os.set_blocking(write, False)
        with suppress(BlockingIOError):
            while True:
                os.write(write, b"x" * 64)
        os.set_blocking(write, True)
        raise SystemExit(143)

    session = SimpleNamespace(progress=ProgressBar(), model=None, say_notes=lambda: None)
    rescue = threading.Timer(5, read_on)
    rescue.start()
    with open(write, "w") as out, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        with pytest.raises(SystemExit):
            emit(session, told_to_end(), as_json=False, max_tokens=None)  # type: ignore[arg-type]
        assert not takes_more(out)
    rescue.cancel()
    os.close(read)
    assert not late.is_set()
