"""RoPE against the textbook formula in double precision; against llama.cpp in test_boundary.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hybrid.head.rope import Rope, correction_dims, rotate
from hybrid.model.spec import RopeSpec

CPU = torch.device("cpu")


def textbook(x: np.ndarray, position: int, spec: RopeSpec, factors: np.ndarray | None = None) -> np.ndarray:
    """One head at one position, pair by pair."""
    out = x.astype(np.float64).copy()
    half = spec.n_dims // 2
    for i in range(half):
        theta = position * spec.freq_base ** (-2 * i / spec.n_dims) / (1 if factors is None else factors[i])
        magnitude = spec.attn_factor
        angle = theta * spec.freq_scale
        if spec.ext_factor:
            low, high = correction_dims(spec)
            mix = spec.ext_factor * (1 - min(1, max(0, (i - low) / max(0.001, high - low))))
            angle = angle * (1 - mix) + theta * mix
            magnitude *= 1 + 0.1 * math.log(1 / spec.freq_scale)
        a, b = (2 * i, 2 * i + 1) if spec.style == "norm" else (i, i + half)
        c, s = math.cos(angle) * magnitude, math.sin(angle) * magnitude
        out[a], out[b] = x[a] * c - x[b] * s, x[a] * s + x[b] * c
    return out


@pytest.mark.parametrize("style", ["norm", "neox"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"freq_scale": 0.25},
        {"freq_scale": 0.25, "ext_factor": 1.0, "attn_factor": 0.9, "n_ctx_orig": 128},
        {"n_dims": 32},
    ],
    ids=["plain", "linear", "yarn", "partial"],
)
@pytest.mark.parametrize("with_factors", [False, True])
def test_rotation_is_the_textbook_s(style: str, more: dict, with_factors: bool) -> None:
    spec = RopeSpec(**{"style": style, "n_dims": 64, "freq_base": 10000.0, "freq_scale": 1.0, **more})
    factors = np.linspace(1, 8, spec.n_dims // 2, dtype=np.float32) if with_factors else None
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 3, 64)).astype(np.float32)
    positions = np.array([0, 7, 3, 100])
    cos, sin = Rope(spec, factors).cos_sin(positions, CPU)
    got = rotate(torch.from_numpy(x), cos, sin, spec).numpy()
    want = np.array([[textbook(x[i, h], p, spec, factors) for h in range(3)] for i, p in enumerate(positions)])
    assert np.abs(got - want).max() < 2e-5


def test_position_0_leaves_everything_as_it_is() -> None:
    spec = RopeSpec("neox", 64, 10000.0, 1.0)
    x = torch.randn(1, 2, 64)
    assert torch.equal(rotate(x, *Rope(spec).cos_sin(np.array([0]), CPU), spec), x)


def test_angles_are_ggml_s_chain_of_float32_products() -> None:
    """theta *= theta_scale, one rounding at a time: at large positions a closed form differs by more than 1e-4."""
    spec = RopeSpec("norm", 64, 500000.0, 1.0)
    scale = np.float32(math.pow(500000.0, np.float32(-2 / 64)))
    theta, chain = np.float32(8191), []
    for _ in range(32):
        chain.append(theta)
        theta = np.float32(theta * scale)
    assert np.array_equal(Rope(spec).angles(np.array([8191]))[0], np.array(chain))


def test_yarn_correction_dims_are_llama_cpp_s_for_a_known_model() -> None:
    """128 dimensions, base 10000, 4096 trained tokens: 20 and 46, as YaRN's authors give them."""
    spec = RopeSpec("neox", 128, 10000.0, 0.25, ext_factor=1.0, n_ctx_orig=4096)
    assert correction_dims(spec) == (20.0, 46.0)
