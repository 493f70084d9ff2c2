"""`--grammar`, `--json-schema` and `--chat-template` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run


@pytest.mark.parametrize("layers", ["0", "2", "all"])
def test_generate_follows_a_grammar_and_a_schema(run: Run, tiny: Path, tmp_path: Path, layers: str) -> None:
    grammar, schema = tmp_path / "a.gbnf", tmp_path / "s.json"
    grammar.write_text('root ::= "yes" | "no"')
    schema.write_text('{"enum": ["red", "blue"]}')
    where = ("-ngl", layers, "--device", "cpu", "-c", "128")
    assert run("generate", tiny, "-p", "Hello", "--grammar", grammar, *where).stdout in ("yes\n", "no\n")
    if layers == "0":
        done = run("generate", tiny, "-p", "Hello", "--json-schema", schema, *where)
        assert json.loads(done.stdout) in ("red", "blue")
        done = run("chat", tiny, "-p", "Hello", "--json-schema", schema, *where)
        assert json.loads(done.stdout) in ("red", "blue")


@pytest.mark.parametrize(
    ("option", "content", "words"),
    [
        ("--grammar", b"root ::= x", "does not define"),
        ("--grammar", b"\xff", "not valid UTF-8"),
        ("--json-schema", b"{", "not valid JSON"),
        ("--json-schema", b'{"type": 7}', "JSON schema"),
        ("--json-schema", None, "cannot be read"),
    ],
)
def test_a_bad_file_is_one_sentence(
    run: Run, tiny: Path, tmp_path: Path, option: str, content: bytes, words: str
) -> None:
    file = tmp_path / "form"
    if content is not None:
        file.write_bytes(content)
    done = run("generate", tiny, "-p", "Hello", option, file)
    assert done.returncode == 2
    assert words in done.stderr
    assert str(file) in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_only_one_form_can_be_asked_for(run: Run, tiny: Path) -> None:
    done = run("generate", tiny, "-p", "x", "--grammar", "a", "--json-schema", "b")
    assert done.returncode == 2
    assert "not both" in done.stderr


def test_a_chat_template_is_taken_by_name_and_refused_in_one_sentence(run: Run, tiny: Path) -> None:
    done = run("chat", tiny, "-p", "Hello", "-n", "2", "-c", "128", "-ngl", "0", "--chat-template", "vicuna")
    assert done.returncode == 0, done.stderr
    done = run("chat", tiny, "-p", "Hello", "-c", "128", "-ngl", "0", "--chat-template", "nothing")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "hybrid: nothing is neither a file nor a chat template llama.cpp knows"
    )
