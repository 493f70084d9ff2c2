"""A person's own defaults: used where the command line says nothing, refused where they make no sense."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cli.conftest import Run


@pytest.fixture
def config(environment: dict[str, str]) -> Path:
    path = Path(environment["HOME"], ".config/hybrid/config.toml")
    path.parent.mkdir(parents=True)
    return path


def test_the_file_gives_defaults_and_the_command_line_goes_before_it(tiny: Path, run: Run, config: Path) -> None:
    config.write_text(f'[generate]\nmodel = "{tiny}"\npredict = 3\ntemp = 0\nthreads = 1\nn-gpu-layers = 0\n')
    assert len(json.loads(run("generate", "-p", "the", "--json").stdout)["tokens"]) == 3
    assert len(json.loads(run("generate", "-p", "the", "--json", "-n", "5").stdout)["tokens"]) == 5


def test_a_pipe_is_not_waited_for(run: Run, config: Path) -> None:
    os.mkfifo(config)
    done = run("config")
    assert (done.returncode, done.stdout) == (2, "")
    assert "config.toml cannot be read: it is a pipe." in done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[chat]\ntemperatur = 1", "no key 'temperatur'"),
        ("[chat]\ntempp = 1", "did you mean temp?"),
        ("[chat]\nprompt = 'x'", "no key 'prompt'"),
        ("[chat]\ntemp = 'hot'", "[chat] temp: "),
        ("[chat]\ntemp = -1", "[chat] temp: "),
        ("[chat]\non-full = 'panic'", "[chat] on-full: "),
        ("[chat]\nquiet = 1", "must be true or false"),
        ("[chat]\ntemp = [1]", "must be one value"),
        ("[tune]\nbudget = 1", "'tune'"),
        ("temp = 1", "'temp'"),
        ("chat = 1", "must be a table"),
        ("[chat", "cannot be read"),
        ("[chat]\nsystem = '\xff'", "cannot be read"),
    ],
)
def test_what_makes_no_sense_is_one_sentence_that_names_the_file(text: str, words: str, run: Run, config: Path) -> None:
    config.write_bytes(text.encode("latin-1"))
    for args in (("chat", "-p", "x"), ("config",)):
        done = run(*args)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert words in done.stderr
        assert "config.toml" in done.stderr


def test_a_flag_that_switches_off_and_a_prompt_given_twice_mean_what_they_say(
    tiny: Path, run: Run, config: Path, tmp_path: Path
) -> None:
    (tmp_path / "system.txt").write_text("Be kind, and be it always.")
    ask = ("chat", tiny, "-p", "x", "-n", "1", "-t", "1", "--json")
    alone = json.loads(run(*ask).stdout)["n_prompt_tokens"]
    config.write_text('[chat]\nsystem = "Be."\n')
    done = json.loads(run(*ask).stdout)
    assert done["n_prompt_tokens"] > alone
    assert (
        json.loads(run(*ask, "--system-file", tmp_path / "system.txt").stdout)["n_prompt_tokens"]
        > done["n_prompt_tokens"]
    )
    config.write_text("[chat]\nno-kv-offload = true\n")
    assert "offload_kqv=False" in run(*ask).stderr  # as -nkvo says without --engine llama.cpp
    shown = json.loads(run("config", "--json").stdout)
    assert shown["chat"]["no-kv-offload"] == {"value": True, "set": True}
    assert shown["generate"]["no-kv-offload"] == {"value": False, "set": False}


def test_help_does_without_the_file(run: Run, config: Path) -> None:
    config.write_text("[chat]\nnonsense = 1\n")
    assert run("chat", "--help").returncode == 0


def test_config_shows_every_key_and_what_the_file_sets(run: Run, config: Path) -> None:
    assert "There is no" in run("config").stdout
    config.write_text('[chat]\nsystem = "Be \\"kind\\"."\nquiet = true\n')
    shown = run("config").stdout
    assert '* system = "Be \\"kind\\"."' in shown
    assert "* quiet = true" in shown
    assert "  temp = 0.8" in shown
    found = json.loads(run("config", "--json").stdout)
    assert found["chat"]["quiet"] == {"value": True, "set": True}
    assert found["chat"]["temp"] == {"value": 0.8, "set": False}
