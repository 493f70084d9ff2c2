"""`hybrid config`: the person's own defaults."""

from __future__ import annotations

import importlib
import json
from typing import Any

import click

from hybrid.cli.config_file import SECTIONS, config_path, effective
from hybrid.cli.options import json_option

EXAMPLE = """\
[chat]
model = "smollm2-135m"
system = "You are a helpful assistant."
temp = 0.7
"""


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Show the defaults of `hybrid chat` and `hybrid generate`, and which of them your config.toml sets.

    The file has a table for each of the two, with the long names of their options; what is given on the command line
    goes before it.
    """
    path = config_path()
    found = {section: _section(section, path) for section in SECTIONS}
    if as_json:
        tables = {
            section: {key: {"value": value, "set": said} for key, (value, said) in keys.items()}
            for section, keys in found.items()
        }
        click.echo(json.dumps({"path": str(path), "exists": path.exists(), **tables}, ensure_ascii=False))
        return
    if path.exists():
        click.echo(f"{path} (* is set there)")
    else:
        click.echo(f"There is no {path} yet. It may say, for example:\n\n{EXAMPLE}")
    for section, keys in found.items():
        click.echo(f"\n[{section}]" if path.exists() else f"[{section}]")
        for key, (value, said) in keys.items():
            click.echo(f"{'*' if said else ' '} {key} = {_toml(value)}" if value is not None else f"  {key}: not set")


def _section(section: str, path: Any) -> Any:
    target: click.Command = importlib.import_module(f"hybrid.cli.{section}").command
    target.name = section
    return effective(target, click.Context(target, info_name=section), path)


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else json.dumps(value, ensure_ascii=False)
