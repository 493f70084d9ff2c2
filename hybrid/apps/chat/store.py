"""Conversations on disk: one SQLite file in the user's data directory, written as a conversation goes.

In WAL mode, each change one transaction that is on the disk when it returns: a process that is killed loses what it had
not said yet, and several may write at once. A conversation is open in one process at a time, which holds a lock on the
byte of its number in a file beside; the system lets go of it whatever becomes of the process.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hybrid.apps.chat.conversation import Conversation, Message
from hybrid.errors import BadFileError, BadRequestError

VERSION = 1
PATIENCE_S = 5.0
"""How long to wait while another process writes."""
SCHEMA = """
CREATE TABLE conversations (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT UNIQUE,
    title TEXT NOT NULL,
    model TEXT NOT NULL,
    system TEXT,
    created TEXT NOT NULL,
    updated TEXT NOT NULL
);
CREATE TABLE messages (
    conversation INTEGER NOT NULL REFERENCES conversations(id) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    role TEXT NOT NULL CHECK (role IN ('user', 'assistant')),
    kind TEXT NOT NULL CHECK (kind IN ('text', 'file', 'summary')),
    archived INTEGER NOT NULL,
    content TEXT NOT NULL,
    info TEXT NOT NULL,
    PRIMARY KEY (conversation, position)
);
CREATE INDEX by_time ON conversations(updated);
"""


@dataclass(frozen=True)
class Entry:
    """A conversation in a list."""

    id: int
    name: str | None
    title: str
    model: str
    updated: str
    n_messages: int


class Store:
    """All conversations of a user. Raises BadFileError for a file that is none, or was damaged."""

    def __init__(self, path: Path | None) -> None:
        """`path` None: in memory, for a person whose disk cannot be written."""
        self.path = path
        self._lock_fd = -1
        if path is not None:
            _make_private(path)
            self._lock_fd = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with self._reading():
            self._db = sqlite3.connect(":memory:" if path is None else path, timeout=PATIENCE_S, isolation_level=None)
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = FULL")
                self._db.execute("PRAGMA foreign_keys = ON")
                self._prepare()
            except BaseException:
                self.close()
                raise

    # -- writing -----------------------------------------------------------------------------------------------------

    def save(self, conversation: Conversation, first: int) -> None:
        """Make what is stored equal `conversation`, whose messages before `first` have not changed. On return it is on
        the disk; where that fails, the next call makes up for it. A conversation that is new here gets its `id`, and is
        open in this process."""
        first = conversation.n_saved = min(first, conversation.n_saved)
        with self._transaction():
            now = datetime.now().astimezone().isoformat(timespec="microseconds")
            values = (conversation.title, conversation.model, conversation.system, now)
            id = conversation.id
            if id is None:
                row = self._db.execute(
                    "INSERT INTO conversations (title, model, system, updated, created) VALUES (?, ?, ?, ?, ?)",
                    (*values, now),
                )
                id = row.lastrowid
            else:
                self._db.execute(
                    "UPDATE conversations SET title = ?, model = ?, system = ?, updated = ? WHERE id = ?",
                    (*values, id),
                )
            self._db.execute("DELETE FROM messages WHERE conversation = ? AND position >= ?", (id, first))
            rows = enumerate(conversation.messages[first:], first)
            self._db.executemany(
                "INSERT INTO messages VALUES (?, ?, ?, ?, ?, ?, ?)",
                [(id, i, *_row(message)) for i, message in rows],
            )
        assert id is not None
        conversation.id, conversation.n_saved = id, len(conversation.messages)
        self.open(id)

    def rename(self, conversation: Conversation, name: str) -> None:
        """Give it a name that no other has. Raises BadRequestError where one has it."""
        if name.isdecimal():
            raise BadRequestError("A name must not be a number: conversations have numbers of their own.")
        if conversation.id is None:
            self.save(conversation, 0)
        with self._transaction():
            taken = self._db.execute("SELECT id FROM conversations WHERE name = ?", (name,)).fetchone()
            if taken is not None and taken[0] != conversation.id:
                raise BadRequestError(f"Another conversation is called {name!r} already; choose another name.")
            self._db.execute("UPDATE conversations SET name = ? WHERE id = ?", (name, conversation.id))
        conversation.name = name

    # -- reading -----------------------------------------------------------------------------------------------------

    def list(self, limit: int = -1) -> Sequence[Entry]:
        """The conversations, the latest first."""
        with self._reading():
            rows = self._db.execute(
                "SELECT id, name, title, model, updated, (SELECT count(*) FROM messages WHERE conversation = id) "
                "FROM conversations ORDER BY updated DESC, id DESC LIMIT ?",
                (limit,),
            ).fetchall()
            return [Entry(*row) for row in rows]

    def find(self, name: str) -> int:
        """The id of the conversation of that name or number. Raises BadRequestError where there is none."""
        with self._reading():
            row = self._db.execute("SELECT id FROM conversations WHERE name = ?", (name,)).fetchone()
            if row is None and name.isascii() and name.isdecimal() and len(name) < 19:
                row = self._db.execute("SELECT id FROM conversations WHERE id = ?", (int(name),)).fetchone()
        if row is None:
            raise BadRequestError(f"There is no conversation called {name!r}; /list in a chat shows them.")
        return int(row[0])

    def load(self, id: int) -> Conversation:
        """A stored conversation. Raises BadRequestError where it is gone."""
        with self._reading():
            row = self._db.execute("SELECT model, system, name FROM conversations WHERE id = ?", (id,)).fetchone()
            if row is None:
                raise BadRequestError(f"There is no conversation {id} any more.")
            rows = self._db.execute(
                "SELECT role, content, kind, archived, info FROM messages WHERE conversation = ? ORDER BY position",
                (id,),
            )
            messages = [Message(role, text, kind, bool(old), _info(info)) for role, text, kind, old, info in rows]
        model, system, name = row
        return Conversation(model, system, messages, id, name, len(messages))

    # -- who has it open ---------------------------------------------------------------------------------------------

    def open(self, id: int) -> bool:
        """Take a conversation for this process; False where another process has it."""
        if self._lock_fd < 0:
            return True
        try:
            fcntl.lockf(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, id)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks: then nobody is kept out
            return True
        return True

    def leave(self, id: int) -> None:
        """Let other processes have it."""
        if self._lock_fd >= 0:
            fcntl.lockf(self._lock_fd, fcntl.LOCK_UN, 1, id)

    def close(self) -> None:
        """Let go of all. Harmless when repeated."""
        self._db.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    # -- inside ------------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            with self._transaction():  # another process may have been quicker
                if self._db.execute("PRAGMA user_version").fetchone()[0] == 0:
                    for statement in SCHEMA.split(";"):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version = {VERSION}")
        elif version != VERSION:
            raise BadFileError(f"{self.path} was written by a newer version of this program.")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._reading():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # SQLite may have done so itself
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """What SQLite or the file's contents may raise, as a sentence."""
        try:
            yield
        except (sqlite3.Error, TypeError, ValueError, RecursionError) as e:
            damaged = getattr(e, "sqlite_errorcode", None) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
            hint = "; with that file moved away, a new one is begun" * damaged
            raise BadFileError(f"The conversations in {self.path} cannot be read or written: {e}{hint}.") from e


def _make_private(path: Path) -> None:
    """The folder and the file, for the owner's eyes only; SQLite gives its other files the same permissions."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _row(message: Message) -> tuple[Any, ...]:
    info = json.dumps(message.info, ensure_ascii=False)
    return message.role, message.kind, int(message.archived), message.content, info


def _info(text: str) -> dict[str, Any]:
    info = json.loads(text)
    if not isinstance(info, dict):
        raise ValueError("a message's facts are no object")
    return info
