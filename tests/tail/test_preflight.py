"""What would end llama.cpp's process ends another one first, and becomes a sentence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from hybrid import Hybrid
from hybrid.errors import BadFileError, Cancelled, EngineError, HybridError, UnsupportedError
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.tail import preflight as module
from hybrid.tail.preflight import preflight
from tests.doctored import rewritten
from tests.fuzz.layout import take_apart
from tests.tiny import vocabulary, write_tiny


@pytest.fixture(autouse=True)
def own_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hybrid" / "preflight"


def attempt(path: Path, k: int = 0, **more: Any) -> None:
    with ModelFile(path) as file:
        preflight(file, k, "here", **more)


def write_model(path: Path, **changes: Any) -> Path:
    """A tiny llama whose tokens, or metadata, are changed."""
    return write_tiny(path, n_layers=2, n_embd=64, n_heads=2, n_kv_heads=1, head_dim=32, n_ff=64, **changes)


def no_process(*args: object, **kwargs: object) -> None:
    raise AssertionError("a process was started")


@pytest.mark.parametrize("k", [0, 1, 2])
def test_a_sound_file_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    path = write_model(tmp_path / "m.gguf")
    attempt(path, k)
    monkeypatch.setattr(subprocess, "Popen", no_process)
    attempt(path, k)
    with pytest.raises(AssertionError, match="process"):
        attempt(path, (k + 1) % 3)


def test_another_file_of_the_same_name_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "m.gguf")
    attempt(path)
    monkeypatch.setattr(subprocess, "Popen", no_process)
    before = path.stat()
    path.rename(tmp_path / "old.gguf")
    path.write_bytes((tmp_path / "old.gguf").read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(AssertionError, match="process"):
        attempt(path)


def test_another_build_or_machine_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ModelFile(write_model(tmp_path / "m.gguf")) as file:
        key = module._key(file, 0, "here")
        assert key == module._key(file, 0, "here")
        assert key != module._key(file, 0, "elsewhere")
        monkeypatch.setattr(module, "_library", list)
        assert key != module._key(file, 0, "here")


def test_the_oldest_verdicts_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_verdicts: Path) -> None:
    monkeypatch.setattr(module, "MOST_VERDICTS", 4)
    for i in range(5):
        module._remember(own_verdicts / str(i))
        os.utime(own_verdicts / str(i), (i, i))
    module._remember(own_verdicts / "new")
    assert {path.name for path in own_verdicts.iterdir()} >= {"4", "new"}
    assert len(list(own_verdicts.iterdir())) <= 4


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    attempt(write_model(tmp_path / "m.gguf"))


# -- files that end llama.cpp ----------------------------------------------------------------------------------------


def duplicate_token() -> dict[str, Any]:
    tokens, _, _ = vocabulary()
    return {"tokenizer.ggml.tokens": [*tokens[:-1], tokens[-2]]}


FATAL: dict[str, tuple[dict[str, Any], str]] = {
    "a token twice": (duplicate_token(), r"SIGABRT \(llama-vocab.*GGML_ASSERT"),
    "a byte without its token": (
        {"tokenizer.ggml.tokens": [t.replace("<0x80>", "none") for t in vocabulary()[0]]},
        r"SIGABRT",
    ),
    "no vocabulary": ({"tokenizer.ggml.model": "no_vocab", "llama.vocab_size": 366}, "no vocabulary"),
}


@pytest.mark.parametrize("case", FATAL)
def test_a_file_that_ends_llama_cpp_is_a_sentence(tmp_path: Path, case: str) -> None:
    changes, message = FATAL[case]
    path = rewritten(tmp_path, keys=changes)
    for _ in range(2):  # it is not remembered
        with pytest.raises(BadFileError, match=message) as caught:
            attempt(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("k", [0, 1, 2])
def test_a_model_is_tried_before_it_is_loaded(tmp_path: Path, k: int) -> None:
    with pytest.raises(BadFileError, match="GGML_ASSERT"):
        Hybrid(rewritten(tmp_path, keys=duplicate_token()), n_gpu_layers=k, device="cpu", n_ctx=64)


def test_a_token_is_computed_where_our_reader_does_not_check_the_tensors(tmp_path: Path) -> None:
    """An architecture we do not know, with matrices of whole numbers: llama.cpp loads it and dies of a token."""
    layout = take_apart(rewritten(tmp_path, as_architecture="xverse", add={"output.weight": (366, 64)}))
    sound = tmp_path / "sound.gguf"
    sound.write_bytes(layout.build())
    attempt(sound)
    for tensor in layout.tensors:
        if tensor.name.endswith(b"ffn_down.weight"):
            tensor.kind, tensor.data = 24, bytes(len(tensor.data) // 4)  # I8
    path = tmp_path / "m.gguf"
    path.write_bytes(layout.build())
    with pytest.raises(BadFileError, match=r"SIGSEGV|SIGABRT"):
        attempt(path)


def test_what_llama_cpp_refuses_is_said_in_its_words(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="unknown tokenizer: 'no such'"):
        attempt(rewritten(tmp_path, keys={"tokenizer.ggml.model": "no such"}))


def write_bert(path: Path) -> Path:
    """An encoder of one layer, which makes vectors of text and nothing else."""
    n, rng = 32, np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "bert")
    for key, value in (("block_count", 1), ("context_length", 64), ("embedding_length", n), ("feed_forward_length", n)):
        writer.add_uint32(f"bert.{key}", value)
    writer.add_uint32("bert.attention.head_count", 2)
    writer.add_float32("bert.attention.layer_norm_epsilon", 1e-5)
    writer.add_bool("bert.attention.causal", False)
    writer.add_token_type_count(2)
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(97, 123))]
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 5 + [1] * 26)

    def tensor(name: str, *shape: int) -> None:
        writer.add_tensor(name, rng.standard_normal(shape).astype(np.float32))

    tensor("token_embd.weight", len(tokens), n)
    tensor("position_embd.weight", 64, n)
    tensor("token_types.weight", 2, n)
    for norm in ("token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"):
        tensor(norm + ".weight", n)
        tensor(norm + ".bias", n)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"):
        tensor(f"blk.0.{name}.weight", n, n)
        tensor(f"blk.0.{name}.bias", n)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_model_that_continues_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="for embeddings"):
        attempt(write_bert(tmp_path / "m.gguf"))


# -- the process ------------------------------------------------------------------------------------------------------

STAGE = 'print(\'{{"stage": "{}"}}\', flush=True); '
DEATHS: dict[str, tuple[str, type[HybridError], str]] = {
    "an illegal instruction": (
        STAGE.format("library") + f"os.kill(os.getpid(), {int(signal.SIGILL)})",
        UnsupportedError,
        "on this processor: it ends with SIGILL",
    ),
    "a crash over the file": (
        STAGE.format("file") + f"sys.stderr.write('loading x\\n'); os.kill(os.getpid(), {int(signal.SIGSEGV)})",
        BadFileError,
        r"m\.gguf cannot be used: .* SIGSEGV \(loading x\)",
    ),
    "too much computing": (
        STAGE.format("file") + f"os.kill(os.getpid(), {int(signal.SIGXCPU)})",
        BadFileError,
        "not done reading its metadata",
    ),
    "an out-of-memory kill": (
        STAGE.format("file") + f"os.kill(os.getpid(), {int(signal.SIGKILL)})",
        BadFileError,
        "was killed",
    ),
    "no memory": (
        'print(\'{"failed": "OutOfMemoryError", "message": ""}\')',
        BadFileError,
        "more than 102[0-9] MiB for its metadata",
    ),
    "no start": ("sys.exit('no module')", EngineError, r"could not run \(exit code 1\): no module"),
    "escapes on the terminal": (
        STAGE.format("file") + "os.write(2, b'\\x1b[2Jgone'); os.abort()",
        BadFileError,
        r"\(\?\[2Jgone\)",
    ),
}


@pytest.mark.parametrize("case", DEATHS)
def test_every_end_of_the_process_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    code, error, message = DEATHS[case]
    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-I", "-c", f"import os, sys; {code}"))
    with pytest.raises(error, match=message):
        attempt(write_model(tmp_path / "m.gguf"))


def test_one_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMMAND", ("sleep", "600"))
    monkeypatch.setattr(module, "WALL_S", 0.01)
    with pytest.raises(BadFileError, match="not done reading"):
        attempt(write_model(tmp_path / "m.gguf"))


def test_an_interruption_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **kwargs))
        return started[-1]

    def interrupt() -> bool:
        raise KeyboardInterrupt

    path = write_model(tmp_path / "m.gguf")
    monkeypatch.setattr(module, "COMMAND", ("sleep", "600"))
    monkeypatch.setattr(subprocess, "Popen", start)
    for cancelled in (lambda: True, interrupt):
        with pytest.raises(Cancelled):
            attempt(path, cancelled=cancelled)
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2


def test_a_description_that_needs_too_much_memory_is_refused(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.model": "no_vocab", "llama.vocab_size": 2**31}
    with pytest.raises(BadFileError, match=r"needs more than 102[0-9] MiB for its metadata"):
        attempt(rewritten(tmp_path, keys=keys))


def test_a_verdict_is_of_a_slice_that_was_opened(tmp_path: Path, own_verdicts: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    with ModelFile(path) as file:
        for k in range(read_spec(file).n_layers + 1):
            preflight(file, k, "here")
    assert len(list(own_verdicts.iterdir())) == 3
