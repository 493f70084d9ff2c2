"""Token embeddings, gathered on the host from the mmap: they take no device memory."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.errors import BadRequestError
from hybrid.head.dequant import SUPPORTED, dequantize, dequantize_on_host
from hybrid.model.file import ModelFile
from hybrid.model.spec import ModelSpec


class TokenEmbedding:
    """`token_embd.weight` as it lies in the file; only the rows a batch needs are read and dequantised."""

    def __init__(self, file: ModelFile, spec: ModelSpec, device: torch.device) -> None:
        self.info = spec.weights["token_embd.weight"]
        self.rows = file.data(self.info.name).reshape(self.info.shape[0], -1)  # [n_vocab, row_bytes], not read yet
        self.scale = spec.embedding_scale
        self.device = device

    def __call__(self, tokens: npt.NDArray[np.int64]) -> Tensor:
        """tokens [n] to [n, n_embd] float32 on the device, scaled. Raises BadRequestError for an unknown token."""
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < len(self.rows):
            raise BadRequestError(f"A token is outside the vocabulary of {len(self.rows)} tokens.")
        raw = torch.from_numpy(self.rows[tokens])  # fancy indexing copies
        values = (dequantize if self.info.type in SUPPORTED else dequantize_on_host)(raw, self.info.type)
        if self.scale != 1.0:
            values = values * self.scale
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # no pinned memory to be had: the ordinary way
                # It lives on until the copy is done: torch's host allocator sees to it.
                return values.pin_memory().to(self.device, non_blocking=True)
        return values.to(self.device)
