"""The chat's slash commands: what is typed after `/`, and what comes of it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hybrid.apps.chat import facts, settings
from hybrid.apps.chat.conversation import TITLE_LENGTH, Conversation, one_line
from hybrid.apps.chat.export import export
from hybrid.apps.chat.talk import Asking, Talk
from hybrid.apps.commands import arguments
from hybrid.errors import BadRequestError, HybridError

if TYPE_CHECKING:
    from hybrid import Hybrid
    from hybrid.schedule.placement import Placement

LISTED = 20
"""Conversations that `/list` shows."""
LISTED_LENGTH = 54
"""Characters of each, such that its line fits 80 columns."""
SHOWN_LINES, SHOWN_LENGTH = 12, 2000
"""Of an edited message, what is shown."""
MOST_DOCUMENT_BYTES = 256 << 20


class Desk(Protocol):
    """What commands need of the program around the chat."""

    def edit(self, text: str) -> str | None:
        """`text` as the person changed it in an editor; None where they did not."""

    def load(self, model: str, changes: Mapping[str, Any]) -> Hybrid:
        """Load a model with the options the chat was started with and these changes."""

    def tune_options(self, text: str) -> Mapping[str, Any]:
        """What `hybrid tune`'s options in `text` ask for. Raises BadRequestError for what is none."""

    def tune(self, model: Path, name: str, placement: Placement, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Measure which placement of the model is quickest where this one runs, and return what `load` needs for
        it."""

    def reasoning(self) -> str:
        """What the model thought before its last answer; "" where it did not."""


@dataclass(frozen=True)
class Outcome:
    """What a line led to."""

    text: str = ""
    """For the person."""
    asking: Asking | None = None
    """An answer that is now to be made."""
    leave: bool = False


@dataclass(frozen=True)
class Command:
    """A slash command."""

    run: Callable[[str], Outcome]
    argument: str
    help: str


class Commands:
    """All of them, for one Talk."""

    def __init__(self, talk: Talk, desk: Desk) -> None:
        self.talk, self.desk = talk, desk
        self.table: dict[str, Command] = {
            "/help": Command(self._help, "", "this list"),
            "/retry": Command(self._retry, "", "answer the last message again"),
            "/edit": Command(self._edit, "", "change the last message in $EDITOR and answer that"),
            "/undo": Command(self._undo, "", "take the last message and its answer back"),
            "/clear": Command(self._clear, "", "begin a new conversation (the system prompt stays)"),
            "/system": Command(self._system, "TEXT", "set the system prompt; alone: show it"),
            "/file": Command(self._file, "PATH", "add a document, which is read with your next message"),
            "/compact": Command(self._compact, "", "let the model summarise the older turns"),
            "/save": Command(self._save, "NAME", "give the conversation a name (it is saved as it goes anyway)"),
            "/load": Command(self._load, "NAME", "go on with another conversation, by name or number"),
            "/list": Command(self._list, "", "the latest conversations"),
            "/export": Command(self._export, "FILE", "write the conversation as FILE.md or FILE.json; -f replaces"),
            "/set": Command(self._set, "NAME VALUE", "how to sample: temp 0.7, top_k 40, seed 1, …; alone: show all"),
            "/think": Command(self._think, "", "what the model thought before its last answer"),
            "/stats": Command(self._stats, "", "what the last answer took, and what runs where"),
            "/memory": Command(self._memory, "", "memory on both sides, predicted and measured"),
            "/split": Command(self._split, "", "which layers run where"),
            "/tune": Command(
                self._tune, "OPTIONS", "measure which split is quickest (as hybrid tune) and go on with that"
            ),
            "/model": Command(self._model, "NAME", "go on with another model; alone: show this one's"),
            "/exit": Command(self._exit, "", "leave (so does Ctrl-D)"),
        }

    def obey(self, line: str) -> Outcome:
        """Do what a line that begins with a slash says. Raises HybridError with a sentence where that cannot be."""
        name, _, rest = line.strip().partition(" ")
        name = "/exit" if name == "/quit" else name
        command = self.table.get(name)
        if command is None:
            raise BadRequestError(
                f"There is no command {name}; /help lists them. To send the line, put a space before it."
            )
        return command.run(rest.strip())

    def completions(self, line: str) -> Iterator[tuple[str, str]]:
        """(text, explanation) of what may stand in the place of the last word of `line`; not file names."""
        name, space, rest = line.partition(" ")
        if not space:
            yield from ((n, c.help) for n, c in self.table.items() if n.startswith(name))
        elif name == "/set" and " " not in rest:
            yield from ((s, "") for s in settings.SETTINGS if s.startswith(rest.replace("-", "_")))
        elif name == "/load":
            for entry in self.talk.store.list(LISTED):
                word = entry.name or str(entry.id)
                if word.startswith(rest):
                    yield word, entry.title
        elif name == "/model":
            from hybrid.model.catalog import catalog

            yield from ((n, entry.description) for n, entry in catalog().items() if n.startswith(rest))

    # -- the conversation --------------------------------------------------------------------------------------------

    def _help(self, _: str) -> Outcome:
        width = max(len(f"{name} {c.argument}") for name, c in self.table.items())
        lines = [f"{f'{name} {c.argument}':{width}}  {c.help}" for name, c in self.table.items()]
        keys = [
            "Enter sends, Alt-Enter begins a new line, Tab completes; a message in triple quotes may have many lines.",
            "Ctrl-C stops an answer, twice leaves. To send a message that begins with a slash, put a space before it.",
        ]
        return Outcome("\n".join([*lines, *keys]))

    def _retry(self, _: str) -> Outcome:
        return Outcome(asking=self.talk.retry())

    def _edit(self, _: str) -> Outcome:
        asked = self.talk.conversation.last_asked()
        if asked is None:
            raise BadRequestError("There is no message to edit.")
        before = self.talk.conversation.messages[asked].content
        text = (self.desk.edit(before) or "").strip()
        if not text or text == before.strip():
            return Outcome("Nothing was changed.")
        return Outcome(_as_sent(text), asking=self.talk.edit(text))

    def _undo(self, _: str) -> Outcome:
        message = self.talk.undo()
        return Outcome(f"Taken back: {one_line(message.info.get('name') or message.content, TITLE_LENGTH)}")

    def _clear(self, _: str) -> Outcome:
        old = self.talk.conversation
        said = self.talk.begin(Conversation(old.model, old.system))
        kept = f" {old.label} is kept: /load {old.name or old.id} goes on with it." if old.messages else ""
        return Outcome("\n".join(filter(None, [said, f"A new conversation.{kept}"])))

    def _system(self, text: str) -> Outcome:
        if text:
            self.talk.set_system(text)
        system = self.talk.conversation.system
        return Outcome(f"System prompt: {system}" if system else "There is no system prompt.")

    def _file(self, argument: str) -> Outcome:
        from hybrid.apps.summarize.document import read_document

        path = _path(_wanted(argument, "/file PATH"))
        if not path.exists():
            raise BadRequestError(f"There is no file {path}.")
        if not path.is_file():
            raise BadRequestError(f"{path} is not a file.")
        if path.stat().st_size > MOST_DOCUMENT_BYTES:
            raise BadRequestError(f"{path} has more than {MOST_DOCUMENT_BYTES >> 20} MiB, which no context holds.")
        document = read_document(path)
        n_tokens = self.talk.add_document(path.name, document.text)
        added = f"{path.name} was added: {n_tokens:,} tokens. It is read with your next message."
        return Outcome("\n".join([added, *document.notes]))

    def _compact(self, _: str) -> Outcome:
        return Outcome(asking=self.talk.compact())

    # -- kept conversations ------------------------------------------------------------------------------------------

    def _save(self, name: str) -> Outcome:
        self.talk.store.rename(self.talk.conversation, _wanted(name, "/save NAME"))
        if self.talk.store.path is None:
            return Outcome(f"It is called {name} until you leave; this conversation is not saved (/export writes it).")
        return Outcome(f"Saved as {name}; `hybrid chat --resume {shlex.quote(name)}` goes on with it.")

    def _load(self, name: str) -> Outcome:
        store = self.talk.store
        id = store.find(_wanted(name, "/load NAME"))
        if id == self.talk.conversation.id:
            return Outcome("That is this conversation.")
        if not store.open(id):
            raise BadRequestError("That conversation is open in another window; close it there first.")
        conversation = store.load(id)
        conversation.model = self.talk.conversation.model
        said = self.talk.begin(conversation)
        return Outcome("\n".join(filter(None, [f"{conversation.label}, {_count(conversation)}.", said])))

    def _list(self, _: str) -> Outcome:
        entries = self.talk.store.list(LISTED)
        if not entries:
            return Outcome("There are no conversations yet.")
        rows = []
        for entry in entries:
            here = "*" if entry.id == self.talk.conversation.id else " "
            what = one_line(f"{entry.name}: {entry.title}" if entry.name else entry.title, LISTED_LENGTH)
            rows.append(f"{here}{entry.id:>4}  {entry.updated[:16].replace('T', ' ')}  {what}")
        return Outcome("\n".join(rows))

    def _export(self, argument: str) -> Outcome:
        replace = argument.startswith("-f ")
        path = _path(_wanted(argument.removeprefix("-f ").strip(), "/export FILE.md|FILE.json"))
        n = export(self.talk.conversation, path, replace=replace)
        return Outcome(f"{n} message{'s' * (n != 1)} written to {path}.")

    # -- the model ---------------------------------------------------------------------------------------------------

    def _set(self, text: str) -> Outcome:
        options = self.talk.options
        return Outcome(settings.change(options, text) if text else settings.listing(options))

    def _think(self, _: str) -> Outcome:
        return Outcome(self.desk.reasoning() or "The model did not think aloud before its last answer.")

    def _stats(self, _: str) -> Outcome:
        return Outcome(facts.stats(self.talk.model, self.talk.last))

    def _memory(self, _: str) -> Outcome:
        return Outcome(facts.memory(self.talk.model))

    def _split(self, _: str) -> Outcome:
        return Outcome(facts.split(self.talk.model))

    def _tune(self, text: str) -> Outcome:
        options = self.desk.tune_options(text)
        name, model = self.talk.conversation.model, self.talk.model
        path, placement = model.model_path, model.placement
        return self._reload(name, lambda: self.desk.load(name, self.desk.tune(path, name, placement, options)))

    def _model(self, name: str) -> Outcome:
        if not name:
            return Outcome(f"{self.talk.conversation.model} ({self.talk.model.model_path})")
        from hybrid.model.catalog import resolve_model
        from hybrid.model.file import ModelFile

        with ModelFile(resolve_model(name)):  # what is no model is refused while the old one is still there
            pass
        return self._reload(name, lambda: self.desk.load(name, {}))

    def _reload(self, name: str, load: Callable[[], Hybrid]) -> Outcome:
        """Free the model and load another in its place; where that fails, the old one again."""
        talk, old = self.talk, self.talk.conversation.model
        as_it_was = arguments(talk.model.placement)
        talk.model.close()
        try:
            model = load()
        except (HybridError, KeyboardInterrupt) as e:
            talk.use(self.desk.load(old, as_it_was), old)
            raise BadRequestError(f"{str(e).rstrip('.') or 'Interrupted'}; {old} was loaded again.") from e
        talk.use(model, name)
        again = " What was said is read again with your next message." if talk.conversation.live else ""
        return Outcome(f"{model.model_path.stem}, {model.placement.where}.{again}")

    def _exit(self, _: str) -> Outcome:
        return Outcome(leave=True)


def _as_sent(text: str) -> str:
    """A message as the prompt shows it; of a long one the beginning."""
    shown = "\n".join(text[:SHOWN_LENGTH].split("\n")[:SHOWN_LINES])
    return "> " + (shown if shown == text else f"{shown} …").replace("\n", "\n  ")


def _path(argument: str) -> Path:
    """A path as it is typed, or as a shell has it and a terminal inserts it for a dropped file: quoted or escaped."""
    path = Path(os.path.expanduser(argument))
    if not path.exists():
        with suppress(ValueError):
            if len(words := shlex.split(argument)) == 1:
                return Path(os.path.expanduser(words[0]))
    return path


def _wanted(argument: str, usage: str) -> str:
    """An argument that must be there."""
    if not argument:
        raise BadRequestError(f"Something is missing: {usage}.")
    return argument


def _count(conversation: Conversation) -> str:
    n = len(conversation.messages)
    return f"{n} message{'s' * (n != 1)}"
