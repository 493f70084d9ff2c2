"""From the mmap to the device: every tensor of the head goes through here once, a tile at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby

import torch
from torch import Tensor

from hybrid.errors import Cancelled, UnsupportedError
from hybrid.head.dequant import PLAIN, SUPPORTED, dequantize, dequantize_on_host
from hybrid.head.device import Compute, allocating
from hybrid.head.kernels.formats import Planes
from hybrid.head.linear import ExpertLinear, Joined, QuantLinear, Workspace
from hybrid.head.memory import host_memory
from hybrid.head.pinned import pinned
from hybrid.model.file import ModelFile, TensorInfo
from hybrid.model.ggml_types import GGML_TYPES, type_name
from hybrid.model.tensors import trimmed

STAGING_BYTES = 8 << 20
"""Host memory of each of the two buffers tensors pass through; also how often progress is told."""


class Loader:
    """Reads tensors of a file onto a device. No second copy of the model is made on the host.

    `progress` is called with the share of `total_bytes` read so far, 0..1; `cancelled` is asked as often, and
    Cancelled is raised once it says yes. `notes` collects what the user should know.
    """

    def __init__(
        self,
        file: ModelFile,
        compute: Compute,
        total_bytes: int,
        progress: Callable[[float], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        self.file = file
        self.compute = compute
        self.work = Workspace(compute)
        self.device_bytes = 0
        """Bytes of everything loaded so far, as held on the device."""
        self._total, self._done = max(1, total_bytes), 0
        self._progress, self._cancelled = progress, cancelled
        self._staging = _Staging(compute.device)
        self._expanded: dict[str, int] = {}

    def vector(self, info: TensorInfo) -> Tensor:
        """A norm weight or bias as float32 on the device, in its own shape (less outer dimensions of one)."""
        with allocating(f"Loading {info.name}", info.n_values * 4, self.compute.device):
            values = [self._on_host(raw, info.type).clone() for _, raw in self._tiles(info, 1)]
            vector = torch.cat(values, dim=1).view(trimmed(info.shape)).to(self.compute.device)
        self.device_bytes += vector.nbytes
        return vector

    def linear(self, info: TensorInfo, bias: TensorInfo | None = None) -> QuantLinear:
        """A matrix, quantised or expanded as `Compute` says."""
        if len(info.shape) != 2:
            raise UnsupportedError(f"{info.name} has {len(info.shape)} dimensions where a matrix is expected.")
        [weight], kind = self._matrices(info, 1)
        return QuantLinear(weight, kind, info.shape, None if bias is None else self.vector(bias), self.work)

    def joined(self, infos: Sequence[TensorInfo], biases: Sequence[TensorInfo | None]) -> Joined:
        """Matrices with the same input: in one, where kernels multiply by them and they are of one type."""
        if not self._can_join(infos):
            return Joined([self.linear(info, bias) for info, bias in zip(infos, biases, strict=True)])
        [planes] = self._planes(infos, 1)
        bias = self._joined_bias(infos, biases)
        whole = QuantLinear(planes, infos[0].type, (planes.n_rows, planes.n_in), bias, self.work)
        return Joined(_parts(whole, [info.shape[0] for info in infos]), whole)

    def joined_experts(
        self, infos: Sequence[TensorInfo], biases: Sequence[TensorInfo | None]
    ) -> tuple[Sequence[ExpertLinear], ExpertLinear | None]:
        """The same of matrices that experts have: each by itself, and all in one, or None where they are not."""
        if not self._can_join(infos):
            return [self.experts(info, bias) for info, bias in zip(infos, biases, strict=True)], None
        planes, bias = self._planes(infos, infos[0].shape[0]), self._joined_bias(infos, biases)
        shape = planes[0].n_rows, planes[0].n_in
        every = [None] * len(planes) if bias is None else bias.unbind()
        wholes = [QuantLinear(p, p.kind, shape, b, self.work) for p, b in zip(planes, every, strict=True)]
        widths = [info.shape[1] for info in infos]
        parts = zip(*(_parts(whole, widths) for whole in wholes), strict=True)
        own = [None] * len(widths) if bias is None else [b.contiguous() for b in torch.split(bias, widths, dim=1)]
        return [ExpertLinear(p, b) for p, b in zip(parts, own, strict=True)], ExpertLinear(wholes, bias)

    def experts(
        self, info: TensorInfo, bias: TensorInfo | None = None, scale: TensorInfo | None = None
    ) -> ExpertLinear:
        """One matrix an expert, [n_experts, n_out, n_in], held like `linear`; `bias` [n_experts, n_out]. `scale`
        [n_experts] multiplies each expert's product."""
        if len(info.shape) != 3:
            raise UnsupportedError(
                f"{info.name} has {len(info.shape)} dimensions where one matrix an expert is expected."
            )
        n_experts, n_out, n_in = info.shape
        matrices, kind = self._matrices(info, n_experts)
        all_biases = None if bias is None else self.vector(bias).view(n_experts, n_out)
        biases = [None] * n_experts if all_biases is None else all_biases.unbind()
        linears = [QuantLinear(w, kind, (n_out, n_in), b, self.work) for w, b in zip(matrices, biases, strict=True)]
        return ExpertLinear(linears, all_biases, None if scale is None else self.vector(scale))

    def _can_join(self, infos: Sequence[TensorInfo]) -> bool:
        first = infos[0]
        like = all((info.type, info.shape[-1]) == (first.type, first.shape[-1]) for info in infos)
        return like and self._in_planes(first)

    def _in_planes(self, info: TensorInfo) -> bool:
        """Whether a matrix of this type and width is kept in planes."""
        compute, kind = self.compute, info.type
        if compute.kernels is None or compute.expand or kind not in SUPPORTED or PLAIN.get(kind) == compute.dtype:
            return False
        return compute.kernels.multiplies(kind, info.shape[-1])

    def _joined_bias(self, infos: Sequence[TensorInfo], biases: Sequence[TensorInfo | None]) -> Tensor | None:
        """Biases as those of one matrix of all rows, [n_out] or [n_experts, n_out]; zeros where one has none."""
        if all(bias is None for bias in biases):
            return None
        device = self.compute.device
        parts = [
            torch.zeros(info.shape[:-1], device=device) if bias is None else self.vector(bias).view(info.shape[:-1])
            for info, bias in zip(infos, biases, strict=True)
        ]
        return torch.cat(parts, dim=-1)

    def _planes(self, infos: Sequence[TensorInfo], n: int) -> list[Planes]:
        """n matrices in planes on the device, each of the rows that each of `infos` has for it, one after the other."""
        kind, n_in = infos[0].type, infos[0].shape[-1]
        widths = [info.n_values // n_in // n for info in infos]
        n_bytes = sum(info.n_bytes for info in infos)
        with allocating(f"Loading {infos[0].name}", n_bytes, self.compute.device):
            data = torch.empty(n, n_bytes // n, dtype=torch.uint8, device=self.compute.device)
            planes = [Planes(each, kind, (sum(widths), n_in)) for each in data]
            for info, first, width in zip(infos, accumulate(widths, initial=0), widths, strict=False):
                self._fill_planes([each.part(first, width) for each in planes], info)
        self.device_bytes += data.nbytes
        return planes

    def _matrices(self, info: TensorInfo, n: int) -> tuple[Sequence[Tensor | Planes], int | None]:
        """The n matrices of a tensor on the device: [n_rows, row_bytes] uint8 of the returned type, or their planes, or
        numbers if the type is None."""
        if self._in_planes(info):
            return self._planes([info], n), info.type
        n_in = info.shape[-1]
        n_rows = info.n_values // n_in
        compute, device = self.compute, self.compute.device
        quantised = not compute.expand and info.type in SUPPORTED
        held = info.n_bytes if quantised else info.n_values * compute.dtype.itemsize
        with allocating(f"Loading {info.name}", held, device):
            if not quantised:
                weight = torch.empty(n_rows, n_in, dtype=compute.dtype, device=device)
            else:
                weight = torch.empty(n_rows, info.n_bytes // n_rows, dtype=torch.uint8, device=device)
            for row, raw in self._tiles(info, n_rows):
                target = weight[row : row + raw.shape[0]]
                if quantised:
                    self._staging.send(raw, target)
                else:
                    target.copy_(self._on_host(raw, info.type))
        self.device_bytes += weight.nbytes
        if info.type not in SUPPORTED:
            name = type_name(info.type)
            self._expanded[name] = self._expanded.get(name, 0) + held
        return weight.view(n, n_rows // n, -1).unbind(), info.type if quantised else None

    def _fill_planes(self, planes: Sequence[Planes], info: TensorInfo) -> None:
        """Send a tensor's rows to the device as they are in the file; the device takes their blocks apart."""
        each = planes[0].n_rows
        for row, raw in self._tiles(info, each * len(planes)):
            here = torch.empty_like(raw, device=self.compute.device)
            self._staging.send(raw, here)
            done = 0
            while done < len(here):
                matrix, at = divmod(row + done, each)
                n = min(len(here) - done, each - at)
                planes[matrix].write(at, here[done : done + n])
                done += n

    @property
    def notes(self) -> list[str]:
        """One sentence for each kind of weight that the device cannot keep quantised, and for staging not pinned."""
        held = str(self.compute.dtype).removeprefix("torch.")
        return self._staging.notes + [
            f"{name} weights have no dequantisation on the device: expanded once to {held}, {n_bytes / 2**20:.1f} MiB."
            for name, n_bytes in self._expanded.items()
        ]

    def close(self) -> None:
        """Free the staging memory; the last copies have then arrived."""
        self._staging.close()

    def _on_host(self, raw: Tensor, kind: int) -> Tensor:
        """Float32 values [rows, n] of a tile, computed on the CPU."""
        with host_memory():
            return dequantize(raw, kind) if kind in SUPPORTED else dequantize_on_host(raw, kind)

    def _tiles(self, info: TensorInfo, rows: int) -> Iterator[tuple[int, Tensor]]:
        """(first row, [rows, row_bytes] uint8 in staging memory), each valid until the next but one."""
        data = self.file.data(info.name).reshape(rows, info.n_bytes // rows)
        size = GGML_TYPES[info.type]
        limit = STAGING_BYTES if not self.compute.expand else self.compute.tile_values * size.n_bytes // size.block
        step = max(1, limit // data.shape[1])
        for row in range(0, rows, step):
            if self._cancelled is not None and self._cancelled():
                raise Cancelled("Loading was cancelled.")
            part = data[row : row + step]
            raw = self._staging.take(part.size).view(part.shape)
            raw.numpy()[...] = part
            yield row, raw
            self._done += part.size
            if self._progress is not None:
                self._progress(min(1.0, self._done / self._total))


class LayerWeights:
    """One layer's tensors by GGUF suffix. Optional parts are None where the file has no such tensor; what nobody
    asked for by the end is an error, because leaving a weight out would be a silently different model."""

    def __init__(self, loader: Loader, weights: Mapping[str, TensorInfo], where: str) -> None:
        self._loader, self._weights, self._where = loader, weights, where
        self._used: set[str] = set()

    def linear(self, name: str) -> QuantLinear:
        """`name`.weight with `name`.bias where there is one. Raises UnsupportedError if the weight is missing."""
        return self._loader.linear(self._weight(name), self._take(name + ".bias"))

    def joined(self, names: Sequence[str]) -> list[Joined]:
        """As `linear`, of several with the same input: those that follow each other and are of one type, together."""
        infos = {name: self._weight(name) for name in names}
        groups = [list(group) for _, group in groupby(names, key=lambda name: infos[name].type)]
        return [
            self._loader.joined([infos[name] for name in group], [self._take(name + ".bias") for name in group])
            for group in groups
        ]

    def joined_experts(self, names: Sequence[str]) -> tuple[Sequence[ExpertLinear], ExpertLinear | None]:
        """As `experts`, of several with the same input: each by itself, and all in one where that can be."""
        if any(name + ".scale" in self for name in names):
            return [self.experts(name) for name in names], None
        infos = [self._weight(name) for name in names]
        return self._loader.joined_experts(infos, [self._take(name + ".bias") for name in names])

    def experts(self, name: str) -> ExpertLinear:
        """`name`.weight with `name`.bias and `name`.scale where they are. Raises UnsupportedError if the weight is
        missing."""
        return self._loader.experts(self._weight(name), self._take(name + ".bias"), self._take(name + ".scale"))

    def vector(self, name: str) -> Tensor | None:
        """The vector (or small float32 tensor) `name`, or None."""
        info = self._take(name)
        return None if info is None else self._loader.vector(info)

    def check_all_used(self) -> None:
        """Raise UnsupportedError if the layer has a tensor the decoder does not know."""
        if unknown := sorted(set(self._weights) - self._used):
            raise UnsupportedError(f"{self._where} has {unknown[0]}, which the GPU half does not know; use -ngl 0.")

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def _weight(self, name: str) -> TensorInfo:
        info = self._take(name + ".weight")
        if info is None:
            raise UnsupportedError(f"{self._where} has no {name}.weight, which the GPU half needs; use -ngl 0.")
        return info

    def _take(self, name: str) -> TensorInfo | None:
        self._used.add(name)
        return self._weights.get(name)


def _parts(whole: QuantLinear, widths: Sequence[int]) -> list[QuantLinear]:
    """Linears of so many rows each of a matrix in planes."""
    planes, biases = whole.weight, [None] * len(widths) if whole.bias is None else torch.split(whole.bias, list(widths))
    assert isinstance(planes, Planes)
    starts = accumulate(widths, initial=0)
    return [
        QuantLinear(planes.part(first, n), whole.kind, (n, whole.n_in), bias, whole.work)
        for first, n, bias in zip(starts, widths, biases, strict=False)
    ]


class _Staging:
    """Two host buffers in turn. On CUDA they are pinned, where that can be had, and copies run behind the next read of
    the file; a buffer is written again only after the event recorded behind its copy. Elsewhere copies are
    synchronous."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._buffers = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]
        self._events: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self.notes: list[str] = []

    def take(self, n_bytes: int) -> Tensor:
        """A buffer of n_bytes that no copy reads any more."""
        self._turn ^= 1
        event = self._events[self._turn]
        if event is not None:
            event.synchronize()
            self._events[self._turn] = None
        if self._buffers[self._turn].numel() < n_bytes:
            with host_memory():
                if self._cuda:
                    buffer = pinned((n_bytes,), torch.uint8, "loading", self.notes)
                else:
                    buffer = torch.empty(n_bytes, dtype=torch.uint8)
                self._buffers[self._turn] = buffer
        return self._buffers[self._turn][:n_bytes]

    def send(self, raw: Tensor, target: Tensor) -> None:
        """Copy the buffer last taken to the device."""
        target.copy_(raw, non_blocking=self._cuda)
        if self._cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._events[self._turn] = event

    def close(self) -> None:
        for event in self._events:
            if event is not None:
                event.synchronize()
        self._buffers = []
