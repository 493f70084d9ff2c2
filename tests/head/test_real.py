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
