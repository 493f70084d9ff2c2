"""Claims about the program as a whole: quick help, one sentence an error, exit codes, clashes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hybrid
from hybrid.cli import app
from hybrid.cli.app import COMMANDS
from hybrid.cli.clash import find_clash
from hybrid.errors import BadFileError
from tests.cli.conftest import HYBRID, Run

HEAVY = ("torch", "llama_cpp", "rich", "numpy", "gguf", "jinja2", "prompt_toolkit")


def imported_by(*args: str) -> set[str]:
    """Those of HEAVY that a command has imported when it ends."""
    code = (
        "import sys, json\n"
        "from hybrid.cli import main\n"
        f"sys.argv = ['hybrid', *{list(args)!r}]\n"
        "try: main()\n"
        "except SystemExit as e: print(json.dumps([e.code, [m for m in sys.modules]]))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    exit_code, modules = json.loads(out.splitlines()[-1])
    assert exit_code == 0
    return set(HEAVY) & set(modules)


@pytest.mark.parametrize("args", [[], ["--help"], ["--version"], *([name, "--help"] for name in ("chat", "generate"))])
def test_help_imports_nothing_heavy(args: list[str]) -> None:
    assert imported_by(*args) == set()


def test_inspect_imports_neither_torch_nor_llama_cpp(tiny: Path) -> None:
    assert imported_by("inspect", str(tiny), "--json") <= {"numpy"}


def test_every_command_has_help_and_takes_json(run: Run) -> None:
    listed = run("--help").stdout
    for name in COMMANDS:
        assert name in listed
        assert "--json" in run(name, "--help").stdout


def test_version_is_the_packages(run: Run) -> None:
    assert run("--version").stdout == f"hybrid {hybrid.__version__}\n"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["chatt"], "did you mean 'chat'"),
        (["inspect", "nowhere.gguf"], "nowhere.gguf"),
        (["inspect", "no-such-model"], "no-such-model"),
        (["inspect"], "hybrid models pull smollm2-135m"),
        (["inspect", "."], "."),
        (["generate", "-ngl", "half", "-p", "x"], "half"),
        (["generate", "-ngl", "-1", "-p", "x"], "-1"),
        (["generate", "-n", "-2", "-p", "x"], "-2"),
        (["generate", "--temp", "hot", "-p", "x"], "'hot' is not a valid number"),
        (["generate", "--temp", "nan", "-p", "x"], "nan"),
        (["generate", "-c", "long", "-p", "x"], "'long' is not a valid whole number"),
        (["generate", "-ngl", "9" * 5000, "-p", "x"], "number of layers"),
        (["tune", "--budget", "9" * 20], "is not a time"),
        (["compare", "--depths", "9" * 5000], "is not a number"),
        (["generate", "--frobnicate"], "--frobnicate"),
        (["generate", "--kv", "cloud", "-p", "x"], "cloud"),
        (["generate", "--kv", "tiered", "--kv-budget", "much", "-p", "x"], "amount of memory"),
        (["generate", "-p", "x", "-f", "y"], "not both"),
        (["generate", "-f", "/nowhere/prompt.txt"], "/nowhere/prompt.txt"),
        (["chat"], "no message"),
        (["chat", "-p", "x", "--continue"], "at a terminal"),
        (["chat", "-p", "x", "--system", "a", "--system-file", "b"], "not both"),
        (["chat", "-p", "x", "--system-file", "/nowhere/system.txt"], "/nowhere/system.txt"),
        (["chat", "-p", "x", "--on-full", "panic"], "panic"),
    ],
)
def test_bad_input_is_one_sentence_on_stderr_and_exit_code_2(args: list[str], words: str, run: Run) -> None:
    done = run(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("hybrid: ")
    assert words in done.stderr


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, b"PK\x03\x04 not a model"])
def test_a_bad_file_is_one_sentence_for_every_command(content: bytes, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    for args in (["inspect", path], ["generate", path, "-p", "x"], ["chat", path, "-p", "x", "--json"]):
        done = run(*args)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done


@pytest.mark.parametrize("args", [["generate", "-p", b"\xff\xfe"], ["chat", "-p", "x", "--system", b"\xff"]])
def test_an_argument_that_is_no_text_is_refused(args: list[str | bytes], environment: dict[str, str]) -> None:
    done = subprocess.run([*HYBRID, *args], env=environment, capture_output=True, timeout=120)
    assert done.returncode == 2
    assert b"not valid UTF-8" in done.stderr


def test_an_argument_is_utf_8_text_in_every_locale(tiny: Path, environment: dict[str, str]) -> None:
    args = ["generate", str(tiny), "-p", "héé 日本".encode(), "-n", "1", "-t", "1", "--json"]
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    runs = [
        subprocess.run([*HYBRID, *args], env={**environment, **locale}, capture_output=True, timeout=120)
        for locale in (plain, {"PYTHONUTF8": "1"})
    ]
    ascii_locale, utf_8 = (json.loads(run.stdout)["n_prompt_tokens"] for run in runs)
    assert ascii_locale == utf_8


def test_a_bug_of_ours_is_one_sentence_and_a_traceback_only_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a bug\nof ours")

    monkeypatch.setattr(app, "check_package", fail)
    monkeypatch.delenv("HYBRID_DEBUG", raising=False)
    assert app._run(["--version"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "ZeroDivisionError: a bug of ours" in err
    monkeypatch.setenv("HYBRID_DEBUG", "1")
    app._run(["--version"])
    assert "Traceback" in capsys.readouterr().err


def test_a_sentence_has_an_end_whatever_a_file_holds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def quote(*args: object, **options: object) -> None:
        raise BadFileError(f"m.gguf cannot be used: {'é' * 100_000} is no tokenizer.")

    monkeypatch.setattr(app.commands, "main", quote)
    assert app._run(["inspect"]) == 2
    said = capsys.readouterr().err
    assert len(said) < 2100
    assert said.startswith("hybrid: m.gguf")
    assert said.endswith(" is no tokenizer.\n")


def test_what_cannot_be_said_is_still_the_exit_code(environment: dict[str, str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    command = f"exec {' '.join(HYBRID)} inspect nowhere.gguf 2>/dev/full"
    assert subprocess.run(["sh", "-c", command], env=environment, timeout=120).returncode == 2


def test_an_interrupt_anywhere_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "check_package", interrupt)
    assert app._run(["--version"]) == 130


def test_an_interrupt_while_the_command_line_is_imported_is_exit_code_130() -> None:
    code = """
import sys
class Ctrl_C:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Ctrl_C())
from hybrid.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, b"")


@pytest.mark.parametrize(("name", "file"), [("dwave-hybrid", "decomposers.py"), ("hybrid", "wsgi_app/__init__.py")])
def test_another_distribution_in_our_import_folder_is_named(name: str, file: str, tmp_path: Path) -> None:
    assert find_clash(tmp_path, hybrid.__all__) is None
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    assert find_clash(tmp_path, hybrid.__all__) == name


def test_an_overwritten_package_is_noticed(tmp_path: Path) -> None:
    assert find_clash(tmp_path, ["Branches", "Loop"]) == "unknown"
    assert find_clash(tmp_path, None) == "unknown"


def test_no_clash_in_this_environment() -> None:
    assert find_clash(Path(hybrid.__file__).parent, hybrid.__all__) is None


@pytest.mark.parametrize("args", [["--help"], ["inspect"]])
def test_a_reader_that_went_away_is_not_worth_a_word(args: list[str], tiny: Path, environment: dict[str, str]) -> None:
    read, write = os.pipe()
    os.close(read)
    arguments = [*args, str(tiny)] if args == ["inspect"] else args
    done = subprocess.run([*HYBRID, *arguments], env=environment, stdout=write, stderr=subprocess.PIPE, timeout=120)
    os.close(write)
    assert done.stderr == b""
    assert done.returncode != 0


@pytest.mark.parametrize(
    ("redirect", "code"), [(">&-", 0), ("2>&-", 0), (">&- 2>&- <&-", 0), (">/dev/full", 2), ("2>/dev/full", 0)]
)
def test_closed_and_full_outputs_end_in_no_traceback(
    redirect: str, code: int, tiny: Path, environment: dict[str, str]
) -> None:
    if "/dev/full" in redirect and not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    for args in ("--version", f"inspect {tiny}", f"inspect {tiny} --json"):
        command = f"exec {' '.join(HYBRID)} {args} {redirect}"
        done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, (args, done)
        assert done.stderr.count("\n") <= 1
        assert "Traceback" not in done.stderr
