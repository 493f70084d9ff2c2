"""A file that holds something else than a model, or half a vocabulary, is told so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid import Hybrid
from hybrid.errors import BadFileError
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from tests.doctored import rewritten
from tests.fuzz.layout import n_bytes, take_apart
from tests.tiny import vocabulary, write_tiny

TOKENS, SCORES, TYPES = vocabulary()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general.type": "mmproj"}, "projector"),
        ({"general.type": "adapter"}, "LoRA"),
        ({"general.type": "imatrix"}, "importance matrix"),
        ({"tokenizer.ggml.tokens": [1, 2, 3]}, "not an array of strings"),
        ({"tokenizer.ggml.tokens": "abc"}, "not an array of strings"),
        ({"tokenizer.ggml.tokens": TOKENS[:-1]}, r"token_embd\.weight in shape \[366, 64\].*demand \[365, 64\]"),
        (
            {
                "tokenizer.ggml.tokens": [*TOKENS, "one more"],
                "tokenizer.ggml.scores": [*SCORES, 0.0],
                "tokenizer.ggml.token_type": [*TYPES, 1],
            },
            r"token_embd\.weight in shape \[366, 64\].*demand \[367, 64\]",
        ),
        ({"tokenizer.ggml.scores": [0.0] * 7}, "scores has 7 items for 366 tokens"),
        ({"tokenizer.ggml.scores": ["a"] * len(TOKENS)}, "numbers of the right type"),
        ({"tokenizer.ggml.token_type": [1] * 7}, "token_type has 7 items for 366 tokens"),
        ({"tokenizer.ggml.token_type": 1}, "numbers of the right type"),
    ],
)
def test_what_is_no_whole_model_is_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with ModelFile(rewritten(tmp_path, keys=keys)) as file, pytest.raises(BadFileError, match=message):
        read_spec(file)


@pytest.mark.parametrize("kind", [9, 15, 24, 25, 26, 27, 28])
@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.ffn_down.weight"])
def test_weights_of_a_type_without_products_are_refused(tmp_path: Path, name: str, kind: int) -> None:
    """llama.cpp loads them, and dies at the first token."""
    with ModelFile(retyped(tmp_path, name, kind)) as file, pytest.raises(BadFileError, match="cannot compute"):
        read_spec(file)


@pytest.mark.parametrize("kind", [1, 30, 8])
@pytest.mark.parametrize("name", ["output_norm.weight", "blk.0.attn_norm.weight"])
def test_norms_must_be_f32(tmp_path: Path, name: str, kind: int) -> None:
    with ModelFile(retyped(tmp_path, name, kind)) as file, pytest.raises(BadFileError, match="cannot compute"):
        read_spec(file)


def retyped(tmp_path: Path, name: str, kind: int) -> Path:
    """A tiny model with a tensor of another type."""
    layout = take_apart(write_tiny(tmp_path / "m.gguf", n_layers=2, n_embd=256, n_heads=2, n_kv_heads=1, n_ff=256))
    tensor = next(tensor for tensor in layout.tensors if tensor.name == name.encode())
    tensor.kind, tensor.data = kind, bytes(n_bytes(tensor.ne, kind) or 0)
    (tmp_path / "m.gguf").write_bytes(layout.build())
    return tmp_path / "m.gguf"


@pytest.mark.parametrize("architecture", ["clip", "controlvector"])
def test_an_architecture_that_is_no_model_is_refused(tmp_path: Path, architecture: str) -> None:
    path = rewritten(tmp_path, as_architecture=architecture)
    with ModelFile(path) as file, pytest.raises(BadFileError, match=r"no model|and is none"):
        read_spec(file)


def test_a_vocabulary_without_an_end_of_text_runs_to_the_limit(tmp_path: Path) -> None:
    path = rewritten(tmp_path, without=("tokenizer.ggml.eos_token_id",))
    with Hybrid(path, n_gpu_layers=0, n_ctx=32) as model:
        assert model.generate("a", max_tokens=3, ignore_eos=True).finish_reason == "length"
        assert model.chat([{"role": "user", "content": "a"}], max_tokens=2) is not None
