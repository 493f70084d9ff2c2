"""`hybrid models`: list the catalogue, fetch a model from it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from hybrid.errors import BadRequestError
from hybrid.model.catalog import CatalogEntry, catalog, find_entry, models_dir
from hybrid.model.download import Progress, pull

ACCEPT_VARIABLE = "HYBRID_ACCEPT_LICENSE"


@click.group("models", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """List small models for a first run, or fetch one (`hybrid models pull NAME`).

    Pulled models live in the user's data directory, or in $HYBRID_MODELS. Their names work wherever a MODEL is wanted.
    """
    context.obj = as_json
    if context.invoked_subcommand is not None:
        return
    if as_json:
        models = [_described(entry) for entry in catalog().values()]
        click.echo(json.dumps({"directory": str(models_dir()), "models": models}))
        return
    for entry in catalog().values():
        where = str(entry.path) if entry.pulled else f"not here yet: hybrid models pull {entry.name}"
        click.echo(f"{entry.name:<14} {entry.architecture:<8} {entry.size / 2**20:>5.0f} MiB  {entry.licence}")
        click.echo(f"{'':<14} {entry.description}")
        click.echo(f"{'':<14} {where}")


@command.command("pull")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--accept-license", is_flag=True, help=f"Accept the model's terms (or set {ACCEPT_VARIABLE}=gemma).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.pass_context
def pull_command(context: click.Context, names: tuple[str, ...], accept_license: bool, as_json: bool) -> None:
    """Fetch models of the catalogue, verify their sha256 and put them in place.

    Interrupted, it leaves nothing half done in place and goes on from the last finished part when run again.
    """
    as_json = as_json or bool(context.obj)
    entries = [find_entry(name) for name in names]
    results = []
    for entry in entries:
        if entry.terms:
            click.echo(entry.terms.strip(), err=True)
            _check_accepted(entry, accept_license)
        with _bar(entry) as progress:
            fetched = pull(entry, progress)
        results.append({**_described(entry), "fetched": fetched})
        if not as_json:
            click.echo(f"{entry.name}: {'fetched, ' if fetched else 'already here, '}verified: {entry.path}")
    if as_json:
        click.echo(json.dumps({"directory": str(models_dir()), "models": results}))


def _described(entry: CatalogEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "description": entry.description,
        "architecture": entry.architecture,
        "file": entry.file,
        "size": entry.size,
        "sha256": entry.sha256,
        "licence": entry.licence,
        "homepage": entry.homepage,
        "packages": [f"{part.package}=={part.version}" for part in entry.parts],
        "path": str(entry.path),
        "pulled": entry.pulled,
    }


def _check_accepted(entry: CatalogEntry, accept_license: bool) -> None:
    """Raise BadRequestError unless the person accepted the model's terms."""
    accepted = os.environ.get(ACCEPT_VARIABLE, "").replace(",", " ").lower().split()
    if not accept_license and entry.accept not in accepted:
        raise BadRequestError(
            f"{entry.name} comes under the terms named above; to accept them, run: "
            f"hybrid models pull {entry.name} --accept-license (or set {ACCEPT_VARIABLE}={entry.accept})"
        )


@contextmanager
def _bar(entry: CatalogEntry) -> Iterator[Progress]:
    """A progress bar on stderr; silent where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    console = Console(stderr=True)
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(f"{what} {entry.name}", total=total)
            bar.update(tasks[what], completed=done)

        yield progress
