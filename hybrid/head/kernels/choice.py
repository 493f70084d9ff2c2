"""Which kernels run on a device, and what happens where one does not: torch computes in its place, and a note says so.

Nothing here imports Triton before a kernel is wanted.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from hybrid.errors import HybridError
from hybrid.head.activation import Nonlinearity
from hybrid.head.kernels.formats import FEW_TOKENS, FORMATS, Planes, Stack, fits
from hybrid.head.rope import Rotation
from hybrid.model.spec import LayerSpec

TENSOR_CORES = (8, 0)
"""Of the oldest whose tensor cores Triton uses."""
T = TypeVar("T")
TILES = "dequantisation"
OLDEST = (7, 5)
"""Compute capability of the oldest NVIDIA GPU that Triton compiles for (Turing)."""


def supported(device: torch.device, kind: int | None = None) -> bool:
    """Whether kernels run on `device`, and multiply by weights of GGUF type `kind`: NVIDIA from Turing on, and AMD
    under ROCm (both are "cuda" to torch), where Triton is installed."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    if kind is not None and kind not in FORMATS:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= OLDEST


class Kernels:
    """The kernels of one device. A family that fails once is not tried again."""

    def __init__(self, n_multiprocessors: int, small: bool = False, device: torch.device | None = None) -> None:
        """`small`: without tensor cores that Triton knows, products of tiles are small ones. `device`: the GPU; None
        where kernels are interpreted."""
        self.n_multiprocessors, self.small, self.device = n_multiprocessors, small, device
        self.notes: list[str] = []
        """What the user should know, a sentence each: which kernels do not run."""
        self._failed: set[str] = set()

    @classmethod
    def on(cls, device: torch.device) -> Kernels | None:
        """Those of `device`; None where there are none."""
        if not supported(device):
            return None
        small = torch.version.hip is not None or torch.cuda.get_device_capability(device) < TENSOR_CORES
        return cls(torch.cuda.get_device_properties(device).multi_processor_count, small, device)

    def multiplies(self, kind: int, n_in: int) -> bool:
        """Whether a matrix of this type with rows of n_in weights is to be kept in planes."""
        return fits(kind, n_in)

    @property
    def makes_tiles(self) -> bool:
        """Whether `dequantize` can be asked."""
        return TILES not in self._failed

    def matvec(self, weight: Planes, x: Tensor, bias: Tensor | None, then: Nonlinearity | None = None) -> Tensor | None:
        """x [n, n_in] float32 times the matrix, plus the bias: [n, n_rows] float32, or what `then` makes of it. None
        where torch has to do it."""
        if not 1 <= x.shape[0] <= FEW_TOKENS:
            return None

        def run() -> Tensor:
            from hybrid.head.kernels import matvec

            return matvec.matvec(weight, x.contiguous(), bias, self.n_multiprocessors, then)

        return self._try("matrix-vector", run)

    def expert_matvec(self, stack: Stack, x: Tensor, chosen: Tensor, then: Nonlinearity | None = None) -> Tensor | None:
        """Each row of x [n / m, n_in] float32 times the matrices of its m experts, chosen [n] int64, plus their biases:
        [n, n_rows] float32, or what `then` makes of it. None where torch has to do it."""

        def run() -> Tensor:
            from hybrid.head.kernels import matvec

            return matvec.expert_matvec(stack, x.contiguous(), chosen, self.n_multiprocessors, then)

        return self._try("experts'", run)

    def add_and_norm(
        self, h: Tensor, more: Tensor | None, post: Tensor | None, weight: Tensor | None, eps: float, scale: float = 1.0
    ) -> tuple[Tensor, Tensor] | None:
        """h [n, n_embd] + scale * `more`, which is first divided by its root mean square and multiplied by `post`
        where that is there; and the same sum normalised with `weight` (the sum itself without). None where torch has to
        do it."""

        def run() -> tuple[Tensor, Tensor] | None:
            from hybrid.head.kernels import norm

            return norm.add_and_norm(h, more, post, weight, eps, scale)

        return self._try("RMSNorm", run)

    def dequantize(self, weight: Planes, start: int, stop: int, out: Tensor) -> bool:
        """Rows start … stop - 1 as numbers into `out` [stop - start, n_in]. False where torch has to do it."""

        def run() -> bool:
            from hybrid.head.kernels import tiles

            tiles.dequantize(weight, start, stop, out)
            return True

        return self._try(TILES, run) or False

    def turn_and_store(
        self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, ring_k: Tensor, ring_v: Tensor, where: Tensor
    ) -> Tensor | None:
        """Turn q and k [n, heads, head_dim] and store k and v in the rings [n_sequences, capacity, n_kv_heads, …].
        `where` [2] int32 on the device: the first token's position, and the sequence. Returns the turned q; None where
        torch has to do all of it."""

        def run() -> Tensor:
            from hybrid.head.kernels import rope

            return rope.turn_and_store(q, k, v, rotation, ring_k, ring_v, where)

        return self._try("RoPE", run)

    def attend(
        self, spec: LayerSpec, q: Tensor, k: Tensor, v: Tensor, where: Tensor, least: int, most_keys: int,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """Attention of q [n, n_heads, head_dim_k] to the keys that they see, from position `least` on, in the rings k
        and v, and the log-sum-exp [n, n_heads] of the scores. `where` as in `turn_and_store`; `most_keys`: no more will
        be seen. None where torch has to do it."""

        def run() -> tuple[Tensor, Tensor] | None:
            from hybrid.head.kernels import attention

            return attention.attend(spec, q, k, v, where, least, most_keys, sinks, self.n_multiprocessors, self.small)

        return self._try("attention", run)

    def _try(self, family: str, run: Callable[[], T]) -> T | None:
        """What `run` returns, or None if it fails: compilers, their cache folders and drivers raise what they like."""
        if family in self._failed:
            return None
        try:
            with (
                nullcontext() if self.device is None else torch.cuda.device(self.device)
            ):  # Triton's is the current one
                return run()
        except (HybridError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self._failed.add(family)
            reason = (str(error).strip().splitlines() or [""])[0].rstrip(".")[:200]
            self.notes.append(
                f"The {family} kernels do not run on this device ({type(error).__name__}: {reason}); PyTorch computes "
                "in their place, more slowly."
            )
            return None
