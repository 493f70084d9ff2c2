"""`eval_split.py --architectures`: every architecture that can be split, at every k, on tiny random F32 models.

The models are those of `tests/architectures`, the columns those of `eval_split.py`; on an F32 file P and Q are one.

  head       ||difference|| / ||hidden state|| at the boundary from llama.cpp, both with an F32 KV cache, flash
             attention off (≤ 1e-4, or 2 x `own`: llama.cpp's GELU table rounds, and how depends on the batch)
  own        the same for llama.cpp against itself, token by token against one batch
  tail       largest |difference| of the logits from llama.cpp's when the tail is fed its own hidden state, as a share
             of the largest logit (= 0; where `hybrid inspect` says "to rounding" ≤ 1e-3)
  KL(Q|S)    the split against llama.cpp (≤ 1e-5, or 4 x `own KL`)
  own KL     the same for llama.cpp against itself, token by token against one batch
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from hybrid.head.head import Head
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.model.splits import find_splits
from hybrid.report.accuracy import argmax_agreement, mean_kl, relative_difference
from hybrid.runtime.engine import Engine
from hybrid.schedule.placement import Placement
from hybrid.tail.reference import Reference
from tests.architectures.models import MODELS
from tests.head.heads import some_tokens
from tests.tiny_arch import write_arch

N_TOKENS, N_CTX = 60, 256
HEAD_BOUND, OWN_FACTOR = 1e-4, 2.0
TAIL_ROUNDING = 1e-3
KL_BOUND, KL_OWN_FACTOR = 1e-5, 4.0
PRECISE: dict[str, Any] = {"kv_dtype": "f32", "flash_attn": "off", "swa_full": True}
ARCHITECTURE_COLUMNS = ["model", "k", "head", "own", "tail", "KL(Q|S)", "own KL", "argmax = Q", "bounds"]


def evaluate_architectures(names: Sequence[str], done: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """One row a model and k; `done` gets a model's rows when they are there. An architecture's name stands for all
    models of it; none for all."""
    unknown = [name for name in names if not _named(name)]
    if unknown:
        raise SystemExit(f"There is no tiny model {unknown[0]}; there are {', '.join(MODELS)}.")
    rows: list[dict[str, Any]] = []
    for model in MODELS:
        if not names or any(model in _named(name) for name in names):
            found = _evaluate(model)
            done(found)
            rows += found
    return rows


def _named(name: str) -> list[str]:
    return [model for model, tiny in MODELS.items() if name in (model, tiny.architecture)]


def _evaluate(name: str) -> list[dict[str, Any]]:
    tokens = some_tokens(N_TOKENS).tolist()  # those the models' seeds are chosen for: no expert is a close choice
    with tempfile.TemporaryDirectory() as folder:
        path = write_arch(Path(folder) / "tiny.gguf", MODELS[name])
        with ModelFile(path) as file:
            spec = read_spec(file)
            splits = find_splits(spec)
            precise, _ = _llama_cpp(path, spec.n_layers, tokens, **PRECISE)
            chunked, _ = _llama_cpp(path, spec.n_layers, tokens, chunk=1, **PRECISE)
            hidden, logits = _llama_cpp(path, spec.n_layers, tokens)
            own_kl = mean_kl(logits, _llama_cpp(path, spec.n_layers, tokens, chunk=1)[1])
            rows = []
            for k in splits.allowed[1:]:
                own = relative_difference(chunked[k - 1], precise[k - 1])
                row = {"model": name, "k": k, "own": own, "own KL": own_kl}
                row |= _split(file, spec, k, tokens, precise[k - 1], hidden[k - 1], logits)
                exact = 0.0 if not any("rounding" in note for note in splits.notes) else TAIL_ROUNDING
                met = (
                    row["head"] <= max(HEAD_BOUND, OWN_FACTOR * own)
                    and row.get("tail", 0.0) <= exact
                    and row["KL(Q|S)"] <= max(KL_BOUND, KL_OWN_FACTOR * own_kl)
                )
                rows.append({**row, "bounds": "met" if met else "MISSED"})
    return rows


def _llama_cpp(
    path: Path, n_layers: int, tokens: Sequence[int], chunk: int | None = None, **options: Any
) -> tuple[list[np.ndarray], np.ndarray]:
    """The hidden states after every layer, and the logits."""
    taps = [f"l_out-{i}" for i in range(n_layers)]
    with Reference(path, n_ctx=N_CTX, n_batch=len(tokens), taps=taps, **options) as reference:
        logits = reference.evaluate(tokens, chunk=chunk)
        return [reference.hidden(i) for i in range(n_layers)], logits


def _split(
    file: ModelFile, spec: Any, k: int, tokens: list[int], boundary: np.ndarray, hidden: np.ndarray, logits: np.ndarray
) -> dict[str, Any]:
    n = len(tokens)
    where, seqs = np.arange(n, dtype=np.int32), np.zeros(n, np.int32)
    sizes: dict[str, Any] = {"device": "cpu", "n_gpu_layers": k, "n_ctx": N_CTX, "n_batch": n, "n_ubatch": n}
    with closing(Head(file, spec, Placement(**sizes, kv_dtype="f32"))) as head:
        got = head.forward(np.array(tokens), where, seqs.astype(np.int64)).cpu().numpy()
    row: dict[str, Any] = {"head": relative_difference(got, boundary)}
    with closing(Engine(file, spec, Placement(**sizes))) as engine, engine.scoring():
        split = engine.evaluate(tokens, outputs="all")
        assert split is not None
        row["KL(Q|S)"], row["argmax = Q"] = mean_kl(logits, split), argmax_agreement(logits, split)
        if engine.tail is not None:
            engine.tail.trim(0, 0)
            engine.tail.decode(hidden, where, seqs, np.ones(n, np.bool_))
            difference = np.abs(engine.tail.logits_block() - logits).max()
            row["tail"] = float(difference / np.abs(logits).max())
    return row
