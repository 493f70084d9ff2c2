"""A recorder of graphs for the CPU: it writes down every operator that torch dispatches and every kernel that is
launched, with the tensors and numbers they were given, and does the same again at a replay, into the same memory.

As with a CUDA graph, nothing that Python computes while it is recorded is computed again: what depends on it shows as a
wrong result. What would wait for the device is refused, as there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from hybrid.head.kernels.variant import Variant

WAITING = ("_local_scalar_dense", "nonzero", "bincount", "is_nonzero", "equal", "masked_select", "unique")
"""Operators whose results the host needs, or whose shapes it does."""


class Tape:
    """See the module's docstring. `recorded` counts the operators and kernels of each segment so far."""

    def __init__(self) -> None:
        self.recorded: list[int] = []

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run, and return what does so again."""
        taken = _Taken()
        launch = Variant.launch

        def launched(variant: Variant, grid: tuple[int, ...], *args: Any) -> None:
            again = partial(launch, variant, grid, *args)
            taken.steps.append(again)
            with _disable_current_modes():
                again()

        with patch.object(Variant, "launch", launched), taken:
            run()
        self.recorded.append(len(taken.steps))
        return taken.replay


class _Taken(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What was done, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Callable[[], object]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__.split(".")[0], kwargs or {}
        if name in WAITING:
            raise RuntimeError(f"the host would wait for {name}")
        out = func(*args, **kwargs)
        self.steps.append(partial(_again, func, args, kwargs, out))
        return out

    def replay(self) -> None:
        """All of it, into the same memory."""
        with torch.inference_mode():
            for step in self.steps:
                step()


def _again(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    for held, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
        if not isinstance(held, Tensor) or held.data_ptr() == new.data_ptr():
            continue  # no tensor, or a view of what is there, or changed in place
        if "empty" in func.__name__:  # what is there before is not to be relied upon
            held.view(torch.uint8).fill_(0xFF) if held.is_contiguous() else held.zero_()
        else:
            held.copy_(new)
