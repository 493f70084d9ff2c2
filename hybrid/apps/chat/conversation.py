"""A conversation: its messages, and what of them the model is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["user", "assistant"]
Kind = Literal["text", "file", "summary"]

TITLE_LENGTH = 60


@dataclass(frozen=True)
class Message:
    """Something that was said, by the person or the model."""

    role: Role
    content: str
    kind: Kind = "text"
    """A document and a summary of earlier messages are the person's, too."""
    archived: bool = False
    """Whether a summary stands for it: it is kept, and the model no longer given it."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """What else is known, JSON-ready: of an answer its tokens and how it ended, of a document its name and tokens."""


def one_line(text: str, length: int) -> str:
    """The beginning of a text, for a list or a sentence."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"


def live(messages: Sequence[Message]) -> list[Message]:
    """Those that the model is given."""
    return [message for message in messages if not message.archived]


@dataclass
class Conversation:
    """Messages in order, and the system prompt before them.

    Messages of the person may follow each other (a document and a question; a question that was never answered): the
    model is given them as one, because templates want the roles to take turns.
    """

    model: str = ""
    """What the person called the model."""
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    id: int | None = None
    """In the store; None before the first message."""
    name: str | None = None
    """As the person calls it."""
    n_saved: int = 0
    """The first so many messages are in the store as they are here."""

    @property
    def title(self) -> str:
        """How it began, in one line."""
        first = next((m.content for m in self.messages if m.role == "user" and m.kind == "text"), "")
        return one_line(first, TITLE_LENGTH)

    @property
    def label(self) -> str:
        """What to call it in a sentence."""
        return self.name or (f"“{self.title}”" if self.title else "a conversation without a message")

    @property
    def live(self) -> list[Message]:
        """The messages the model is given."""
        return live(self.messages)

    @property
    def unanswered(self) -> bool:
        """Whether the person had the last word."""
        return bool(self.messages) and self.messages[-1].role == "user" and self.messages[-1].kind != "summary"

    def prompt(self, messages: Sequence[Message] | None = None) -> list[dict[str, str]]:
        """What the model is given of `messages` (None: of all that are live), after the system prompt."""
        given: list[dict[str, str]] = [{"role": "system", "content": self.system}] if self.system else []
        for message in self.live if messages is None else messages:
            if given and message.role == "user" == given[-1]["role"]:
                given[-1] = {"role": "user", "content": f"{given[-1]['content']}\n\n{message.content}"}
            else:
                given.append({"role": message.role, "content": message.content})
        return given

    def last_asked(self) -> int | None:
        """Index of the person's last message that can be taken back; None where there is none, or only a summary."""
        for i in range(len(self.messages) - 1, -1, -1):
            message = self.messages[i]
            if message.archived or message.kind == "summary":
                return None
            if message.role == "user":
                return i
        return None
