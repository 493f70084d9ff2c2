"""`make soak`, some of its chats: answers stay what they were, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid import Hybrid
from scripts.soak import GROWTH_BYTES, Soak, soak

N_CHATS = 70
REDUCED_GROWTH_BYTES = 4 * GROWTH_BYTES
"""So few chats do not tell a leak from an allocator that still settles; ten thousand do (`make soak`)."""


@pytest.mark.parametrize("k", [0, 2, 4])
def test_chats_leave_nothing_behind_and_repeat_themselves(llama_f32: Path, k: int) -> None:
    with Hybrid(llama_f32, n_gpu_layers=k, device="cpu", n_ctx=256, n_batch=64, n_threads=1) as model:
        result = soak(model, N_CHATS)
    assert not result.differing
    assert result.threads[0] == result.threads[1]
    assert result.files[0] == result.files[1]
    assert result.rss_bytes[1] - result.rss_bytes[0] < REDUCED_GROWTH_BYTES
    assert set(result.chats) == {"whole", "cancelled", "dropped", "rolled back", "refused"}


def test_what_grows_or_differs_is_a_problem() -> None:
    assert not Soak(rss_bytes=(1, GROWTH_BYTES), threads=(3, 3), files=(9, 8)).problems
    bad = Soak(differing=["x"], rss_bytes=(0, GROWTH_BYTES + 1), threads=(3, 4), files=(3, 4))
    assert [problem.split()[0] for problem in bad.problems] == ["another", "memory", "threads", "open"]
