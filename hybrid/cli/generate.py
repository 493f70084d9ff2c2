"""`hybrid generate`: continue a prompt."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from hybrid.cli.options import SAMPLING, json_option, model_argument, pick, placement_options, sampling_options
from hybrid.cli.session import open_session, read_prompt, result_object, say_if_full


@click.command()
@model_argument
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt.")
@click.option("-f", "--file", metavar="FILE", help="Read the prompt from FILE; - is stdin.")
@sampling_options
@placement_options
@json_option
def command(model: str | None, prompt: str | None, file: str | None, as_json: bool, **options: Any) -> None:
    """Continue a prompt, given with -p, in a file, or on stdin.

    The text goes to stdout as it is made; what the program has to say goes to stderr.
    """
    text = read_prompt(prompt, file)
    with open_session(model, options) as session:
        stream = session.model.generate(text, stream=True, **pick(SAMPLING, options))
        last = ""
        for piece in stream:
            session.progress.clear()
            if not as_json:
                sys.stdout.write(piece)
                sys.stdout.flush()
            last = piece
        session.progress.clear()
        completion = stream.completion
        assert completion is not None
        if as_json:
            click.echo(json.dumps(result_object(session.model, completion), ensure_ascii=False))
        elif not last.endswith("\n"):
            click.echo()
        say_if_full(session.model, completion, options["max_tokens"])
