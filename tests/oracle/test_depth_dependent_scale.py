"""llama.cpp takes Gemma 3 27B's attention scale from its 62 layers; a slice, or a slice of 62 layers, must not notice.

Folding the scale into attn_q_norm rounds once. Deep random models amplify any rounding (llama.cpp's GELU goes through a
half-precision table), so the yardstick is what one last bit in the hidden state does to the same tail.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.oracle.compare import open_tail, oracle, run_tail, some_tokens
from tests.tiny import write_tiny

SMALL = {"n_embd": 128, "n_heads": 2, "n_kv_heads": 1, "head_dim": 96, "n_ff": 128, "window": 16}
N = 60


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.square(values, dtype=np.float64).mean()))


@pytest.mark.parametrize(("n_layers", "splits"), [(62, (1, 30, 56, 61)), (64, (2,))])
def test_a_folded_scale_is_one_rounding(n_layers: int, splits: tuple[int, ...], tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "gemma3", n_layers=n_layers, **SMALL)
    want = oracle(path, some_tokens(N), [N])
    largest = abs(want.logits).max()
    for k in splits:
        hidden = want.hidden[k - 1]
        with open_tail(path, k) as tail:
            got = run_tail(tail, hidden, [N])
            tail.trim(0, 0)
            rounded = run_tail(tail, np.nextafter(hidden, np.float32(np.inf)), [N])
        assert rms(got - want.logits) <= 1e-3 * largest, k
        assert rms(got - want.logits) <= 1.5 * rms(got - rounded) + 1e-6 * largest, k


def test_other_depths_are_exact_to_the_bit(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "gemma3", n_layers=64, **SMALL)
    want = oracle(path, some_tokens(N), [N])
    for k in (1, 3, 63):
        with open_tail(path, k) as tail:
            assert np.array_equal(run_tail(tail, want.hidden[k - 1], [N]), want.logits), k
