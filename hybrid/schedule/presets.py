"""Assumed machines: presets, and files in the presets' form."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hybrid.errors import BadRequestError
from hybrid.files import read_all
from hybrid.printable import printable
from hybrid.schedule.machine import Cpu, Gpu, Machine, Memory, Rates

PRESETS_FILE = Path(__file__).with_name("presets.toml")
RATES = tuple(field.name for field in dataclasses.fields(Rates))
FIGURES = {"vram_bytes", "ram_bytes", "cores", *RATES}
TEXTS = {"description", "gpu"}


def assumed_machine(name_or_file: str) -> Machine:
    """The machine a `--machine` argument means: a preset's name, or a TOML file.

    Raises BadRequestError in one sentence for a name there is none of, and a file that cannot be used.
    """
    presets = preset_tables()
    if name_or_file in presets and name_or_file != "default":
        return _machine(name_or_file, presets[name_or_file])
    path = Path(os.path.expanduser(name_or_file))
    if path.suffix != ".toml" and os.sep not in name_or_file:
        raise BadRequestError(
            f"There is no machine {name_or_file!r}; there are {', '.join(preset_names())}, or a file.toml."
        )
    try:
        with path.open("rb") as file:
            table = tomllib.loads(read_all(file).decode())
    except OSError as error:
        raise BadRequestError(f"{path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(f"{path} is not a TOML file ({error}).") from error
    return _machine(str(path), table)


def preset_names() -> list[str]:
    """Names of the assumed machines that come with the program."""
    return [name for name in preset_tables() if name != "default"]


def describe_preset(name: str) -> str:
    """One phrase about a preset."""
    return str(preset_tables()[name]["description"])


@cache
def preset_tables() -> Mapping[str, Mapping[str, Any]]:
    """The presets as they stand in the file, `default` among them."""
    return tomllib.loads(PRESETS_FILE.read_text())


def _machine(name: str, table: Mapping[str, Any]) -> Machine:
    given, sources = _figures(name, table)
    default, default_sources = _figures("default", preset_tables()["default"])
    figures = {**default, **given}
    sources = {**default_sources, **sources}
    gpus: tuple[Gpu, ...] = ()
    if figures["vram_bytes"]:
        if not figures.get("device_bytes_per_s") or not figures.get("device_flop_per_s"):
            raise BadRequestError(f"{name} has vram_bytes but lacks device_bytes_per_s or device_flop_per_s.")
        vram = int(figures["vram_bytes"])
        gpus = (Gpu(device="cuda:0", name=_words(table, "gpu", "a GPU"), total_bytes=vram, free_bytes=vram),)
    cores, ram = int(figures["cores"]), int(figures["ram_bytes"])
    return Machine(
        name=printable(name),
        assumed=True,
        gpus=gpus,
        cpu=Cpu(model="assumed", cores=cores, physical_cores=cores, logical_cpus=cores, quota=None),
        memory=Memory(total_bytes=ram, available_bytes=ram, limit_bytes=None),
        rates=Rates(**{rate: figures[rate] for rate in RATES if rate in figures}),
        notes=(f"The figures are assumed ({_words(table, 'description', name)}), not measured.",),
        sources={key: sources[key] for key in figures},
    )


def _words(table: Mapping[str, Any], key: str, otherwise: str) -> str:
    """A text of a file, for a terminal."""
    return printable(str(table.get(key, otherwise)))


def _figures(name: str, table: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    figures: dict[str, float] = {}
    sources: dict[str, str] = {}
    for key, entry in table.items():
        if key in TEXTS:
            continue
        if key not in FIGURES:
            raise BadRequestError(
                f"{name} has {key!r}, which is no figure of a machine ({', '.join(sorted(FIGURES))})."
            )
        value = entry.get("value") if isinstance(entry, dict) else entry
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e18:
            raise BadRequestError(f"{key} of {name} must be a number of 0 or more, not {value!r}.")
        if key not in ("vram_bytes",) and not value:
            raise BadRequestError(f"{key} of {name} must not be 0.")
        if key == "cores" and value != int(value):
            raise BadRequestError(f"{key} of {name} must be a whole number, not {value!r}.")
        figures[key] = float(value)
        sources[key] = str(entry.get("source", "")) if isinstance(entry, dict) else f"stated in {name}"
    return figures, sources
