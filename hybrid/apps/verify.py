"""Whether a split gives what llama.cpp alone gives, on a few tokens of the user's own model.

llama.cpp's products round activations, so that it does not agree with itself to the bit when it is given the same
tokens in other batches, or computes attention the other way it knows. How far it is then from itself is the yardstick.
Where a tail is involved, it is also given llama.cpp's own hidden state, and must then give llama.cpp's logits bit for
bit: mistakes show there first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hybrid.errors import OutOfMemoryError, UnsupportedError
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.model.spec import ModelSpec
from hybrid.model.splits import find_splits
from hybrid.report.accuracy import argmax_agreement, mean_kl, relative_difference
from hybrid.schedule.budget import mib, ram_budget
from hybrid.schedule.ledger import ledger_of
from hybrid.schedule.placement import Placement
from hybrid.schedule.scheduler import Request, plan

Rows = npt.NDArray[np.float32]

TEXT = (
    'The lighthouse keeper counted 17 ships before noon. "Strange," she wrote, "they all sail north, and none of them '
    'answers." def tide(h): return 2.4 * h - 1\n'
)
"""What is evaluated: prose, figures, quotes and a line of code."""
N_TOKENS = 48
N_CTX = 256
CHUNKS = (16, 1)
"""The other batches llama.cpp is given for comparison with itself. Without flash attention is the third such run."""
KL_FACTOR, KL_FLOOR = 4.0, 1e-3
"""A split agrees up to KL_FACTOR times what llama.cpp's own batches do, or KL_FLOOR: half precision on a GPU, and
llama.cpp's rounding of activations, which our half does not repeat, are of that order. Real mistakes are 0.1 and more.
"""
TAIL_ROUNDING = 0.2
"""llama.cpp's rounding of activations blows a last bit up to a few per cent of the largest logit."""


@dataclass(frozen=True)
class Verdict:
    """What was found at one k. KL is the mean over tokens of KL(llama.cpp || other), in nats."""

    n_gpu_layers: int
    n_tokens: int
    device: str
    kl: float
    """Of the split."""
    same_token: float
    """Share of tokens after which the split and llama.cpp expect the same token."""
    own_kl: float
    """Of llama.cpp computing otherwise, the largest."""
    own_same_token: float
    hidden_difference: float | None
    """Relative difference of the hidden state at the boundary; None at k = L."""
    tail_difference: float | None
    """Largest difference of the tail's logits, given llama.cpp's hidden state, as a share of the largest logit; 0 is
    bit for bit the same. None at k = L."""
    tail_exact_expected: bool
    """Whether it must be 0: false where `hybrid inspect` says that a split agrees to rounding only."""

    @property
    def tail_agrees(self) -> bool:
        """Whether the tail does what it must."""
        if self.tail_difference is None:
            return True
        return self.tail_difference == 0 if self.tail_exact_expected else self.tail_difference < TAIL_ROUNDING

    @property
    def agrees(self) -> bool:
        """Whether the split is as good as llama.cpp."""
        return self.tail_agrees and self.kl <= max(KL_FLOOR, KL_FACTOR * self.own_kl)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready values."""
        return {**asdict(self), "tail_agrees": self.tail_agrees, "agrees": self.agrees}


def verify(
    model: Path,
    n_gpu_layers: int | str | None = None,
    *,
    device: str | None = None,
    n_threads: int | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Verdict:
    """Run llama.cpp alone and then the split at `n_gpu_layers` (None: the middle of those allowed) on the same tokens.

    They are loaded one after the other. Raises OutOfMemoryError where either does not fit, UnsupportedError for a model
    or a k that cannot be split.
    """
    from hybrid.runtime.engine import Engine
    from hybrid.schedule.identity import identify
    from hybrid.tail.preflight import preflight
    from hybrid.tail.reference import Reference

    with ModelFile(model) as file:
        spec = read_spec(file)
        k = _middle(spec, model) if n_gpu_layers is None else n_gpu_layers
        sizes: dict[str, Any] = {"n_ctx": N_CTX, "n_batch": N_TOKENS, "n_ubatch": N_TOKENS, "n_threads": n_threads}
        placement = plan(spec, Request(n_gpu_layers=k, device=device or _default_device(), **sizes)).placement
        alone = plan(spec, Request(n_gpu_layers=0, **sizes)).placement
        k = placement.n_gpu_layers
        if k == 0:
            raise UnsupportedError("With n_gpu_layers = 0 llama.cpp runs alone: there is nothing to compare it with.")
        need, there = ledger_of(spec, alone).ram_bytes, ram_budget()
        if need > there:  # the mapped file included: read from the disk for every token it would take hours
            raise OutOfMemoryError(
                f"llama.cpp alone needs {mib(need)} of RAM for this model and {mib(there)} are free; it was not run."
            )
        machine = identify(file).machine
        for tried in (0, k):
            preflight(file, tried, machine)
        has_tail = k < spec.n_layers
        taps = [f"l_out-{k - 1}"] if has_tail else []
        with Reference(
            file.path, n_ctx=N_CTX, n_batch=N_TOKENS, n_threads=alone.n_threads_tail_batch, taps=taps
        ) as reference:
            tokens = _tokens(reference.vocabulary.tokenize(TEXT))
            want = reference.evaluate(tokens)
            hidden = reference.hidden(k - 1) if has_tail else None
            others = [_again(reference, tokens, chunk) for chunk in CHUNKS]
            others.append(_without_flash_attention(reference, alone, tokens))
        own = [(mean_kl(want, other), argmax_agreement(want, other)) for other in others]
        with closing(Engine(file, spec, placement, progress=progress)) as engine, engine.scoring():
            got = engine.evaluate(tokens, outputs="all")
            assert got is not None
            hidden_difference = tail_difference = None
            if hidden is not None:
                hidden_difference = relative_difference(_head_hidden(engine, tokens), hidden)
                tail_difference = float(abs(_tail_logits(engine, hidden) - want).max() / abs(want).max())
    return Verdict(
        n_gpu_layers=k,
        n_tokens=len(tokens),
        device=placement.device,
        kl=mean_kl(want, got),
        same_token=argmax_agreement(want, got),
        own_kl=max(kl for kl, _ in own),
        own_same_token=min(same for _, same in own),
        hidden_difference=hidden_difference,
        tail_difference=tail_difference,
        tail_exact_expected=not any("rounding" in note for note in find_splits(spec).notes),
    )


def _middle(spec: ModelSpec, model: Path) -> int:
    splits = find_splits(spec)
    between = [k for k in splits.allowed if k > 0]
    if not between:
        raise UnsupportedError(f"{model.name} cannot be split: {splits.refusal(1)}.")
    return min(between, key=lambda k: abs(k - spec.n_layers // 2))


def _default_device() -> str:
    """A GPU if there is one; else the head is emulated on the CPU, which is right, only slow."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _tokens(ids: Sequence[int]) -> list[int]:
    """N_TOKENS of them, the text as often as it takes."""
    return (list(ids) * -(-N_TOKENS // len(ids)))[:N_TOKENS]


def _again(reference: Any, tokens: list[int], chunk: int) -> Rows:
    reference.trim(0, 0)
    rows: Rows = reference.evaluate(tokens, chunk=chunk)
    return rows


def _without_flash_attention(reference: Any, placement: Placement, tokens: list[int]) -> Rows:
    """The same model, loaded once, in a second context."""
    from hybrid.tail.context import Context, context_params

    params = context_params(placement, len(tokens))
    params.flash_attn_type = 0
    with closing(Context(reference.model, params)) as context:
        n = len(tokens)
        where, seqs = np.arange(n, dtype=np.int32), np.zeros(n, np.int32)
        context.decode(np.array(tokens, np.int32), where, seqs, np.ones(n, np.bool_))
        rows: Rows = context.logits_block().copy()
    return rows


def _head_hidden(engine: Any, tokens: list[int]) -> Rows:
    engine.trim(0)
    n = len(tokens)
    rows: Rows = engine.head.forward(np.array(tokens), np.arange(n), np.zeros(n, np.int64)).cpu().numpy()
    engine.head.cache.trim(0, 0)
    return rows


def _tail_logits(engine: Any, hidden: Rows) -> Rows:
    n = len(hidden)
    engine.tail.trim(0, 0)
    engine.tail.decode(hidden, np.arange(n), np.zeros(n, np.int64), np.ones(n, np.bool_))
    rows: Rows = engine.tail.logits_block().copy()
    return rows
