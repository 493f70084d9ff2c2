"""`hybrid chat`: a conversation in the terminal, or the answer to one message."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

import click

from hybrid.cli.options import (
    SAMPLING,
    grammar_options,
    json_option,
    model_argument,
    pick,
    placement_options,
    sampling_options,
)
from hybrid.cli.session import checked_text, emit, open_session, read_form, read_prompt
from hybrid.errors import BadRequestError


@click.command()
@model_argument
@click.option("-p", "--prompt", metavar="TEXT", help="Answer this one message and exit.")
@click.option("--system", metavar="TEXT", help="System prompt: who the model is to be.")
@click.option("--chat-template", metavar="NAME|FILE", help="In place of the model's own: chatml, …, or a Jinja file.")
@grammar_options
@sampling_options
@placement_options
@json_option
def command(model: str | None, prompt: str | None, system: str | None, as_json: bool, **options: Any) -> None:
    """Chat with a model.

    With -p, or with something piped into stdin (all of it is one message), the answer goes to stdout and the program
    exits. In the chat, /help lists what can be typed; Ctrl-C stops an answer, Ctrl-D leaves.
    """
    if system is not None:
        system = checked_text(system)
    form = read_form(options)
    if prompt is None and sys.stdin.isatty() and not as_json:
        _converse(model, system, options, form)
        return
    text = read_prompt(prompt, None).strip()
    if not text:
        raise BadRequestError("There is no message to answer.")
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    with open_session(model, options) as session:
        stream = session.model.chat(messages, stream=True, **pick(SAMPLING, options), **form)
        emit(session, stream, as_json=as_json, max_tokens=options["max_tokens"], chat=True)


def _converse(model: str | None, system: str | None, options: dict[str, Any], form: dict[str, Any]) -> None:
    from hybrid.apps.chat import Chat
    from hybrid.apps.lines import LineReader, silent_keyboard

    with ExitStack() as stack:
        with silent_keyboard():  # what is typed while the model loads waits for the prompt
            session = stack.enter_context(open_session(model, options))
        answering = {**pick(SAMPLING, options), **form}
        chat = Chat(session.model, answering, system=system, before_output=session.say_notes)
        chat.run(LineReader(list(chat.commands)))
