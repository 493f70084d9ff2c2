"""Run a GGUF model split at a layer: the early layers on the GPU in PyTorch, the late ones on the CPU in llama.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid.apps.summarize.api import Summary, summarize
    from hybrid.errors import HybridError
    from hybrid.runtime.api import Hybrid
    from hybrid.runtime.completion import Completion, Stream

__version__ = "0.1.0"
__all__ = ["Completion", "Hybrid", "HybridError", "Stream", "Summary", "__version__", "summarize"]

_HOMES = {
    "Completion": "hybrid.runtime.completion",
    "Hybrid": "hybrid.runtime.api",
    "HybridError": "hybrid.errors",
    "Stream": "hybrid.runtime.completion",
    "Summary": "hybrid.apps.summarize.api",
    "summarize": "hybrid.apps.summarize.api",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `hybrid --help` pays for nothing (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
