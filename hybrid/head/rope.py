"""Rotary position embedding as ggml computes it (`ggml_rope_ext`, `ggml/src/ggml-cpu/ops.cpp`).

Angles are made on the host for the tokens of one batch (n_tokens * n_dims / 2 numbers, whatever the context length),
by the same chain of float32 products that ggml uses: at a position in the thousands one rounding of a frequency shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.model.spec import RopeSpec

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Rotation:
    """What the queries and keys of a batch are turned by, on the device."""

    spec: RopeSpec
    cos: Tensor
    """[n_tokens, 1, n_dims / 2] float32, as `sin`."""
    sin: Tensor
    query_scale: Tensor | None
    """[n_tokens, 1, 1] float32; None: queries are not scaled."""

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k [n_tokens, heads, head_dim], turned."""
        q, k = rotate(q, self.cos, self.sin, self.spec), rotate(k, self.cos, self.sin, self.spec)
        return (q if self.query_scale is None else q * self.query_scale), k

    @property
    def parts(self) -> Sequence[Tensor]:
        """All tensors."""
        return (self.cos, self.sin) if self.query_scale is None else (self.cos, self.sin, self.query_scale)

    def map(self, change: Callable[[Tensor], Tensor]) -> Rotation:
        """Another one, of changed tensors."""
        scale = None if self.query_scale is None else change(self.query_scale)
        return Rotation(self.spec, change(self.cos), change(self.sin), scale)

    def of(self, rows: slice) -> Rotation:
        """Of these tokens."""
        return self.map(lambda part: part[rows])


class Rope:
    """Cosines and sines of one RopeSpec. `factors` [n_dims / 2] divide the frequencies."""

    def __init__(self, spec: RopeSpec, factors: Floats | None = None) -> None:
        self.spec = spec
        f32 = np.float32
        half = spec.n_dims // 2
        # powf, correctly rounded: double precision, then one rounding
        self._theta_scale = f32(float(f32(spec.freq_base)) ** float(f32(-2.0) / f32(spec.n_dims)))
        self._factors = np.ones(half, f32) if factors is None else factors[:half].astype(f32)
        self._scale = f32(spec.freq_scale)
        self._magnitude = f32(spec.attn_factor)
        self._mix: Floats | None = None  # share of the unscaled angle, per frequency
        if spec.ext_factor != 0.0:
            low, high = correction_dims(spec)
            ramp = (np.arange(half, dtype=f32) - f32(low)) / f32(max(0.001, high - low))
            self._mix = (f32(1) - np.clip(ramp, f32(0), f32(1))) * f32(spec.ext_factor)
            self._magnitude *= f32(1.0 + 0.1 * math.log(1.0 / spec.freq_scale))

    def angles(self, positions: npt.NDArray[np.int64]) -> Floats:
        """Rotation angles [n_tokens, n_dims / 2] in radians."""
        chain = np.full((len(positions), self.spec.n_dims // 2), self._theta_scale, np.float32)
        chain[:, 0] = positions
        theta = np.multiply.accumulate(chain, axis=1).astype(np.float32, copy=False) / self._factors
        scaled: Floats = theta * self._scale
        if self._mix is not None:
            scaled = scaled * (np.float32(1) - self._mix) + theta * self._mix
        return scaled

    def rotation(self, positions: npt.NDArray[np.int64], device: torch.device) -> Rotation:
        """Of tokens at these positions."""
        return Rotation(self.spec, *self.cos_sin(positions, device), self.query_scale(positions, device))

    def query_scale(self, positions: npt.NDArray[np.int64], device: torch.device) -> Tensor | None:
        """What queries are multiplied by, [n_tokens, 1, 1] float32 on `device`; None where the spec scales none
        (`llm_graph_input_attn_temp`)."""
        if not self.spec.query_scale:
            return None
        scale = np.log(positions // self.spec.n_ctx_orig + 1.0) * self.spec.query_scale + 1.0
        return torch.from_numpy(scale.astype(np.float32)).view(-1, 1, 1).to(device)

    def cos_sin(self, positions: npt.NDArray[np.int64], device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines [n_tokens, 1, n_dims / 2] float32 on `device`, YaRN's magnitude included."""
        theta = self.angles(positions)
        both = np.stack([np.cos(theta), np.sin(theta)]) * self._magnitude
        cos, sin = torch.from_numpy(both).to(device).unsqueeze(2)
        return cos, sin


def correction_dims(spec: RopeSpec) -> tuple[float, float]:
    """Where YaRN's ramp starts and ends, in frequencies (`ggml_rope_yarn_corr_dims`)."""

    def dim(n_rotations: float) -> float:
        return spec.n_dims * math.log(spec.n_ctx_orig / (n_rotations * 2 * math.pi)) / (2 * math.log(spec.freq_base))

    low, high = math.floor(dim(spec.beta_fast)), math.ceil(dim(spec.beta_slow))
    return max(0.0, float(low)), min(spec.n_dims - 1.0, float(high))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, spec: RopeSpec) -> Tensor:
    """Rotate x [n_tokens, n_heads, head_dim] by cos, sin [n_tokens, 1, n_dims / 2]; dimensions past n_dims stay."""
    turned, rest = x[..., : spec.n_dims], x[..., spec.n_dims :]
    if spec.style == "norm":
        a, b = turned[..., 0::2], turned[..., 1::2]
        out = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        out = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
    return out if rest.shape[-1] == 0 else torch.cat([out, rest], dim=-1)
