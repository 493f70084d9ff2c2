"""Head: layers 0 … k - 1 of a model on one torch device, and the output head too where k = L."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.errors import BadRequestError, UnsupportedError
from hybrid.head.decoder import Block, Rotations, run
from hybrid.head.device import Compute, allocating, limit_memory, open_device
from hybrid.head.embedding import TokenEmbedding
from hybrid.head.graphs import Graphs, OutputGraphs
from hybrid.head.kernels.formats import FEW_TOKENS
from hybrid.head.kv.cache import LayeredKVCache, open_cache
from hybrid.head.loading import Loader
from hybrid.head.memory import LiveBytes
from hybrid.head.output import OUTPUT, OutputHead
from hybrid.head.rope import Rope
from hybrid.model.file import ModelFile
from hybrid.model.spec import ModelSpec, RopeSpec
from hybrid.schedule.kv_checks import kv_refusal
from hybrid.schedule.placement import Placement

Ints = npt.NDArray[np.integer]
CPU = torch.device("cpu")
N_CTX_STEP = 256
"""llama.cpp rounds a context up to a multiple of it."""


class Head:
    """The early layers in torch. Not thread-safe: one thread at a time, whose torch thread count applies."""

    cache: LayeredKVCache
    """Keys and values of the k layers."""
    notes: list[str]
    """What the user should know, a sentence each (weights that could not stay quantised)."""
    compute: Compute
    """Device, matmul dtype, and whether matrices are held expanded."""

    def __init__(
        self,
        file: ModelFile,
        spec: ModelSpec,
        placement: Placement,
        *,
        compute: Compute | None = None,
        vram_budget: int | None = None,
        progress: Callable[[float], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        """Load what `placement` asks for, straight from the mmap of `file` (which must stay open).

        `progress` gets the share loaded, 0..1; once `cancelled` returns True, Cancelled is raised, amid the loading or
        between two layers of an evaluation (`trim` then what it has stored of the tokens). `compute` overrides
        how the device computes; with `vram_budget` more bytes of it are not to be had, be it emulated or a GPU (where
        that holds for the whole process). Raises UnsupportedError (a device or a model this half cannot serve),
        OutOfMemoryError, BadRequestError (k out of range).
        """
        k = placement.n_gpu_layers
        if not 1 <= k <= spec.n_layers:
            raise BadRequestError(f"The GPU half can hold 1 to {spec.n_layers} layers of this model, not {k}.")
        if refusal := kv_refusal(spec, placement):
            raise UnsupportedError(refusal)
        self.spec, self.placement = spec, placement
        self.compute = compute or Compute.on(open_device(placement.device))
        self.n_layers = k
        self._closed = False
        device, layers = self.compute.device, spec.layers[:k]
        self.memory: LiveBytes | None = None
        """What counts the bytes of an emulated device that has a budget."""
        self.counting = True
        """Whether it counts now: watching every operator takes time, which a speed must not contain."""
        if vram_budget is not None:
            self.memory = limit_memory(device, vram_budget)
        wanted = [info for layer in layers for info in layer.weights.values()]
        if k == spec.n_layers:
            wanted += [spec.output_tensor, *(info for name, info in spec.weights.items() if name in OUTPUT)]
        with allocating(f"Loading {k} layers", None, device), torch.inference_mode(), self._counted():
            # first: if it does not fit, know before loading
            self.cache = open_cache(layers, placement, device, kernels=self.compute.kernels)
            loader = Loader(file, self.compute, sum(info.n_bytes for info in wanted), progress, cancelled)
            self._work = loader.work
            self._embedding = TokenEmbedding(file, spec, device)
            n_ctx = llama_n_ctx(placement)
            self._ropes = {layer.rope: _rope(file, layer.rope, n_ctx) for layer in layers if layer.rope is not None}
            self._blocks = [Block(i, layer, loader, spec.norm_eps) for i, layer in enumerate(layers)]
            self._output = OutputHead(spec, loader) if k == spec.n_layers else None
            loader.close()
        self._cancelled = cancelled
        self.weight_bytes = loader.device_bytes
        """Device bytes of the weights as they are held."""
        self._graphs: Graphs | None = None
        self._output_graphs: OutputGraphs | None = None
        if self.compute.kernels is not None:
            self._try_kernels()
        self.notes = [*loader.notes, *self.cache.notes, *(self.compute.kernels.notes if self.compute.kernels else ())]
        if self.compute.kernels is not None and self.compute.recorder is not None:
            self._graphs = Graphs(self._blocks, self.cache, self.compute.recorder, self._work, self.notes)
            if self._output is not None:
                n = placement.n_outputs
                self._output_graphs = OutputGraphs(self._output, n, self.compute.recorder, self._work, self.notes)
            self._try_tokens(1)

    @torch.inference_mode()
    def forward(self, tokens: Ints, positions: Ints, seqs: Ints) -> Tensor:
        """Append tokens to their sequences and run layers 0 … k - 1 over them.

        tokens, positions, seqs: [n] integers on the host; the tokens of one sequence come in order and continue it,
        at most n_batch of them. Returns the hidden state after layer k - 1, [n, n_embd] float32 on the device.
        Raises BadRequestError, OutOfMemoryError, Cancelled. If it raises, `cache.trim` each sequence to what it had.
        """
        where = np.asarray(positions, np.int64)
        device = self.compute.device
        with self._computing(len(where)):
            h = self._embedding(np.asarray(tokens, np.int64))
            on_host = torch.from_numpy(where), torch.from_numpy(np.asarray(seqs, np.int64))
            if self._graphs is not None and self._graphs.takes(len(where)):
                out = self._graphs.step(h, self._rotations(where, CPU), self.cache.stretches(*on_host))
                if out is not None:
                    return out
            return run(self._blocks, h, self._rotations(where, device), self.cache, *on_host, self._cancelled)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [m, n_embd] after the last layer to [m, n_vocab] float32 on the device. Only at k = L."""
        if self._output is None:
            raise BadRequestError("The output head is not on the GPU: it is only with all layers (-ngl all).")
        with self._computing(len(hidden)):
            hidden = hidden.to(self.compute.device)
            out = None if self._output_graphs is None else self._output_graphs.run(hidden)
            return self._output(hidden) if out is None else out

    @property
    def nbytes(self) -> int:
        """Device bytes held: weights, KV cache, the workspace for dequantised tiles; 0 after `close`."""
        if self._closed:
            return 0
        return self.weight_bytes + self.cache.nbytes + self._work.nbytes

    def close(self) -> None:
        """Free the device memory. The head is unusable afterwards; closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._graphs = self._output_graphs = self._output = None
        self._blocks.clear()
        self._ropes.clear()
        self.cache.close()
        del self._embedding, self._work, self.cache
        if self.compute.device.type == "cuda":
            torch.cuda.empty_cache()

    def _rotations(self, positions: npt.NDArray[np.int64], device: torch.device) -> Rotations:
        return {spec: rope.rotation(positions, device) for spec, rope in self._ropes.items()}

    def _try_kernels(self) -> None:
        """Compile what decode and a prompt need, so that the first answer does not wait for it, and that what does not
        run here is known when the notes are read."""
        n_most = min(FEW_TOKENS + 1, self.placement.n_batch, self.placement.n_ctx)
        for n in (1, n_most):
            self._try_tokens(n)

    def _try_tokens(self, n: int) -> None:
        hidden = self.forward(np.zeros(n, np.int64), np.arange(n), np.zeros(n, np.int64))
        if self._output is not None:
            self.logits(hidden[-1:])
        self.cache.trim(0, 0)

    def _computing(self, n_tokens: int) -> AbstractContextManager[object]:
        stack = ExitStack()
        stack.enter_context(allocating(f"Computing {n_tokens} tokens at once", None, self.compute.device))
        stack.enter_context(self._counted())
        return stack

    def _counted(self) -> AbstractContextManager[object]:
        return nullcontext() if self.memory is None or not self.counting else self.memory


def _rope(file: ModelFile, spec: RopeSpec, n_ctx: int) -> Rope:
    """LongRoPE's long factors are for contexts longer than the original, as llama.cpp counts them."""
    name = spec.factors_long if spec.factors_long is not None and n_ctx > spec.n_ctx_orig else spec.factors
    return Rope(spec) if name is None else Rope(spec, file.data(name).view(np.float32))


def llama_n_ctx(placement: Placement) -> int:
    """The context of one sequence as the tail's llama.cpp has it (`llama-context.cpp`): it decides with it, and so must
    the head."""
    n_ctx = placement.n_ctx * (placement.n_sequences if placement.kv_unified else 1)
    return -(-n_ctx // N_CTX_STEP) * N_CTX_STEP
