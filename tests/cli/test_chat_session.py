"""A person at a terminal: starts a chat, uses it, loses it to a kill, and goes on."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from hybrid.model.catalog import catalog
from tests.cli.window import TmuxWindow, Window
from tests.tiny import write_tiny


@pytest.fixture(scope="module")
def smollm() -> Path:
    entry = catalog()["smollm2-135m"]
    if not entry.pulled:
        pytest.skip("smollm2-135m is not pulled: hybrid models pull smollm2-135m")
    return entry.path


@pytest.fixture(params=[Window, TmuxWindow], ids=["emulated", "tmux"])
def terminal(request: pytest.FixtureRequest) -> type[Window]:
    kind: type[Window] = request.param
    return kind


@pytest.mark.real
def test_a_conversation_outlives_a_kill_and_opens_with_its_state(
    terminal: type[Window], smollm: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    options = (smollm, "--temp", "0", "-n", "32", "-c", "1024", "--system", "You are a helpful assistant.")
    (tmp_path / "notes.txt").write_text("The boat is called Anna. It is red and leaves at nine.\n")
    with terminal(*options, env=environment, columns=120) as window:  # where all the asked for has room, however fast
        window.expect("Ctrl-D leaves")
        first = " ".join(window.say("What is the capital of France?").split())
        assert "The capital of France is Paris." in first
        assert "context" in first
        assert "reused" in first
        assert "layers 0/30" in first
        window.say("And of Italy?")
        third = window.say("Thanks!")
        again = window.say("/retry")
        answer = lambda shown: shown.split(" tokens · ")[0].splitlines()[1:-1]  # noqa: E731
        assert answer(again)[-1:] == answer(third)[-1:]
        assert "read 1, reused" in " ".join(again.split())
        assert "notes.txt was added" in window.say(f"/file {tmp_path / 'notes.txt'}")
        assert "Saved as trip" in window.say("/save trip")
        window.prompt()
        window.type("What is the boat called? Tell a long story about it.\r")
        window.expect("Tell a long story about it.")
        before = window.text
        window.until(lambda: len(window.text) > len(before) + 20, "the beginning of an answer")
        window.kill(signal.SIGKILL)
        assert window.end() == -signal.SIGKILL

    with terminal(*options, "--continue", env=environment) as window:
        window.expect("trip: 8 messages")
        window.expect("will be read again with your next message")
        window.expect("Your last message has no answer yet")
        assert "Anna" in window.say("/retry")
        path = tmp_path / "trip.md"
        assert "9 messages written" in window.say(f"/export {path}")
        assert window.leave() == 0
    text = path.read_text()
    for words in ("# trip", "Paris", "And of Italy?", "## User: notes.txt", "It is red and leaves at nine.", "Anna"):
        assert words in text

    with terminal(*options, "--resume", "trip", env=environment) as window:
        window.expect("Its KV state was restored")
        shown = " ".join(window.say("And what colour is it?").split())
        new = int(shown.split(" · read ")[1].split(", reused")[0])
        assert new < 40
        assert window.leave() == 0


@pytest.fixture
def long_tiny(tmp_path: Path) -> Path:
    """A random model that talks for as long as it is let."""
    return write_tiny(tmp_path / "long.gguf", n_layers=4, n_ctx=1 << 15)


def test_ctrl_c_stops_an_answer_and_twice_leaves(long_tiny: Path, environment: dict[str, str], tmp_path: Path) -> None:
    endless = tmp_path / "endless.gbnf"  # a random model ends an answer at any token, perhaps before it is stopped
    endless.write_text("root ::= [a-z ]{900}")
    options = ("-t", "1", "-s", "1", "-c", "30000", "--grammar", endless)
    with Window(long_tiny, *options, env=environment) as window:
        window.prompt()
        for _ in range(2):
            window.type("Hello\r")
            before = window.text
            window.until(lambda before=before: len(window.text) > len(before) + 60, "an answer")  # type: ignore[misc]
            window.type("\x03")
            window.expect("stopped · ")
            window.prompt()
        window.type("half a line")
        window.expect("> half a line")
        window.type("\x03")
        window.prompt()
        window.type("\x03")
        window.expect("Ctrl-C again")
        window.type("\x03")
        assert window.end() == 130


def test_an_answer_is_whole_whatever_becomes_of_its_window(
    terminal: type[Window], long_tiny: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    words = [f"w{i:04}" for i in range(1000)]
    blocks = []
    for i in range(0, len(words), 40):  # paragraphs, and code of more lines than some of the windows have
        paragraph, code = " ".join(words[i : i + 15]), "\\n".join(words[i + 15 : i + 40])
        blocks.append(f"{paragraph}\\n\\n```\\n{code}\\n```\\n\\n")
    told = tmp_path / "told.gbnf"
    told.write_text(f'root ::= "{"".join(blocks)}"')
    with terminal(long_tiny, "-t", "1", "-c", "30000", "--grammar", told, env=environment) as window:
        window.prompt()
        window.type("Hello\r")
        for n, size in enumerate([(60, 20), (110, 30), (70, 12), (100, 40), (45, 15)], 1):
            window.expect(words[24 * n])
            window.resize(*size)
        window.expect(words[150])
        window.type("\x03")
        window.expect("stopped · ")
        shown = re.findall("w[0-9]{4}", window.prompt())
        end = int(shown[-1][1:]) + 1
        assert shown[-15:] == words[end - 15 : end]
        if terminal is TmuxWindow:  # it keeps what leaves the screen where it becomes smaller
            assert sorted(set(shown)) == words[:end]
        window.resize(80, 24)
        window.type("half a line")
        window.resize(50, 30)
        window.expect("> half a line")
        window.type(" and more\r")
        window.expect("w0000 w0001")


def test_pastes_quotes_and_wide_characters_are_one_message(tiny: Path, environment: dict[str, str]) -> None:
    with Window(tiny, "-t", "1", "-s", "1", "-n", "2", "-c", "512", "--plain", env=environment) as window:
        window.prompt()
        window.type("\x1b[200~one\rtwo\rthree\x1b[201~")
        window.expect("three")
        window.type("\r")
        window.expect("context")
        window.prompt()
        window.type('"""\r/four\rfive"""\r')
        window.prompt()
        window.type("日本語x\x7f\x7f\x1b\rשלום\r")  # two characters taken back, Alt-Enter, right to left
        window.prompt()
        megabyte = "0123456789abcde\r" * 65536
        window.type(f"\x1b[200~{megabyte}\x1b[201~")
        window.expect("[paste 1: 65,537 lines, 1,048,576 characters]")
        window.type("\r")
        window.expect("tokens, but the context holds 512")
        path = Path(environment["HOME"], "all.json")
        window.say(f"/export {path}")
        assert window.leave() == 0
    said = [m["content"] for m in json.loads(path.read_text())["messages"] if m["role"] == "user"]
    assert said == ["one\ntwo\nthree", "/four\nfive", "日本\nשלום"]


def test_completion_by_tab(tiny: Path, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "a-document.txt").write_text("the world")
    with Window(tiny, "-t", "1", "-s", "1", "-n", "2", env=environment) as window:
        window.prompt()
        window.type("/fi\t")
        window.expect("> /file")
        window.type(f" {tmp_path}/a-doc\t")
        window.expect("a-document.txt")
        window.type("\r")
        window.expect("a-document.txt was added")
        assert window.leave() == 0


def test_two_windows_have_conversations_of_their_own(tiny: Path, environment: dict[str, str]) -> None:
    options = (tiny, "-t", "1", "-s", "1", "-n", "2")
    with Window(*options, env=environment) as one, Window(*options, env=environment) as other:
        one.say("Hello one")
        other.say("Hello other")
        assert "open in another window" in one.say("/load 2")
        listed = one.say("/list")
        assert "Hello one" in listed
        assert "Hello other" in listed
        with Window(*options, "--resume", "1", env=environment) as third:
            assert third.end() == 2
            assert "open in another window" in third.text
        with Window(*options, "--continue", env=environment) as third:
            assert third.end() == 2
            assert "hybrid: Every conversation is open in another window." in third.text
        one.say("/clear")
        assert one.leave() == 0
        with Window(*options, "--continue", env=environment) as third:
            assert "“Hello other” is open in another window; the one before it is opened." in third.prompt()
            assert third.leave() == 0
        assert other.leave() == 0


def test_a_closed_terminal_ends_the_chat_and_leaves_the_conversation(tiny: Path, environment: dict[str, str]) -> None:
    with Window(tiny, "-t", "1", "-s", "1", "-n", "2", env=environment) as window:
        window.say("Hello")
        window.kill(signal.SIGHUP)
        assert window.end() == 129
    with Window(tiny, "-t", "1", "--continue", env=environment) as window:
        window.expect("“Hello”: 2 messages")
        assert window.leave() == 0


def test_a_disk_that_cannot_be_written_costs_the_conversation_and_not_the_chat(
    tiny: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    env = {**environment, "XDG_DATA_HOME": str(tmp_path / "file"), "XDG_CACHE_HOME": str(tmp_path / "file")}
    with Window(tiny, "-t", "1", "-s", "1", "-n", "2", env=env) as window:
        window.expect("This conversation is not saved")
        assert "context" in window.say("Hello")
        assert window.leave() == 0


def test_tables_fit_a_narrow_terminal(tiny: Path, environment: dict[str, str]) -> None:
    with Window(tiny, "-t", "1", "-ngl", "2", "--device", "cpu", env=environment, columns=40, rows=40) as window:
        window.prompt()
        lines = window.say("/memory").splitlines()
        sides = [line.split()[0] for line in lines if "predicted" in line and "measured" in line]
        assert sides == ["device", "host"], lines
        assert sum(line.startswith("  KV cache ") and line.count("MiB") == 2 for line in lines) == 2, lines
        assert window.leave() == 0


def test_nothing_to_continue_is_one_sentence(tiny: Path, environment: dict[str, str]) -> None:
    with Window(tiny, "--continue", env=environment) as window:
        assert window.end() == 2
        assert window.text.startswith("hybrid: There is no conversation to go on with yet.")


def test_the_editor_changes_the_last_message(tiny: Path, environment: dict[str, str], tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\necho "the world" > "$1"\n')
    editor.chmod(0o755)
    env = {**environment, "EDITOR": str(editor), "VISUAL": str(editor)}
    with Window(tiny, "-t", "1", "-s", "1", "-n", "2", env=env) as window:
        window.say("Hello")
        window.say("/edit")
        assert "Taken back: the world" in window.say("/undo")
        assert window.leave() == 0
