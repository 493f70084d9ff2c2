"""A saved state: what an engine computes from it is what it would have computed, and nothing damaged gets that far."""

from __future__ import annotations

import json
import struct
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid import Hybrid
from hybrid.errors import BadFileError, BadRequestError
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.runtime.engine import Engine
from hybrid.runtime.saved_state import PREFIX, restore_state, save_state, state_bytes
from hybrid.schedule.identity import Identity, identify
from hybrid.schedule.placement import Placement

TOKENS = np.random.default_rng(2).integers(5, 300, 96).tolist()
MODELS = [("llama_f32", 0), ("llama_f32", 2), ("llama_f32", 4), ("gemma3_f32", 0), ("gemma3_f32", 5), ("gemma3_f32", 7)]
STRATEGIES: dict[str, dict[str, Any]] = {
    "device": {},
    "stream": {"kv": "stream", "kv_keep_sliding": False},
    "attend": {"kv": "attend", "kv_keep_sliding": False},
    "tiered": {"kv": "tiered", "kv_budget": 1 << 17, "kv_keep_sliding": False},
    "q8_0": {"kv_dtype": "q8_0"},
}
CASES = [(model, k, kv) for model, k in MODELS for kv in STRATEGIES if k or kv in ("device", "q8_0")]


class Opened:
    """An engine of a model, and what it is the identity of."""

    def __init__(self, path: Path, k: int, **changes: Any) -> None:
        options = {"device": "cpu", "n_ctx": 128, "n_batch": 32, "n_ubatch": 32, **changes}
        self.file = ModelFile(path)
        self.engine = Engine(self.file, read_spec(self.file), Placement(n_gpu_layers=k, **options))
        self.identity = identify(self.file)

    def close(self) -> None:
        self.engine.close()
        self.file.close()


def go_on(engine: Engine) -> np.ndarray:
    """The logits of a step of one token, and of several after it."""
    engine.evaluate(TOKENS[70:71])
    one = engine.last_logits().copy()
    engine.evaluate(TOKENS[71:])
    return np.stack([one, engine.last_logits()])


@pytest.mark.parametrize(("model", "k", "kv"), CASES)
def test_a_restored_state_goes_on_bit_for_bit(
    model: str, k: int, kv: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path, state = request.getfixturevalue(model), tmp_path / "a.state"
    with closing(Opened(path, k, **STRATEGIES[kv])) as first:
        first.engine.evaluate(TOKENS[:70])
        assert save_state(first.engine, state, first.identity) == state.stat().st_size
        expected = go_on(first.engine)
    with closing(Opened(path, k, **STRATEGIES[kv])) as second:
        second.engine.evaluate(TOKENS[30:40])
        assert restore_state(second.engine, state, second.identity) == 70
        assert second.engine.tokens() == tuple(TOKENS[:70])
        np.testing.assert_array_equal(go_on(second.engine), expected)


def test_the_size_of_a_state_is_known_before_it_is_made(llama_f32: Path, tmp_path: Path) -> None:
    with closing(Opened(llama_f32, 2)) as opened:
        opened.engine.evaluate(TOKENS)
        size = save_state(opened.engine, tmp_path / "a.state", opened.identity)
        assert 0.9 * size < state_bytes(opened.engine, len(TOKENS)) <= size


def test_a_state_of_another_model_placement_or_version_is_named_and_left_alone(
    llama_f32: Path, gemma3_f32: Path, tmp_path: Path
) -> None:
    state = tmp_path / "a.state"
    with closing(Opened(llama_f32, 2)) as opened:
        engine, here = opened.engine, opened.identity
        engine.evaluate(TOKENS[:20])
        save_state(engine, state, here)
        others = [
            (replace(here, model="another"), "another model"),
            (replace(here, versions={**here.versions, "llama_cpp": "9"}), "another version of llama_cpp"),
        ]
        for identity, words in others:
            with pytest.raises(BadRequestError, match=words):
                restore_state(engine, state, identity)
        assert engine.tokens() == tuple(TOKENS[:20])
        restore_state(engine, state, replace(here, machine="another"))  # KV is KV everywhere
    with (
        closing(Opened(llama_f32, 3, n_ctx=64)) as opened,
        pytest.raises(BadRequestError, match="n_gpu_layers 2, now 3"),
    ):
        restore_state(opened.engine, state, opened.identity)
    with closing(Opened(llama_f32, 2, n_threads_tail=2, n_threads_head=2)) as opened:  # threads do not matter
        assert restore_state(opened.engine, state, opened.identity) == 20


def test_no_damaged_byte_reaches_llama_cpp(llama_f32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, bad = tmp_path / "a.state", tmp_path / "bad.state"
    with closing(Opened(llama_f32, 2)) as opened:
        engine, identity = opened.engine, opened.identity
        with pytest.raises(BadRequestError, match="nothing to save"):
            save_state(engine, state, identity)
        engine.evaluate(TOKENS[:20])
        save_state(engine, state, identity)
        whole = state.read_bytes()

        def loaded(*args: Any) -> None:
            raise AssertionError("damaged bytes were loaded")

        monkeypatch.setattr(engine, "load", loaded)
        for at in (0, 9, 13, 17, PREFIX.size + 3, len(whole) // 2, len(whole) - 1):
            bad.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
            with pytest.raises((BadFileError, BadRequestError)):
                restore_state(engine, bad, identity)
        for data in (b"", whole[:30], whole[:-1], whole + b"x", b"\0" * 4096):
            bad.write_bytes(data)
            with pytest.raises(BadFileError):
                restore_state(engine, bad, identity)
        for change in ({"tokens": "x"}, {"head_bytes": -1}, {"head_bytes": "1"}, {"tail_bytes": 1 << 62}):
            bad.write_bytes(_resigned(whole, change))
            with pytest.raises(BadFileError):
                restore_state(engine, bad, identity)
        with pytest.raises(FileNotFoundError):
            restore_state(engine, tmp_path / "none", identity)


def _resigned(whole: bytes, change: dict[str, Any]) -> bytes:
    """With another header and a checksum that is right."""
    import hashlib

    magic, version, header_bytes, _ = PREFIX.unpack_from(whole)
    end = PREFIX.size + header_bytes
    header = json.dumps({**json.loads(whole[PREFIX.size : end]), **change}).encode()
    rest = header + whole[end:]
    return struct.pack("<8sII32s", magic, version, len(header), hashlib.sha256(rest).digest()) + rest


@pytest.mark.parametrize("k", [0, 2])
def test_a_model_continues_in_another_process_as_it_would_have(k: int, llama_f32: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"n_gpu_layers": k, "device": "cpu", "n_ctx": 128, "n_threads": 1}
    ask: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with Hybrid(llama_f32, **options) as model:
        first = model.generate(TOKENS[:40], **ask)
        model.save_state(tmp_path / "a.state")
        prompt = [*TOKENS[:40], *first.tokens, *TOKENS[40:44]]
        expected = model.generate(prompt, **ask)
    with Hybrid(llama_f32, **options) as model:
        assert model.restore_state(tmp_path / "a.state") == 47
        again = model.generate(prompt, **ask)
    assert (again.tokens, again.n_cached_tokens) == (expected.tokens, expected.n_cached_tokens)
    assert again.n_cached_tokens >= 47


def test_an_identity_is_of_the_model_and_not_of_its_path(llama_f32: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(llama_f32.read_bytes())
    identities: list[Identity] = []
    for path in (llama_f32, copy):
        with ModelFile(path) as file:
            identities.append(identify(file))
    assert identities[0] == identities[1]
