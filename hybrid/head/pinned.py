"""Pinned host memory, from which copies to a GPU run beside other work; ordinary memory where none is to be had."""

from __future__ import annotations

import torch
from torch import Tensor

PINNED_FAILED = "Host memory for {what} could not be pinned ({why}); copies to and from the GPU are slower."


def pinned(shape: tuple[int, ...], dtype: torch.dtype, what: str, notes: list[str]) -> Tensor:
    """An uninitialised tensor in pinned memory. Where the system gives none (`ulimit -l`, containers, WSL2), one in
    pageable memory, which CUDA copies through a buffer of its own, and a line in `notes`, once, that says so."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        note = PINNED_FAILED.format(what=what, why=str(error).strip().split("\n")[0].rstrip("."))
        if note not in notes:
            notes.append(note)
        return torch.empty(shape, dtype=dtype)
