"""Reading messages from a person: editing, many lines, history that outlives the program, completion."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import platformdirs
from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import create_output

from hybrid.cli.terminal.pastes import Pastes

QUOTES = '"""'
PATH_COMMANDS = ("/file ", "/export -f ", "/export ")
MOST_REMEMBERED = 1 << 16
"""Characters of a message that the history file takes."""

Completions = Callable[[str], Iterable[tuple[str, str]]]
"""For a line: what may stand in the place of its last word, each with an explanation."""


class LineReader:
    """Asks for messages on the terminal.

    Enter sends. Alt-Enter (Esc, Enter) begins another line, and so does Enter after an opening `\"\"\"`; what is pasted
    is one message whatever its lines.
    """

    def __init__(self, completions: Completions = lambda line: (), history: Path | None = None) -> None:
        """`completions` are offered by Tab on a line that begins with a slash; `history` is the file that remembers
        (default: in the user's state directory). Where it cannot be written, the program forgets when it ends."""
        self._pastes = Pastes()
        self._session: PromptSession[str] = PromptSession(
            history=_history(history or Path(platformdirs.user_state_dir("hybrid")) / "chat_history", self._pastes),
            completer=_LineCompleter(completions),
            complete_while_typing=False,
            key_bindings=self._keys(),
            prompt_continuation="  ",
            reserve_space_for_menu=4,
            enable_suspend=True,
            enable_open_in_editor=True,
            # Where stdout goes into a file, the line is edited on stderr.
            output=None if sys.stdout.isatty() else create_output(always_prefer_tty=True),
        )

    def read(self) -> str:
        """One message; empty where Ctrl-C dropped what was typed. Raises KeyboardInterrupt for Ctrl-C where nothing
        was, EOFError for Ctrl-D."""
        text = self._pastes.expand(self._session.prompt("> "))
        if not text.startswith(QUOTES):
            return text
        return " " + text.removeprefix(QUOTES).rstrip().removesuffix(QUOTES).strip("\n")

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("escape", "enter")
        @keys.add("enter", filter=Condition(lambda: _open_quotes(get_app().current_buffer.text)))
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add(Keys.BracketedPaste)
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text(self._pastes.shorten(event.data))

        @keys.add("backspace", filter=Condition(lambda: self._behind_paste() > 0))
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.delete_before_cursor(self._behind_paste())

        @keys.add("c-c", filter=Condition(lambda: bool(get_app().current_buffer.text)))
        def _(event: KeyPressEvent) -> None:
            event.app.exit(result="", style="class:aborting")

        return keys

    def _behind_paste(self) -> int:
        """Characters before the cursor that stand for a paste: one key takes them all away."""
        return self._pastes.ending(get_app().current_buffer.document.text_before_cursor)


class _LineCompleter(Completer):
    """Completes a line that begins with a slash: commands, their arguments, file names."""

    def __init__(self, completions: Completions) -> None:
        self._completions = completions
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        typed = document.text_before_cursor
        if not typed.startswith("/"):
            return
        for command in PATH_COMMANDS:
            if typed.startswith(command):
                path = Document(typed[len(command) :])
                yield from self._paths.get_completions(path, complete_event)
                return
        if typed.startswith("/model "):
            yield from self._paths.get_completions(Document(typed.removeprefix("/model ")), complete_event)
        word = typed if " " not in typed else typed.partition(" ")[2]
        for text, explanation in self._completions(typed):
            yield Completion(text, start_position=-len(word), display_meta=explanation)


class _PrivateHistory(FileHistory):
    """The history file. It takes neither what stands for a paste nor what is longer than a person would look for; a
    disk that is full costs the entry, not the chat."""

    def __init__(self, path: Path, pastes: Pastes) -> None:
        super().__init__(path)
        self._pastes = pastes

    def store_string(self, string: str) -> None:
        if len(string) <= MOST_REMEMBERED and self._pastes.expand(string) == string:
            with suppress(OSError, UnicodeError):
                super().store_string(string)


def _open_quotes(text: str) -> bool:
    """Whether a message in triple quotes has not been closed yet."""
    return text.startswith(QUOTES) and not (text.rstrip().endswith(QUOTES) and len(text.strip()) >= 2 * len(QUOTES))


def _history(path: Path, pastes: Pastes) -> History:
    """The history file, readable by its owner only."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600))
    except OSError:
        return InMemoryHistory()
    return _PrivateHistory(path, pastes)
