"""Readers that are installed only with the extra `documents`."""

from __future__ import annotations

import importlib
from typing import Any

from hybrid.errors import UnsupportedError


def need(module: str, format: str) -> Any:
    """Import `module`, or say with which command to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        package = {"docx": "python-docx"}.get(module, module)
        raise UnsupportedError(f"Reading {format} files needs {package}: pip install {package}") from e
