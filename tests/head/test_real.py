"""The head on real models, through an F32 copy of their weights, against llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid.model.architectures import read_spec
from hybrid.model.catalog import catalog
from hybrid.model.file import ModelFile
from hybrid.schedule.kv_size import kv_bytes_per_token
from hybrid.tail.copy import write_f32_copy
from hybrid.tail.reference import Reference
from tests.head.heads import mean_kl, relative, run
from tests.head.test_boundary import FAIR

pytestmark = pytest.mark.real
TEXT = "The quick brown fox jumps over the lazy dog. In the beginning the universe was created. " * 4


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma3-270m"])
def f32_copy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    entry = catalog()[request.param]
    if not entry.pulled:
        pytest.skip(f"{entry.name} is not pulled: hybrid models pull {entry.name}")
    path = tmp_path_factory.mktemp("f32") / "copy.gguf"
    with ModelFile(entry.path) as file:
        yield write_f32_copy(file, path)
    path.unlink()


def test_boundary_and_logits_are_llama_cpp_s(f32_copy: Path, heads: Any) -> None:
    """See test_boundary.py for what "llama.cpp's" can mean where the activation is its float16 GELU."""
    with ModelFile(f32_copy) as file:
        spec = read_spec(file)
    n_layers = spec.n_layers
    ks = sorted({1, n_layers // 2, n_layers - 1, n_layers})
    taps = [f"l_out-{k - 1}" for k in ks]
    with Reference(f32_copy, taps=taps, **FAIR) as reference:
        tokens = np.asarray(reference.vocabulary.tokenize(TEXT))
        logits = reference.evaluate(tokens)
        hidden = {k: reference.hidden(k - 1) for k in ks}
    own = dict.fromkeys(ks, 0.0)
    if spec.layers[0].ffn.activation == "gelu":
        with Reference(f32_copy, taps=taps, **FAIR) as reference:
            reference.evaluate(tokens, chunk=1)
            own = {k: relative(reference.hidden(k - 1), hidden[k]) for k in ks}
    for k in ks:
        head = heads(f32_copy, k)
        got = run(head, tokens)
        assert relative(got, hidden[k]) < max(1e-4, 1.5 * own[k]), k
        if k == n_layers:
            head.cache.trim(0, 0)
            out = head.logits(head.forward(tokens, np.arange(len(tokens)), np.full(len(tokens), 0))).numpy()
            assert mean_kl(out, logits) < 1e-5
        head.close()


def test_the_kv_strategy_does_not_show_at_the_boundary(real_model: Path, heads: Any) -> None:
    """Quantised files, as they are used: a prompt in chunks, then single tokens.

    A q8_0 cache rounds to eight bits, and whichever way a value on the edge goes, the layers after it magnify: there
    the measure is the most that other chunks do to `device` itself.
    """
    tokens = np.random.default_rng(0).integers(100, 10_000, 200)
    chunks = [128, 67, *[1] * 5]
    with ModelFile(real_model) as file:
        spec = read_spec(file)
    k = spec.n_layers // 3
    for kv_dtype in ("f16", "q8_0"):
        placed = {"n_ctx": 256, "n_batch": 128, "kv_dtype": kv_dtype}
        token = sum(kv_bytes_per_token(layer, kv_dtype) for layer in spec.layers[:k])  # type: ignore[arg-type]
        device = heads(real_model, k, **placed)
        wanted = run(device, tokens, chunks)
        bound = 1e-3
        if kv_dtype == "q8_0":
            for other in ([20, 128, 47], [100, 95], [128, 60, 7]):
                device.cache.trim(0, 0)
                bound = max(bound, 3 * relative(run(device, tokens, [*other, *[1] * 5]), wanted))
        device.close()
        for kv, more in (("stream", {}), ("attend", {}), ("tiered", {"kv_budget": 130 * token})):
            head = heads(real_model, k, kv=kv, kv_keep_sliding=False, **placed, **more)
            assert relative(run(head, tokens, chunks), wanted) < bound, (kv, kv_dtype)
            assert head.cache.host_nbytes > 0
            head.close()
