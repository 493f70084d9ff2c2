"""`hybrid chat`: a conversation in the terminal, or the answer to one message."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from hybrid.cli.config_file import Configured
from hybrid.cli.options import (
    PLACEMENT,
    SAMPLING,
    grammar_options,
    json_option,
    model_argument,
    pick,
    placement_options,
    sampling_options,
)
from hybrid.cli.session import Notes, checked_text, emit, open_session, read_form, read_prompt
from hybrid.cli.units import Bytes
from hybrid.errors import BadRequestError

if TYPE_CHECKING:
    from hybrid import Hybrid
    from hybrid.apps.chat.conversation import Conversation
    from hybrid.apps.chat.store import Store
    from hybrid.cli.progress import ProgressBar

TUNING = ("device", "engine", "n_batch", "vram_reserve")
"""Options that bound what `/tune` tries, too."""


@click.command(cls=Configured)
@model_argument
@click.option("-p", "--prompt", metavar="TEXT", help="Answer this one message and exit.")
@click.option("--system", metavar="TEXT", help="System prompt: who the model is to be.")
@click.option("--system-file", metavar="FILE", help="System prompt, from a file.")
@click.option("--continue", "resume_last", is_flag=True, help="Go on with the last conversation.")
@click.option("--resume", metavar="NAME", help="Go on with the conversation of that name or number.")
@click.option("--on-full", type=click.Choice(["stop", "compact"]), default="stop", show_default=True,
              help="A message for which the context has no room: refuse it, or summarise older turns.")  # fmt: skip
@click.option("--state-limit", type=Bytes(), default="4GiB", show_default=True, metavar="BYTES",
              help="Disk space for the KV states of conversations, with which they open at once; 0: none.")  # fmt: skip
@click.option("--think", type=click.Choice(["fold", "show"]), default="fold", show_default=True,
              help="What a model thinks before it answers: folded away afterwards, or left standing.")  # fmt: skip
@click.option("--plain", is_flag=True, help="Neither colours nor Markdown (so does NO_COLOR).")
@click.option("-q", "--quiet", is_flag=True, help="No line of figures after each answer.")
@click.option("--chat-template", metavar="NAME|FILE", help="In place of the model's own: chatml, …, or a Jinja file.")
@grammar_options
@sampling_options
@placement_options
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: str | None,
    prompt: str | None,
    system: str | None,
    system_file: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Chat with a model.

    With -p, or with something piped into stdin (all of it is one message), the answer goes to stdout and the program
    exits. In the chat, /help lists what can be typed; Ctrl-C stops an answer, Ctrl-D leaves. Conversations are saved
    as they go, in your data directory. Defaults can be set in a file, see `hybrid config`.
    """
    if system is not None and system_file is not None:
        typed = [ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE for name in ("system", "system_file")]
        if typed[0] == typed[1]:
            raise click.UsageError("Give --system or --system-file, not both")
        system, system_file = (system, None) if typed[0] else (None, system_file)
    if system is not None:
        system = checked_text(system)
    elif system_file is not None:
        system = read_prompt(None, system_file)
    form = read_form(options)
    if prompt is None and sys.stdin.isatty():
        if as_json:
            raise click.UsageError("--json is for one message: give it with -p TEXT or on stdin")
        sys.exit(_converse(model, system, options, form))
    if options["resume_last"] or options["resume"] is not None:
        raise click.UsageError("--continue and --resume are for a chat at a terminal")
    text = read_prompt(prompt, None).strip()
    if not text:
        raise BadRequestError("There is no message to answer.")
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    with open_session(model, options) as session:
        stream = session.model.chat(messages, stream=True, **pick(SAMPLING, options), **form)
        emit(session, stream, as_json=as_json, max_tokens=options["max_tokens"], chat=True)


def _converse(model: str | None, system: str | None, options: dict[str, Any], form: dict[str, Any]) -> int:
    """The chat at a terminal; its exit code."""
    import platformdirs

    from hybrid.apps.chat.states import StateFolder
    from hybrid.apps.chat.talk import Talk
    from hybrid.cli.progress import ProgressBar
    from hybrid.cli.terminal.chat import TerminalChat
    from hybrid.cli.terminal.keyboard import silent_keyboard
    from hybrid.cli.terminal.lines import LineReader
    from hybrid.cli.terminal.screen import Screen

    loader = _Loader(options, ProgressBar())
    screen = Screen(
        plain=options["plain"], quiet=options["quiet"], thinking=options["think"], before_output=loader.say_notes
    )
    store, trouble = _open_store()
    with closing(store):
        conversation = _choose(store, options, screen.say)
        conversation.system = system if system is not None else conversation.system
        name = _full_name(model or conversation.model)
        conversation.model = name
        with silent_keyboard():  # what is typed while the model loads waits for the prompt
            loaded = loader.load(name, {})
        try:
            # A store that forgets has numbers of its own, which are others' in the folder.
            folder = Path(platformdirs.user_cache_dir("hybrid")) / "states"
            states = None if trouble else StateFolder(folder, options["state_limit"])
            talk = Talk(
                loaded,
                conversation,
                store,
                options={**pick(SAMPLING, options), **form},
                states=states,
                on_full=options["on_full"],
            )
            tuning = {**pick(TUNING, options), "threads": options["n_threads"]}
            chat = TerminalChat(talk, screen, loader.load, tuning)
            where = loaded.placement
            screen.say(f"{loaded.model_path.stem}, {where.where}.\n/help lists the commands, Ctrl-D leaves.")
            screen.say(f"{trouble}\n" if trouble else "")
            if conversation.messages:
                screen.say(_reopened(conversation, talk.restore()))
            try:
                return chat.run(LineReader(chat.commands.completions))
            finally:
                if lost := talk.leave():
                    screen.say(lost)
        finally:
            if loader.model is not None:
                loader.model.close()


class _Loader:
    """Loads models with the options of the command line, and says what they noted."""

    def __init__(self, options: Mapping[str, Any], progress: ProgressBar) -> None:
        self._options, self._progress = options, progress
        self._notes = Notes(progress)
        self.model: Hybrid | None = None

    def load(self, name: str, changes: Mapping[str, Any]) -> Hybrid:
        """Load a model; the one before must have been closed."""
        from hybrid import Hybrid

        try:
            self.model = Hybrid(
                name,
                progress=self._progress,
                chat_template=self._options.get("chat_template"),
                **{**pick(PLACEMENT, self._options), **changes},
            )
        finally:
            self._progress.clear()
        self._notes = Notes(self._progress)
        self.say_notes()
        return self.model

    def say_notes(self) -> None:
        """Print the model's notes that were not printed yet, on stderr."""
        if self.model is not None:
            self._notes.say(self.model)


def _open_store() -> tuple[Store, str]:
    """The user's conversations; where they cannot be had, a store in memory and a sentence that says so."""
    import platformdirs

    from hybrid.apps.chat.store import Store
    from hybrid.errors import BadFileError

    path = Path(platformdirs.user_data_dir("hybrid")) / "conversations.sqlite3"
    try:
        return Store(path), ""
    except OSError as e:
        return Store(None), f"This conversation is not saved: {e.strerror} ({path})."
    except BadFileError as e:
        return Store(None), f"This conversation is not saved. {e}"


def _choose(store: Store, options: Mapping[str, Any], say: Any) -> Conversation:
    """The conversation to go on with, open in this process; a new one where none was asked for."""
    from hybrid.apps.chat.conversation import Conversation

    if options["resume"] is not None:
        if options["resume_last"]:
            raise click.UsageError("Give --continue or --resume, not both")
        id = store.find(checked_text(options["resume"]))
        if not store.open(id):
            raise BadRequestError("That conversation is open in another window; close it there first.")
        return store.load(id)
    if not options["resume_last"]:
        return Conversation()
    elsewhere: list[str] = []
    for entry in store.list():
        if not entry.n_messages:
            continue
        if store.open(entry.id):
            if len(elsewhere) == 1:
                say(f"“{elsewhere[0]}” is open in another window; the one before it is opened.")
            elif elsewhere:
                say(f"{len(elsewhere)} later conversations are open in other windows; the last other one is opened.")
            return store.load(entry.id)
        elsewhere.append(entry.name or entry.title)
    raise BadRequestError(
        "Every conversation is open in another window." if elsewhere else "There is no conversation to go on with yet."
    )


def _reopened(conversation: Conversation, state: str) -> str:
    n = len(conversation.messages)
    lines = [f"{conversation.label}: {n} message{'s' * (n != 1)}. {state}"]
    if conversation.unanswered:
        lines.append("Your last message has no answer yet: /retry answers it.")
    return "\n".join(lines) + "\n"


def _full_name(name: str) -> str:
    """A model as it can be found again from another folder."""
    from hybrid.model.catalog import DEFAULT_MODEL, catalog

    name = name or DEFAULT_MODEL
    return name if name in catalog() or not os.path.exists(name) else os.path.abspath(name)
