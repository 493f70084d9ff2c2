"""Recording what a device does, to be replayed: CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Replay = Callable[[], None]


class Recorder(Protocol):
    """What records what a device does."""

    def record(self, run: Callable[[], None]) -> Replay:
        """Record what `run` launches, without doing it, or doing it once; `run` has been called before. At every replay
        the tensors that it made lie where they lie now. Raises what the device's library raises where it cannot."""


class CudaRecorder:
    """CUDA graphs (on AMD's GPUs, HIP's). All share the memory of what lives within a segment: none runs beside
    another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: Any = None

    def record(self, run: Callable[[], None]) -> Replay:
        """See `Recorder.record`."""
        graph, now = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        if self._stream is None:  # one for all: cuBLAS has a workspace for each
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        beside = self._stream
        beside.wait_stream(now)
        with torch.cuda.device(self._device), torch.cuda.stream(beside):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        now.wait_stream(beside)
        self._pool = graph.pool()
        return graph.replay
