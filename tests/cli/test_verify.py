"""Claims about `hybrid inspect --verify`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType as T

from hybrid.apps import verify as room
from hybrid.apps.verify import verify
from hybrid.cli.inspect import command
from hybrid.errors import OutOfMemoryError, UnsupportedError
from hybrid.model.architectures import read_spec
from tests.architectures.models import MODELS
from tests.tiny import write_tiny
from tests.tiny_arch import write_arch


@pytest.fixture
def quantised(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "q.gguf", n_layers=4, kind=[T.Q4_0, T.Q8_0])


def test_a_split_that_is_llama_cpp_s_agrees(quantised: Path) -> None:
    for k in (1, 3, "all"):
        verdict = verify(quantised, k, device="cpu", n_threads=1)
        assert verdict.agrees
        assert verdict.tail_difference == (None if k == "all" else 0.0)
        assert 0 < verdict.kl < 0.1


def test_without_ngl_the_middle_is_taken_and_padded_tails_agree_too(tmp_path: Path) -> None:
    verdict = verify(write_arch(tmp_path / "m.gguf", MODELS["smollm3"]), device="cpu", n_threads=1)
    assert (verdict.n_gpu_layers, verdict.agrees, verdict.tail_difference) == (4, True, 0.0)
    rounded = verify(write_arch(tmp_path / "g.gguf", replace(MODELS["gemma2"], sizes={"n_embd": 96})), 3, device="cpu")
    assert rounded.agrees
    assert not rounded.tail_exact_expected


def test_a_head_that_computes_something_else_does_not_agree(quantised: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(file: object) -> object:
        spec = read_spec(file)  # type: ignore[arg-type]
        return replace(spec, layers=tuple(replace(layer, attn_scale=layer.attn_scale * 1.5) for layer in spec.layers))

    monkeypatch.setattr(room, "read_spec", wrong)
    verdict = verify(quantised, 2, device="cpu", n_threads=1)
    assert verdict.tail_agrees
    assert not verdict.agrees
    done = CliRunner().invoke(command, ["--verify", "-ngl", "2", "--device", "cpu", str(quantised)])
    assert done.exit_code == 1
    assert "NOT agree" in done.output


def test_a_tail_that_counts_its_layers_wrongly_does_not_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_arch(tmp_path / "m.gguf", MODELS["smollm3"])
    monkeypatch.setattr("hybrid.tail.slice.padding", lambda spec, k: 0)
    verdict = verify(path, 3, device="cpu", n_threads=1)
    assert not verdict.tail_agrees
    assert not verdict.agrees


def test_the_command_says_what_it_found(quantised: Path) -> None:
    arguments = ["--verify", "-ngl", "2", "--device", "cpu", "-t", "1", str(quantised)]
    text = CliRunner().invoke(command, arguments).output
    assert "2 layers on cpu" in text
    assert "bit for bit" in text
    assert text.rstrip().endswith("They agree.")
    facts = json.loads(CliRunner().invoke(command, [*arguments, "--json"]).output)
    assert facts["agrees"] is True
    assert facts["n_gpu_layers"] == 2


def test_what_cannot_be_compared_is_refused(quantised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="nothing to compare"):
        verify(quantised, 0)
    with pytest.raises(UnsupportedError, match="bloom"):
        verify(write_tiny(tmp_path / "b.gguf", "bloom"))
    done = CliRunner().invoke(command, ["-ngl", "2", str(quantised)])
    assert done.exit_code == 2
    assert "--verify" in done.output


def test_a_model_of_which_one_side_does_not_fit_is_refused(quantised: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's own load would be mapped, and crawl."""
    monkeypatch.setattr(room, "ram_budget", lambda: 60 << 20)
    with pytest.raises(OutOfMemoryError, match=r"llama\.cpp alone needs"):
        verify(quantised, 2, device="cpu")
    monkeypatch.setattr("hybrid.schedule.scheduler.ram_budget", lambda: 60 << 20)
    with pytest.raises(OutOfMemoryError):
        verify(quantised, 2, device="cpu")
