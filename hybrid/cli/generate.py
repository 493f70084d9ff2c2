"""`hybrid generate`: continue a prompt."""

from __future__ import annotations

from typing import Any

import click

from hybrid.cli.config_file import Configured
from hybrid.cli.options import (
    SAMPLING,
    grammar_options,
    json_option,
    model_argument,
    pick,
    placement_options,
    sampling_options,
)
from hybrid.cli.session import emit, open_session, read_form, read_prompt


@click.command(cls=Configured)
@model_argument
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt.")
@click.option("-f", "--file", metavar="FILE", help="Read the prompt from FILE; - is stdin.")
@grammar_options
@sampling_options
@placement_options
@json_option
def command(model: str | None, prompt: str | None, file: str | None, as_json: bool, **options: Any) -> None:
    """Continue a prompt, given with -p, in a file, or on stdin.

    The text goes to stdout as it is made; what the program has to say goes to stderr.
    """
    text, form = read_prompt(prompt, file), read_form(options)
    with open_session(model, options) as session:
        stream = session.model.generate(text, stream=True, **pick(SAMPLING, options), **form)
        emit(session, stream, as_json=as_json, max_tokens=options["max_tokens"])
