"""The quantised linear: the one door through which the decoder multiplies by a weight.

Where there are kernels for it (`hybrid.head.kernels`), the matrix lies in planes: a few rows are multiplied straight
from them, and for more of them a kernel makes the tiles. Plain torch serves every other device, and takes over where a
kernel fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from hybrid.head.activation import Nonlinearity
from hybrid.head.dequant import PLAIN, dequantize
from hybrid.head.device import Compute
from hybrid.head.kernels.formats import Planes, Stack

FRUGAL = 8
"""By how much torch's tiles are smaller than a kernel's where its temporaries have to lie in as much memory: they take
10.6 bytes of a weight, and blocks put together again up to 4, beside its own 2."""


class Workspace:
    """One tile of dequantised weights on the device, reused by every product of a head."""

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self.buffer = torch.empty(0, dtype=compute.dtype, device=compute.device)
        """It grows to the largest tile used."""

    def rows(self, n_out: int, n_in: int, *, by_kernel: bool = False) -> int:
        """Rows of a matrix [n_out, n_in] that make one tile."""
        values = self.compute.tile_values
        if not by_kernel and not self.compute.temporaries:
            values = min(values, n_out * n_in) // FRUGAL
        return min(n_out, max(1, values // n_in))

    def room(self, rows: int, n_in: int) -> Tensor:
        """The buffer as [rows, n_in] in the compute dtype, for a tile that is valid until the next call."""
        n = rows * n_in
        if self.buffer.numel() < n:
            self.buffer = torch.empty(n, dtype=self.compute.dtype, device=self.compute.device)
        return self.buffer[:n].view(rows, n_in)

    def release(self) -> None:
        """Give the buffer back; the next tile makes another."""
        self.buffer = self.buffer.new_empty(0)

    @property
    def nbytes(self) -> int:
        """Device bytes of the buffer (it grows to the largest tile used)."""
        return self.buffer.nbytes


class QuantLinear:
    """y = x Wᵀ + b, where W is GGUF blocks (`kind` says which), in a row or in planes, or, expanded, numbers in the
    compute dtype."""

    def __init__(
        self, weight: Tensor | Planes, kind: int | None, shape: tuple[int, int], bias: Tensor | None, work: Workspace
    ):
        """`weight`: [n_out, row_bytes] uint8 of GGUF type `kind`, or its planes, or [n_out, n_in] in the compute dtype
        if `kind` is None. `shape` is (n_out, n_in); `bias` [n_out] float32. All on the device."""
        self.n_out, self.n_in = shape
        self.kind = kind
        self.bias = bias
        self.work = work
        self.dtype = work.compute.dtype
        if isinstance(weight, Tensor) and kind is not None and PLAIN.get(kind) == self.dtype:
            weight, self.kind = weight.view(self.dtype), None  # the stored bytes are already the numbers we want
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """x [n_tokens, n_in] float32 to [n_tokens, n_out] float32. The product of a few tokens and planes is in
        float32; others are in the compute dtype."""
        if isinstance(self.weight, Planes):
            few = self.of_few(x)
            if few is not None:
                return few
            y = self._tile_by_tile(x.to(self.dtype), self._tiles_of_planes(self.weight))
        elif self.kind is not None:
            y = self._tile_by_tile(x.to(self.dtype), self._tiles_of_blocks(self.weight, self.kind))
        elif self.dtype == torch.float32:
            return F.linear(x, self.weight, self.bias)
        else:
            y = F.linear(x.to(self.dtype), self.weight).float()
        return y if self.bias is None else y.add_(self.bias)

    def of_few(self, x: Tensor, then: Nonlinearity | None = None) -> Tensor | None:
        """The same of a few tokens, or what `then` makes of it, in one launch; None where there is no kernel for it."""
        kernels = self.work.compute.kernels
        if kernels is None or not isinstance(self.weight, Planes):
            return None
        return kernels.matvec(self.weight, x, self.bias, then)

    def _tile_by_tile(self, x: Tensor, tiles: Iterator[tuple[int, Tensor]]) -> Tensor:
        y = torch.empty(x.shape[0], self.n_out, dtype=torch.float32, device=x.device)
        for row, tile in tiles:
            y[:, row : row + tile.shape[0]] = F.linear(x, tile)
        return y

    def _tiles_of_blocks(self, weight: Tensor, kind: int) -> Iterator[tuple[int, Tensor]]:
        """The matrix as numbers in the compute dtype: (first row, some rows), each valid until the next."""
        step = self.work.rows(self.n_out, self.n_in)
        for row in range(0, self.n_out, step):
            rows = weight[row : row + step]
            yield row, self.work.room(rows.shape[0], self.n_in).copy_(dequantize(rows, kind))

    def _tiles_of_planes(self, weight: Planes) -> Iterator[tuple[int, Tensor]]:
        kernels, work, row = self.work.compute.kernels, self.work, 0
        while row < self.n_out:
            by_kernel = kernels is not None and kernels.makes_tiles
            stop = min(self.n_out, row + work.rows(self.n_out, self.n_in, by_kernel=by_kernel))
            tile = work.room(stop - row, self.n_in)
            if not by_kernel:
                tile.copy_(dequantize(weight.rows(row, stop), weight.kind))
            elif kernels is None or not kernels.dequantize(weight, row, stop, tile):
                work.release()  # torch's tiles are smaller
                continue
            yield row, tile
            row = stop

    @property
    def nbytes(self) -> int:
        """Device bytes of the weight and the bias as they are held (the shared workspace apart)."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class Joined:
    """Linears of the same input. `whole`, where it is there, is one matrix of all their rows, which are parts of it: of
    a few tokens, its product is one launch."""

    def __init__(self, parts: Sequence[QuantLinear], whole: QuantLinear | None = None) -> None:
        self.parts, self.whole = parts, whole

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """x [n_tokens, n_in] float32 to [n_tokens, n_out] float32 of each."""
        rows = None if self.whole is None else self.whole.of_few(x)
        if rows is None:
            return [linear(x) for linear in self.parts]
        return torch.split(rows, [linear.n_out for linear in self.parts], dim=-1)


class ExpertLinear:
    """One matrix an expert, and a product that multiplies each row by the matrix of the expert it was sent to."""

    def __init__(self, experts: Sequence[QuantLinear], bias: Tensor | None, scales: Tensor | None = None) -> None:
        """The experts' weights follow each other in memory. `bias` [n_experts, n_out] has all of their biases; `scales`
        [n_experts] multiply each expert's product. Both float32 on the device."""
        self.experts = experts
        self.scales = None if scales is None else scales.tolist()
        self.n_out = experts[0].n_out
        first = experts[0].weight
        self._stack = Stack(first, bias) if isinstance(first, Planes) else None
        self._scales = scales

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

    def row_by_row(self, x: Tensor, chosen: Tensor, then: Nonlinearity | None = None) -> Tensor | None:
        """x [n / m, n_in] float32, of a few tokens, and m experts for each, chosen [n], to [n, n_out], or what `then`
        makes of that: row i // m by expert chosen[i], which the host need not know. None where there is no kernel for
        that."""
        kernels = self.experts[0].work.compute.kernels
        if kernels is None or self._stack is None or (then is not None and self._scales is not None):
            return None
        y = kernels.expert_matvec(self._stack, x, chosen, then)
        return y if y is None or self._scales is None else y.mul_(self._scales[chosen].unsqueeze(1))

    @property
    def nbytes(self) -> int:
        """Device bytes of all experts' weights and biases."""
        return sum(expert.nbytes for expert in self.experts)
