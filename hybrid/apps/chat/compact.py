"""Compacting: the older turns of a conversation become a summary that the model writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hybrid.apps.chat.conversation import Conversation, Message
from hybrid.errors import BadRequestError

INSTRUCTION = (
    "Summarize our conversation so far in a few sentences, for yourself: you will go on with it and see only the "
    "summary. Keep names, numbers, decisions and what is still open. Write nothing but the summary."
)
SUMMARY = "(What we said before, in short: {summary})"
MOST_SUMMARY_TOKENS = 512
KEPT_SHARE = 4
"""The latest turns stay as they are, as many as fit into this part of the context."""

Prompt = Sequence[dict[str, str]]


@dataclass(frozen=True)
class Cut:
    """Where the older turns end."""

    first: int
    """Index of the first message that is summarised."""
    end: int
    """Index of the first that stays."""
    prompt: list[dict[str, str]]
    """What asks for the summary."""
    max_tokens: int


def find_cut(conversation: Conversation, n_ctx: int, count: Callable[[Prompt], int]) -> Cut:
    """What to summarise: as much as can be, less the latest turns that fit into a quarter of the context; `count`
    says how many tokens a prompt has. Raises BadRequestError where nothing can be."""
    messages = conversation.messages
    first = next((i for i, m in enumerate(messages) if not m.archived), len(messages))
    # Turns begin where the person speaks after the model did.
    turns = [i for i in range(first, len(messages)) if i and messages[i].role == "user" != messages[i - 1].role]
    ends = sorted({i for i in [*turns, len(messages)] if i > first})
    if not any(m.role == "assistant" for m in messages[first:]):
        raise BadRequestError("There is nothing to compact: no turns that a summary could stand for.")
    max_tokens = max(1, min(MOST_SUMMARY_TOKENS, n_ctx // 8))
    wanted = next(end for end in ends if end == len(messages) or count(_given(messages[end:])) <= n_ctx // KEPT_SHARE)
    for end in reversed([end for end in ends if end <= wanted]):
        prompt = conversation.prompt([*messages[first:end], Message("user", INSTRUCTION)])
        n = count(prompt)
        if n + max_tokens <= n_ctx:
            return Cut(first, end, prompt, max_tokens)
    raise BadRequestError(
        f"The conversation cannot be compacted: its oldest turn alone takes {n:,} of the context's {n_ctx:,} tokens."
    )


def compacted(conversation: Conversation, cut: Cut, summary: str, n_tokens: int) -> list[Message]:
    """The messages with those before the cut archived, and a summary in their place."""
    messages = conversation.messages
    old = [replace(message, archived=True) for message in messages[: cut.end]]
    stands_for = Message("user", SUMMARY.format(summary=summary), kind="summary", info={"tokens": n_tokens})
    return [*old, stands_for, *messages[cut.end :]]


def _given(messages: Sequence[Message]) -> Prompt:
    return Conversation().prompt(messages)
