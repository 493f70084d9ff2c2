"""The quantised linear: the one door through which the decoder multiplies by a weight.

Fast kernels (`hybrid.head.kernels`) will take products over behind `QuantLinear.__call__`; this plain-torch one
serves every device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from hybrid.head.dequant import PLAIN, dequantize
from hybrid.head.device import Compute


class Workspace:
    """One tile of dequantised weights on the device, reused by every product of a head."""

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self._buffer = torch.empty(0, dtype=compute.dtype, device=compute.device)

    def rows(self, n_in: int) -> int:
        """Rows of n_in weights that make one tile."""
        return max(1, self.compute.tile_values // n_in)

    def tile(self, values: Tensor) -> Tensor:
        """`values` [rows, n_in] float32 rounded to the compute dtype, in the buffer; valid until the next call."""
        if self._buffer.numel() < values.numel():
            self._buffer = torch.empty(values.numel(), dtype=self.compute.dtype, device=self.compute.device)
        return self._buffer[: values.numel()].view(values.shape).copy_(values)

    @property
    def nbytes(self) -> int:
        """Device bytes of the buffer (it grows to the largest tile used)."""
        return self._buffer.nbytes


class QuantLinear:
    """y = x Wᵀ + b, where W is either GGUF blocks (`kind` says which) or, expanded, numbers in the compute dtype."""

    def __init__(self, weight: Tensor, kind: int | None, shape: tuple[int, int], bias: Tensor | None, work: Workspace):
        """`weight`: [n_out, row_bytes] uint8 of GGUF type `kind`, or [n_out, n_in] in the compute dtype if `kind` is
        None. `shape` is (n_out, n_in); `bias` [n_out] float32. All on the device."""
        self.n_out, self.n_in = shape
        self.kind = kind
        self.bias = bias
        self.work = work
        self.dtype = work.compute.dtype
        if kind is not None and PLAIN.get(kind) == self.dtype:  # the stored bytes are already the numbers we want
            weight, self.kind = weight.view(self.dtype), None
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """x [n_tokens, n_in] float32 to [n_tokens, n_out] float32; the product itself is in the compute dtype."""
        if self.kind is None:
            if self.dtype == torch.float32:
                return F.linear(x, self.weight, self.bias)
            y = F.linear(x.to(self.dtype), self.weight).float()
        else:
            y = self._tile_by_tile(x.to(self.dtype), self.kind)
        return y if self.bias is None else y.add_(self.bias)

    def _tile_by_tile(self, x: Tensor, kind: int) -> Tensor:
        y = torch.empty(x.shape[0], self.n_out, dtype=torch.float32, device=x.device)
        step = self.work.rows(self.n_in)
        for row in range(0, self.n_out, step):
            tile = self.work.tile(dequantize(self.weight[row : row + step], kind))
            y[:, row : row + step] = F.linear(x, tile)
        return y

    @property
    def nbytes(self) -> int:
        """Device bytes of the weight and the bias as they are held (the shared workspace apart)."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class ExpertLinear:
    """One matrix an expert, and a product that multiplies each row by the matrix of the expert it was sent to."""

    def __init__(self, experts: Sequence[QuantLinear], scales: Sequence[float] | None = None) -> None:
        """`scales` multiply each expert's product."""
        self.experts, self.scales = experts, scales
        self.n_out = experts[0].n_out

    def __call__(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """x [n_rows, n_in] float32, sorted by expert, `counts` rows for each; to [n_rows, n_out] float32.

        Experts nobody chose cost nothing.
        """
        y = torch.empty(x.shape[0], self.n_out, dtype=torch.float32, device=x.device)
        start = 0
        for i, n in enumerate(counts):
            if n:
                rows = self.experts[i](x[start : start + n])
                y[start : start + n] = rows if self.scales is None else rows.mul_(self.scales[i])
                start += n
        return y

    @property
    def nbytes(self) -> int:
        """Device bytes of all experts' weights and biases."""
        return sum(expert.nbytes for expert in self.experts)
