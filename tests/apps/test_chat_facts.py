"""The line after an answer fits the terminal, and nothing of it is lost."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import pytest

from hybrid.apps.chat.facts import SEPARATOR, stats, status
from hybrid.runtime.completion import Completion, Memory, Timings
from tests.cli.fake import FakeModel

DONE = Completion(
    "text",
    tokens=list(range(153)),
    n_prompt_tokens=3_572,
    n_cached_tokens=2_260,
    finish_reason="interrupted",
    placement=FakeModel().placement,
    timings=Timings(load_s=1.0, ttft_s=12.3, prefill_tok_per_s=100.0, decode_tok_per_s=41.23),
    memory=Memory(device_bytes=2**30, host_bytes=2**31),
)


def model(n_gpu_layers: int = 2) -> FakeModel:
    one = FakeModel(n_ctx=131_072)
    one.placement = replace(one.placement, n_gpu_layers=n_gpu_layers)
    one.n_used = 3_725
    return one


def test_the_line_is_as_long_as_the_terminal_allows_and_never_longer() -> None:
    whole = status(model(), DONE)  # type: ignore[arg-type]
    assert whole == (
        "stopped · 153 tokens · read 1,312, reused 2,260 · first 12.3 s · 41.2 tok/s · context 3,725/131,072 · "
        "layers 2/4 · VRAM 1,024 MiB (emulated) · RAM 2,048 MiB"
    )
    shown = [status(model(), DONE, width) for width in range(45, len(whole) + 2)]  # type: ignore[arg-type]
    assert shown[-1] == whole
    for width, line in enumerate(shown, 45):
        assert len(line) < width
        parts = iter(whole.split(SEPARATOR))
        assert all(part in parts for part in line.split(SEPARATOR))  # in order, none of them cut
        assert "stopped" in line
        assert "context 3,725/131,072" in line
    assert "context" in status(model(), DONE, 2)  # type: ignore[arg-type]


def test_at_80_columns_only_what_stays_the_same_is_left_out() -> None:
    done, one = copy(DONE), model()
    done.finish_reason, done.tokens, done.n_prompt_tokens, done.n_cached_tokens = "stop", [0] * 53, 72, 60
    one.n_ctx, one.n_used = 4096, 125
    line = status(one, done, 80)  # type: ignore[arg-type]
    assert line == "53 tokens · read 12, reused 60 · first 12.3 s · 41.2 tok/s · context 125/4,096"


def test_an_answer_that_its_limit_cut_off_is_called_that() -> None:
    done = copy(DONE)
    done.finish_reason = "length"
    assert status(model(), done, 80).startswith("cut off · ")  # type: ignore[arg-type]
    assert "153 tokens, cut off, the first after" in stats(model(), done)  # type: ignore[arg-type]
    done.finish_reason = "stop"
    assert status(model(), done, 80).startswith("153 tokens")  # type: ignore[arg-type]


@pytest.mark.parametrize("n_gpu_layers", [0, 2, 4])
def test_stats_has_what_the_line_may_leave_out(n_gpu_layers: int) -> None:
    text = stats(model(n_gpu_layers), DONE)  # type: ignore[arg-type]
    for words in (
        "153 tokens, stopped, the first after 12.3 s, 41.2",
        "3,572 tokens, 2,260 of them reused",
        "3,725 of",
    ):
        assert words in text
    assert "2,048 MiB on the host" in text
    where = {0: "all layers on the CPU", 2: "2 layers on cpu, the other 2 in llama.cpp", 4: "4 layers on cpu\n"}
    assert where[n_gpu_layers] in text
    assert ("(emulated)" in text) == (n_gpu_layers > 0)
    assert ("KV cache device f16" in text) == (n_gpu_layers > 0), "without layers there the device has no cache"
