"""Where the counting of live storages used to be."""

from hybrid.head.memory import LiveBytes

__all__ = ["LiveBytes"]
