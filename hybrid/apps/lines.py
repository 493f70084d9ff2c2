"""Reading lines from a person: editing, history that outlives the program, completion of commands."""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output


class LineReader:
    """Asks for a line on the terminal; Alt-Enter (Esc, Enter) begins another line of the same message."""

    def __init__(self, commands: list[str], history: Path | None = None) -> None:
        """`commands` are completed by Tab; `history` is the file that remembers (default: in the user's state
        directory). Where it cannot be written, the program forgets when it ends."""
        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        self._session: PromptSession[str] = PromptSession(
            history=_history(history or Path(platformdirs.user_state_dir("hybrid")) / "chat_history"),
            completer=_CommandCompleter(commands),
            complete_while_typing=False,
            key_bindings=keys,
            prompt_continuation="  ",
            # Where stdout goes into a file, the line is edited on stderr.
            output=None if sys.stdout.isatty() else create_output(always_prefer_tty=True),
        )

    def read(self) -> str:
        """One message. Raises KeyboardInterrupt for Ctrl-C, EOFError for Ctrl-D."""
        return self._session.prompt("> ")


@contextmanager
def silent_keyboard() -> Iterator[None]:
    """Within, what is typed is not echoed into what is printed; it stays there for the next `read`."""
    try:
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
    except (OSError, ValueError, termios.error):  # stdin is no terminal
        yield
        return
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(fd, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


class _CommandCompleter(Completer):
    """Completes a line that begins with a slash."""

    def __init__(self, commands: list[str]) -> None:
        self._commands = commands

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        typed = document.text
        if typed.startswith("/"):
            yield from (Completion(c, start_position=-len(typed)) for c in self._commands if c.startswith(typed))


def _history(path: Path) -> History:
    """The history file, readable by its owner only."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)
