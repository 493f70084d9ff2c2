"""A conversation as a file for people (Markdown) or programs (JSON)."""

from __future__ import annotations

import json
from pathlib import Path

from hybrid.apps.chat.conversation import Conversation, Message
from hybrid.errors import BadRequestError
from hybrid.files import write_atomically

FORMATS = {".md": "Markdown", ".markdown": "Markdown", ".json": "JSON"}
VERSION = 1
"""Of the JSON."""


def export(conversation: Conversation, path: Path, *, replace: bool = False) -> int:
    """Write all messages to `path`, in the format of its ending; returns their number.

    Raises BadRequestError where there are none, for another ending, a file that is there already (unless `replace`), or
    one that cannot be written.
    """
    if not conversation.messages:
        raise BadRequestError("Nothing was said yet that could be written.")
    kind = FORMATS.get(path.suffix.lower())
    if kind is None:
        raise BadRequestError(f"{path} ends neither in .md nor in .json: which of the two is it to be?")
    if path.exists() and not replace:
        raise BadRequestError(f"{path} is there already; /export -f {path} replaces it.")
    text = to_json(conversation) if kind == "JSON" else to_markdown(conversation)
    try:
        write_atomically(path, text)
    except OSError as e:
        raise BadRequestError(f"{path} cannot be written: {e.strerror}.") from e
    return len(conversation.messages)


def to_json(conversation: Conversation) -> str:
    """Everything that is known of it."""
    messages = [
        {"role": m.role, "content": m.content, "kind": m.kind, "archived": m.archived, **m.info}
        for m in conversation.messages
    ]
    whole = {
        "version": VERSION,
        "name": conversation.name,
        "model": conversation.model,
        "system": conversation.system,
        "messages": messages,
    }
    return json.dumps(whole, ensure_ascii=False, indent=2) + "\n"


def to_markdown(conversation: Conversation) -> str:
    """A heading a message."""
    parts = [f"# {conversation.name or conversation.title or 'Conversation'}"]
    parts.append(f"Model: {conversation.model}")
    if conversation.system:
        parts.append(f"## System\n\n{conversation.system.strip()}")
    parts += [f"## {_heading(message)}\n\n{message.content.strip()}" for message in conversation.messages]
    return "\n\n".join(parts) + "\n"


def _heading(message: Message) -> str:
    if message.kind == "file":
        return f"User: {message.info.get('name', 'a document')}"
    if message.kind == "summary":
        return "Summary of the messages above"
    stopped = " (stopped)" if message.info.get("finish_reason") == "interrupted" else ""
    return f"{message.role.capitalize()}{stopped}"
