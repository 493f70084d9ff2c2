"""The head's device: which one there is, and what of its memory is free."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from hybrid.errors import UnsupportedError
from hybrid.schedule import facts
from hybrid.schedule.ledger import CUDA_CONTEXT_BYTES
from hybrid.schedule.limits import available_ram


def default_device() -> str | None:
    """The accelerator that is used where none was named; None where PyTorch can use none. Torch is not imported where
    there is plainly none (the import costs over a second)."""
    nvidia = any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))
    apple = sys.platform == "darwin"
    if not nvidia and not apple:
        return None
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if apple and torch.backends.mps.is_available() else None


def vram_limit(device: str, asked: int | None, reserve: int) -> int | None:
    """Bytes of a device that may be taken now: those asked for, or what is free, less the reserve. None: an emulated
    device without a budget. Raises UnsupportedError where there is no such device."""
    if known_device(device) == "cpu":
        return asked
    free = vram_of(device)[0]
    return max(0, free - reserve) if asked is None else asked


def known_device(name: str) -> str:
    """The name, if it is one of a device that a head may have, here or elsewhere. Raises UnsupportedError if not."""
    if not re.fullmatch(r"cpu|mps|(cuda|xpu)(:\d{1,3})?", name):
        raise UnsupportedError(
            f"There is no device called {name!r}; there are cuda, mps, xpu, and cpu, an emulated one."
        )
    return name


def vram_of(device: str) -> tuple[int, int]:
    """Free and total bytes of the head's device: from the driver, which knows it before a CUDA context takes its share;
    from torch where there is no such driver; the RAM where the GPU shares it."""
    index = device.partition(":")[2] or "0"
    for gpu in facts.gpus():
        if gpu.device == f"cuda:{index}" and device.startswith("cuda"):
            return gpu.free_bytes, gpu.total_bytes
    if device.startswith("cuda"):
        import torch

        try:
            free, total = torch.cuda.mem_get_info(device)
        except (AssertionError, RuntimeError, ValueError) as e:  # no CUDA in this PyTorch, no such GPU, no such name
            why = (str(e).strip().splitlines() or [type(e).__name__])[0].rstrip(".")
            raise UnsupportedError(
                f"The device {device!r} is not available ({why}); use -ngl 0, or --device cpu to emulate it."
            ) from e
        return int(free) + CUDA_CONTEXT_BYTES, int(total)  # asking made the context, which the Ledger counts
    return available_ram(), available_ram()
