"""Reading hyperparameters out of a GGUF's metadata: the right type and a sane value, or one clear sentence."""

from __future__ import annotations

import math
import struct
from typing import NoReturn

from hybrid.errors import BadFileError
from hybrid.model.file import ModelFile


def f32(value: float) -> float:
    """`value` rounded to single precision, in which llama.cpp computes its hyperparameters."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


class Hparams:
    """The keys of one architecture (`llama.block_count` is `block_count` here)."""

    def __init__(self, file: ModelFile) -> None:
        self.file = file
        self.prefix = file.architecture + "."

    def fail(self, what: str) -> NoReturn:
        """Refuse the file."""
        raise BadFileError(f"{self.file.path} cannot be used: {what}.")

    def has(self, key: str) -> bool:
        """Whether the file gives this key."""
        return self.prefix + key in self.file.metadata

    def integer(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        """A whole number of at least `least`; `default` where the file does not say (None: it must)."""
        value = self.file.metadata.get(self.prefix + key, default)
        if value is None:
            self.fail(f"it does not give {self.prefix}{key}")
        return self._whole(key, value, least)

    def per_layer(self, key: str, n_layers: int, default: list[int] | None = None, *, least: int = 0) -> list[int]:
        """A number for every layer, given once or as an array of exactly `n_layers` (`get_key_or_arr`)."""
        value = self.file.metadata.get(self.prefix + key)
        if value is None:
            if default is None:
                self.fail(f"it does not give {self.prefix}{key}")
            return default
        if not isinstance(value, list):
            return [self._whole(key, value, least)] * n_layers
        if len(value) != n_layers:
            self.fail(f"{self.prefix}{key} has {len(value)} values for {n_layers} layers")
        return [self._whole(key, v, least) for v in value]

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; `default` where the file does not say (None: it must)."""
        value = self.file.metadata.get(self.prefix + key, default)
        if value is None:
            self.fail(f"it does not give {self.prefix}{key}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.fail(f"{self.prefix}{key} is {_shown(value)}, not a number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self.file.metadata.get(self.prefix + key, default)
        if not isinstance(value, str):
            self.fail(f"{self.prefix}{key} is {_shown(value)}, not a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self.file.metadata.get(self.prefix + key, default)
        if not isinstance(value, bool):
            self.fail(f"{self.prefix}{key} is {_shown(value)}, not a boolean")
        return value

    def flags(self, key: str) -> list[bool] | None:
        """An array of booleans (or of numbers meaning them); None where the key is missing or no array (`get_arr`)."""
        value = self.file.metadata.get(self.prefix + key)
        if not isinstance(value, list):
            return None
        if any(not isinstance(v, int) for v in value):
            self.fail(f"{self.prefix}{key} is not an array of booleans")
        return [bool(v) for v in value]

    def _whole(self, key: str, value: object, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(f"{self.prefix}{key} is {_shown(value)}, not a whole number")
        if not least <= value < 1 << 32:
            self.fail(f"{self.prefix}{key} is {value}")
        return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
