"""One specialisation of a kernel: what a launch and the compile proof have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

TRITON_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "u8"}
"""Triton's names of torch's types."""


@dataclass(frozen=True)
class Variant:
    """A kernel with its compile-time constants. `types` are Triton's of the other arguments, in order; those called in
    `aligned` are known to be multiples of 16, as Triton finds out at a launch."""

    name: str
    kernel: Any
    constants: Mapping[str, Any]
    types: Mapping[str, str]
    aligned: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    registers: int = 0
    """That a thread may take on NVIDIA's GPUs. Where ptxas is not told (0), it sometimes spills a few to fit one more
    program into a multiprocessor."""

    def options_for(self, nvidia: bool) -> dict[str, Any]:
        """Of a compilation for a GPU of NVIDIA's or of AMD's."""
        return {**self.options, "maxnreg": self.registers} if nvidia and self.registers else {**self.options}

    def launch(self, grid: tuple[int, ...], *args: Any) -> None:
        """Queue the kernel on the current stream; it is compiled first where that has not been done."""
        self.kernel[grid](*args, **self.constants, **self.options_for(torch.version.hip is None))
