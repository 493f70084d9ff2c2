"""The person's own defaults: `config.toml` in the user's config directory, a table a command."""

from __future__ import annotations

import difflib
import errno
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from hybrid.errors import BadRequestError
from hybrid.files import read_all

SECTIONS = ("chat", "generate")
"""Commands that take defaults."""
NEVER = frozenset({"prompt", "file", "continue", "resume", "json", "help"})
"""What is asked for at one time and no other."""


def config_path() -> Path:
    """Where the file is, or would be."""
    import platformdirs

    return Path(platformdirs.user_config_dir("hybrid")) / "config.toml"


def read_config(path: Path) -> dict[str, dict[str, Any]]:
    """Its tables; empty where there is no file. Raises BadRequestError for one that cannot be read, is no TOML, or has
    a table that no command has."""
    try:
        if path.is_fifo():  # to which perhaps nobody ever writes
            raise OSError(errno.EINVAL, "it is a pipe")
        with path.open("rb") as file:
            tables = tomllib.loads(read_all(file).decode())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as e:
        why = getattr(e, "strerror", None) or e
        raise BadRequestError(f"{path} cannot be read: {why}.") from e
    for name, table in tables.items():
        if name not in SECTIONS:
            raise BadRequestError(f"{path} has a table or key {name!r}; there are [chat] and [generate] only.")
        if not isinstance(table, dict):
            raise BadRequestError(f"{path}: {name} must be a table, [{name}].")
    return tables


def settable(command: click.Command) -> dict[str, click.Parameter]:
    """What a table may say: the command's long options without their dashes, and `model`."""
    found: dict[str, click.Parameter] = {}
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            names = [name.removeprefix("--") for name in parameter.opts if name.startswith("--")]
        else:
            names = [parameter.name or ""]
        found.update({name: parameter for name in names if name and name not in NEVER})
    return found


def defaults(command: click.Command, ctx: click.Context, path: Path) -> dict[str, Any]:
    """The file's defaults for `command`, by the names of its parameters. Raises BadRequestError for keys it does not
    have and values they cannot take."""
    section = command.name or ""
    known, found = settable(command), {}
    for key, value in read_config(path).get(section, {}).items():
        parameter = known.get(key)
        if parameter is None:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else "; `hybrid config` lists the keys."
            raise BadRequestError(f"{path}: [{section}] has no key {key!r}{hint}")
        assert parameter.name is not None
        found[parameter.name] = _checked(parameter, value, ctx, f"{path}: [{section}] {key}")
    return found


def _checked(parameter: click.Parameter, value: Any, ctx: click.Context, where: str) -> Any:
    """The value as click wants a default: text, or the truth of a flag."""
    flag = isinstance(parameter, click.Option) and parameter.is_flag
    if isinstance(value, bool) != flag or isinstance(value, (dict, list)):
        raise BadRequestError(f"{where} must be {'true or false' if flag else 'one value'}, not {value!r}.")
    if flag:
        return _flag(parameter, value)
    try:
        parameter.process_value(ctx, str(value))
    except click.BadParameter as e:
        raise BadRequestError(f"{where}: {e.message.rstrip('.')}.") from e
    return str(value)


def _flag(parameter: click.Parameter, value: bool) -> bool:
    """From whether a flag is given to what that makes of its parameter, and back: `--no-…` switches something off."""
    return value is not (getattr(parameter, "flag_value", True) is False)


class Configured(click.Command):
    """A command whose options have the defaults that the person's file says."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does, with the file's defaults; help shows those of the program."""
        if not {*ctx.help_option_names} & {*args}:
            ctx.default_map = {**(ctx.default_map or {}), **defaults(self, ctx, config_path())}
        return super().parse_args(ctx, args)


def effective(command: click.Command, ctx: click.Context, path: Path) -> Mapping[str, tuple[Any, bool]]:
    """Every key of a command: its value, and whether the file says so."""
    said = defaults(command, ctx, path)
    found = {}
    for key, parameter in settable(command).items():
        value = said.get(parameter.name or "", parameter.get_default(ctx))
        if isinstance(value, bool):
            value = _flag(parameter, value)
        found[key] = (value if isinstance(value, (str, int, float, bool)) else None, parameter.name in said)
    return found
