"""Imports llama-cpp-python's ctypes module without the rest of that package.

The package's `__init__` also brings its high-level API: jinja2, chat formats, a tokenizer. That is a tenth of a second
before the first token which nobody here uses. So the package is put in place unexecuted, and runs the first time
somebody asks it for something it does not have yet: `from llama_cpp import Llama` works as always.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class _Unexecuted(ModuleType):
    """A package whose `__init__` has not run yet."""

    def __getattr__(self, name: str) -> Any:
        self.__class__ = ModuleType  # type: ignore[assignment]
        spec = self.__spec__
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(self)
        return getattr(self, name)


def import_bindings() -> tuple[Any, str]:
    """The module `llama_cpp.llama_cpp`, and the version of the package. Raises ImportError, or whatever it raises."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None or spec.submodule_search_locations is None:
        raise ImportError("it is not installed")
    if "llama_cpp" not in sys.modules:
        package = _Unexecuted("llama_cpp")
        package.__spec__ = spec
        package.__loader__ = spec.loader
        package.__file__ = spec.origin
        package.__package__ = "llama_cpp"
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["llama_cpp"] = package
    try:
        bindings = importlib.import_module("llama_cpp.llama_cpp")
    except BaseException:
        if isinstance(sys.modules.get("llama_cpp"), _Unexecuted):
            del sys.modules["llama_cpp"]
        raise
    version = re.search(r'^__version__ = "([^"]+)"', Path(spec.origin).read_text(), re.MULTILINE)
    return bindings, version[1] if version else "unknown"
