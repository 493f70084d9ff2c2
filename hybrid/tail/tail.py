"""Tail: the late layers of a model, on the CPU, in llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt

from hybrid.model.file import ModelFile
from hybrid.model.spec import ModelSpec
from hybrid.schedule.placement import Placement
from hybrid.tail.context import Context, Float32s, Int32s, context_params
from hybrid.tail.model import Model, open_files, open_virtual
from hybrid.tail.slice import input_scale, tail_slice
from hybrid.tail.vocab import Vocabulary


@dataclass(frozen=True)
class TailMemory:
    """Host bytes of a tail. Allocated, which may be more than resident: a mapped file's pages can be dropped."""

    model_bytes: int
    """Weight buffers as llama.cpp reports them."""
    kv_bytes: int
    compute_bytes: int
    output_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(asdict(self).values())


class Tail(Context):
    """Layers `placement.n_gpu_layers`.. of an open model. Freed once by `close`; use as a context manager.

    k = 0 is llama.cpp's ordinary load of the whole file by mmap, and takes tokens; k > 0 loads the slice as a virtual
    file into anonymous memory, and takes hidden states. `progress` (fractions) and `cancelled` are called from the
    calling thread while it loads.

    Raises UnsupportedError for a k that is not allowed, Cancelled (also on Ctrl-C), OutOfMemoryError, EngineError.
    """

    def __init__(
        self,
        file: ModelFile,
        spec: ModelSpec,
        placement: Placement,
        *,
        n_outputs_max: int | None = None,
        progress: Callable[[float], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        self.placement = placement
        self._input_scale = np.float32(input_scale(spec))
        model = _load(file, spec, placement, progress, cancelled)
        try:
            super().__init__(model, context_params(placement, n_outputs_max or placement.n_outputs))
            self.vocabulary = Vocabulary(model)
        except BaseException:
            self.close()
            model.close()
            raise

    def decode(
        self, inputs: Int32s | Float32s, positions: Int32s, seqs: Int32s, outputs: npt.NDArray[np.bool_]
    ) -> None:
        """See `Context.decode`. Hidden states are the residual stream as it is between two layers."""
        if inputs.ndim == 2 and self._input_scale != 1:
            inputs = np.asarray(inputs, np.float32) / self._input_scale  # what llama.cpp will multiply it by
        super().decode(inputs, positions, seqs, outputs)

    def reopen(self, n_outputs_max: int | None = None) -> None:
        """A fresh context with room for that many outputs a batch (None: as placed); every sequence is empty.

        The weights stay loaded. A large vocabulary makes this expensive: n_outputs_max * n_vocab * 4 bytes, twice.
        Raises OutOfMemoryError or EngineError; then there is a fresh context as placed, for which there was memory.
        """
        super().close()
        try:
            self._open(context_params(self.placement, n_outputs_max or self.placement.n_outputs))
        except BaseException:
            if n_outputs_max is not None:
                self._open(context_params(self.placement, self.placement.n_outputs))
            raise

    @property
    def memory(self) -> TailMemory:
        """What it has allocated."""
        return TailMemory(self.model.model_bytes, self.kv_bytes, self.compute_bytes, self.output_bytes)

    def close(self) -> None:
        """Free the context and the model. Harmless when repeated."""
        super().close()
        if hasattr(self, "model"):
            self.model.close()

    def __enter__(self) -> Tail:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _load(
    file: ModelFile,
    spec: ModelSpec,
    placement: Placement,
    progress: Callable[[float], None] | None,
    cancelled: Callable[[], bool] | None,
) -> Model:
    if placement.n_gpu_layers == 0:
        paths, own = [shard.path for shard in file.shards], placement.llama_gpu_layers
        return open_files(paths, gpu_layers=own, progress=progress, cancelled=cancelled)
    return open_virtual(
        tail_slice(file, spec, placement.n_gpu_layers), file.path.name, progress=progress, cancelled=cancelled
    )
