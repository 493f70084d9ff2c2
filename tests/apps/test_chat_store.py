"""Conversations on disk: what was said is there whatever becomes of the process, and others may write beside it."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid.apps.chat.conversation import Conversation, Message
from hybrid.apps.chat.store import VERSION, Store
from hybrid.errors import BadFileError, BadRequestError

HI = [Message("user", "hi"), Message("assistant", "ho", info={"finish_reason": "stop", "tokens": 1})]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "data" / "conversations.sqlite3")
    yield store
    store.close()


def in_another_process(store: Store, code: str) -> subprocess.Popen[str]:
    """Runs `code` with `store`, `Conversation` and `Message` at hand."""
    head = (
        "import sys\n"
        "from pathlib import Path\n"
        "from hybrid.apps.chat.conversation import Conversation, Message\n"
        "from hybrid.apps.chat.store import Store\n"
        f"store = Store(Path({str(store.path)!r}))\n"
    )
    command = [sys.executable, "-c", head + code]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_what_was_saved_is_what_is_loaded(store: Store) -> None:
    weird = Message("user", "日本\x00\n'; DROP TABLE messages;--", "file", True, {"name": "ä.txt", "tokens": 3})
    conversation = Conversation("model", "Be kind.", [*HI, weird])
    store.save(conversation, 0)
    assert conversation.id is not None
    assert store.load(conversation.id) == conversation
    conversation.messages[1:] = [Message("user", "again")]
    store.save(conversation, 1)
    store.rename(conversation, "my talk")
    assert store.load(store.find("my talk")) == conversation
    assert store.load(store.find(str(conversation.id))) == conversation


def test_the_latest_is_listed_first_by_its_first_words(store: Store) -> None:
    talks = [Conversation("m", None, [Message("user", f"message\n{i} " + "x" * 90)]) for i in range(3)]
    for conversation in talks:
        store.save(conversation, 0)
    store.save(talks[0], 1)
    entries = store.list(2)
    assert [entry.id for entry in entries] == [talks[0].id, talks[2].id]
    assert entries[0].title.startswith("message 0 xxx")
    assert len(entries[0].title) == 60
    assert entries[0].n_messages == 1


def test_a_name_belongs_to_one_conversation_and_is_no_number(store: Store) -> None:
    one, other = Conversation("m", None, [*HI]), Conversation("m", None, [*HI])
    store.rename(one, "talk")
    store.rename(one, "talk")
    store.save(other, 0)
    with pytest.raises(BadRequestError, match="already"):
        store.rename(other, "talk")
    with pytest.raises(BadRequestError, match="number"):
        store.rename(other, "12")
    for unknown in ("nobody", "77", "9" * 40, ""):
        with pytest.raises(BadRequestError, match="no conversation"):
            store.find(unknown)
    with pytest.raises(BadRequestError, match="any more"):
        store.load(77)


def test_what_was_said_before_a_kill_is_there(store: Store) -> None:
    child = in_another_process(
        store,
        "talk = Conversation('m')\n"
        "talk.messages += [Message('user', 'hi'), Message('assistant', 'ho')]\n"
        "store.save(talk, 0)\n"
        "talk.messages.append(Message('user', 'and then?'))\n"
        "store.save(talk, 2)\n"
        "print(talk.id, flush=True)\n"
        "sys.stdin.read()\n",
    )
    assert child.stdout is not None
    id = int(child.stdout.readline())
    assert not store.open(id)  # it is open over there
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert store.open(id)
    assert [m.content for m in store.load(id).messages] == ["hi", "ho", "and then?"]


def test_two_processes_write_at_once_and_neither_loses_a_turn(store: Store) -> None:
    code = (
        "talk = Conversation('m')\n"
        "for i in range(40):\n"
        "    talk.messages.append(Message('user', str(i)))\n"
        "    store.save(talk, i)\n"
    )
    children = [in_another_process(store, code) for _ in range(2)]
    for child in children:
        child.communicate(timeout=60)
        assert child.returncode == 0
    entries = store.list()
    assert [entry.n_messages for entry in entries] == [40, 40]
    for entry in entries:
        assert [m.content for m in store.load(entry.id).messages] == [str(i) for i in range(40)]


def test_a_failed_write_changes_nothing(store: Store) -> None:
    conversation = Conversation("m", None, [*HI])
    store.save(conversation, 0)
    before = store.load(conversation.id or 0)
    conversation.messages.append(Message("system", "no such role"))  # type: ignore[arg-type]
    with pytest.raises(BadFileError, match="cannot be read or written"):
        store.save(conversation, 0)
    assert store.load(conversation.id or 0) == before


def test_what_could_not_be_written_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid.apps.chat.store.PATIENCE_S", 0.01)
    store, other = Store(tmp_path / "c.sqlite3"), sqlite3.connect(tmp_path / "c.sqlite3", isolation_level=None)
    conversation = Conversation("m", None, [])
    for i, message in enumerate([*HI, *HI, Message("user", "and then?")]):
        conversation.messages.append(message)
        if i in (0, 2, 3):
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(BadFileError, match="locked"):
                store.save(conversation, i)
            other.execute("ROLLBACK")
        else:
            store.save(conversation, i)
    assert store.load(conversation.id or 0) == conversation
    other.close()
    store.close()


def test_only_its_owner_can_read_it(store: Store) -> None:
    store.save(Conversation("m", None, [*HI]), 0)
    assert store.path is not None
    for path in store.path.parent.iterdir():
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize("content", [b"not a database at all, for certain", b"SQLite format 3\x00" + b"\xff" * 4096])
def test_a_damaged_file_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "conversations.sqlite3"
    path.write_bytes(content)
    with pytest.raises(BadFileError, match=r"conversations\.sqlite3 .* moved away, a new one is begun"):
        Store(path)
    assert path.read_bytes() == content


def test_a_newer_programs_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "conversations.sqlite3"
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    with pytest.raises(BadFileError, match="newer version"):
        Store(path)


def test_where_the_disk_cannot_be_written_the_memory_keeps_it(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        (tmp_path / "file").touch()
        with pytest.raises(OSError, match=r"."):
            Store(tmp_path / "file" / "conversations.sqlite3")
    store = Store(None)
    conversation = Conversation("m", None, [*HI])
    store.save(conversation, 0)
    assert store.load(conversation.id or 0) == conversation
    store.close()
