"""Talking: a conversation with a loaded model, saved turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from hybrid.apps.chat.compact import compacted, find_cut
from hybrid.apps.chat.conversation import Conversation, Message, live
from hybrid.apps.chat.reasoning import OPEN, Piece, Reasoning
from hybrid.apps.chat.states import StateFolder
from hybrid.apps.chat.store import Store
from hybrid.apps.summarize.quality import whole_part
from hybrid.errors import BadRequestError, HybridError
from hybrid.prefix import common_prefix

if TYPE_CHECKING:
    from hybrid import Completion, Hybrid, Stream

ANSWER_SHARE, MOST_ANSWER_TOKENS = 8, 256
"""Room for an answer: so many tokens, or this part of a small context. With less the context is nearly full."""
MOST_ROUNDS = 8
"""Of compacting, until a message fits."""
FULL = "/compact summarises the older turns, /clear begins a new conversation, -c N at the start makes more room"


class Asking:
    """An answer while it is made: iterate for its pieces, to the end or until `close`. Whatever way it ends, what was
    said is in the conversation and saved."""

    def __init__(self, work: Callable[[Asking], Generator[Piece, None, None]]) -> None:
        self._pieces = work(self)
        self._stream: Stream | None = None
        self.cancelled = False
        self.answered = False
        """Whether what came last from the model is part of the conversation, and not a summary of it."""
        self.completion: Completion | None = None
        """Once it is over: the answer and its figures; None where none was begun."""

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def close(self) -> None:
        """End it here. Harmless where it has ended."""
        self._pieces.close()

    def cancel(self) -> None:
        """From a signal handler or another thread: stop, in the prompt or between two tokens."""
        self.cancelled = True
        if self._stream is not None:
            self._stream.cancel()

    def follow(self, stream: Stream) -> Iterator[str]:
        """The pieces of `stream`, which `cancel` now stops."""
        self._stream = stream
        if self.cancelled:
            stream.cancel()
        try:
            yield from stream
        finally:
            self.completion = stream.completion


class Talk:
    """One conversation at a time, with a model that may be changed for another."""

    def __init__(
        self,
        model: Hybrid,
        conversation: Conversation,
        store: Store,
        *,
        options: Mapping[str, Any],
        states: StateFolder | None = None,
        on_full: Literal["stop", "compact"] = "stop",
    ) -> None:
        """`options` go to `Hybrid.generate`. `on_full`: what to do with a message that the context has no room for."""
        self.model, self.conversation, self.store = model, conversation, store
        self.options = dict(options)
        self.states, self.on_full = states, on_full
        self.last: Completion | None = None

    # -- turns -------------------------------------------------------------------------------------------------------

    def ask(self, text: str) -> Asking:
        """Answer a message. Iterating raises BadRequestError where it does not fit; the conversation is then as it
        was."""
        return Asking(lambda asking: self._ask(asking, Message("user", _sound(text))))

    def retry(self) -> Asking:
        """Answer the last message, once more if it was answered; the new answer takes the old one's place when it is
        there. Raises BadRequestError where there is no message."""
        asked = self.conversation.last_asked()
        if asked is None:
            raise BadRequestError("There is no message to answer again.")
        return Asking(lambda asking: self._answer(asking, asked + 1))

    def edit(self, text: str) -> Asking:
        """Put `text` in the place of the last message and of the answer to it, and answer that; where it does not fit,
        the conversation stays as it was. Raises BadRequestError where there is no message."""
        asked = self.conversation.last_asked()
        if asked is None:
            raise BadRequestError("There is no message to edit.")
        return Asking(lambda asking: self._ask(asking, Message("user", _sound(text)), asked))

    def undo(self) -> Message:
        """Take the last message back, and the answer to it. Raises BadRequestError where there is none."""
        messages = self.conversation.messages
        asked = self.conversation.last_asked()
        if asked is None:
            summarised = any(message.kind == "summary" for message in messages)
            raise BadRequestError(
                "There is nothing to take back: what came before was summarised."
                if summarised
                else "There is nothing to take back."
            )
        message = messages[asked]
        del messages[asked:]
        self.store.save(self.conversation, asked)
        return message

    def add_document(self, name: str, text: str) -> int:
        """Add a document, which the model reads with the next message; returns its tokens. Raises BadRequestError
        where it does not fit."""
        message = Message("user", _sound(f"{name}:\n\n{text.strip()}\n"), kind="file")
        n_tokens = self.count(message)
        self._check_room(message, self._n_prompt(message), n_tokens)
        self._append(replace(message, info={"name": _sound(name), "tokens": n_tokens}))
        return n_tokens

    def compact(self) -> Asking:
        """Let the model summarise the older turns. Raises BadRequestError where nothing can be."""
        return Asking(self._compact)

    def set_system(self, text: str) -> None:
        """Change the system prompt."""
        self.conversation.system = _sound(text)
        if self.conversation.id is not None:
            self.store.save(self.conversation, len(self.conversation.messages))

    # -- which conversation, which model -----------------------------------------------------------------------------

    def begin(self, conversation: Conversation) -> str:
        """Go on with another conversation, saving the state of this one; returns what a person should know, perhaps
        nothing. It must be new, or open in this process."""
        lost = self.leave()
        self.conversation = conversation
        self.last = None
        return "\n".join(filter(None, [lost, self.restore()]))

    def leave(self) -> str:
        """Save the KV state for whoever opens the conversation next, and let go of it; returns what went wrong."""
        conversation, lost = self.conversation, ""
        try:
            if conversation.n_saved < len(conversation.messages):
                self.store.save(conversation, conversation.n_saved)
        except HybridError as e:
            lost = f"What was said last is not saved: {e}"
        if conversation.id is None:
            return lost
        try:
            if self.states is not None and conversation.messages:
                lost = lost or self.states.save(str(conversation.id), self.model) or ""
        finally:
            self.store.leave(conversation.id)
        return lost

    def restore(self) -> str:
        """Give the model the conversation's KV state where there is one; returns a sentence about it."""
        if self.conversation.id is None or not self.conversation.live:
            return ""
        prompt = self.model.chat_tokens(self.conversation.prompt())
        try:
            if self.states is None:
                raise BadRequestError("it was not saved")
            self.states.restore(str(self.conversation.id), self.model)
        except BadRequestError as e:
            return f"Its {len(prompt):,} tokens will be read again with your next message: no saved KV state ({e})."
        kept = common_prefix(prompt, self.model.engine.tokens())
        return f"Its KV state was restored: {kept:,} of {len(prompt):,} tokens need not be read again."

    def use(self, model: Hybrid, name: str) -> None:
        """Go on with another model; what was said is read again by it."""
        self.model, self.last = model, None
        self.conversation.model = name
        if self.conversation.id is not None:
            self.store.save(self.conversation, len(self.conversation.messages))

    # -- sizes -------------------------------------------------------------------------------------------------------

    def count(self, message: Message) -> int:
        """Tokens of a message's text."""
        return len(self.model.tokenize(message.content, add_special=False))

    @property
    def room(self) -> int:
        """Tokens that an answer should have."""
        return min(MOST_ANSWER_TOKENS, max(1, self.model.n_ctx // ANSWER_SHARE))

    def warning(self) -> str:
        """What to say where the context is full or nearly so; otherwise nothing."""
        used, n_ctx = self.model.n_used, self.model.n_ctx
        if used + self.room <= n_ctx:
            return ""
        return f"The context is {'nearly ' * (used < n_ctx)}full ({used:,} of {n_ctx:,} tokens): {FULL}."

    # -- inside ------------------------------------------------------------------------------------------------------

    def _ask(self, asking: Asking, message: Message, replaces: int | None = None) -> Generator[Piece, None, None]:
        """Answer `message`, which takes the place of those from index `replaces` on."""
        messages = self.conversation.messages
        replaced = [] if replaces is None else messages[replaces:]
        del messages[len(messages) - len(replaced) :]
        fits = False
        try:
            yield from self._make_room(asking, message)
            fits = not asking.cancelled
        finally:
            if replaced and not fits:
                self.conversation.messages += replaced
                self.store.save(self.conversation, 0)
        if not fits:
            return
        self._append(message)
        at = len(self.conversation.messages)
        try:
            yield from self._answer(asking, at)
        except HybridError:
            if len(self.conversation.messages) == at:  # nothing was said: as if it had not been asked
                self.undo()
            raise

    def _answer(self, asking: Asking, at: int) -> Generator[Piece, None, None]:
        """Answer the messages before `at`; the answer takes the place of those from there on."""
        conversation = self.conversation
        given = live(conversation.messages[:at])
        reasoning, stream = self._begin(conversation.prompt(given), self.options)
        parts: list[str] = []
        try:
            for text in asking.follow(stream):
                parts.append(text)
                yield from reasoning.push(text)
            yield from reasoning.finish()
        finally:  # also where whoever reads went away
            self.last = asking.completion or self.last
            reason = asking.completion.finish_reason if asking.completion else "interrupted"
            if parts or reason != "interrupted":
                info = {"finish_reason": reason, "tokens": len(asking.completion.tokens) if asking.completion else None}
                asking.answered = True
                conversation.messages[at:] = [Message("assistant", "".join(parts), info=info)]
                self.store.save(conversation, at)

    def _make_room(self, asking: Asking, message: Message) -> Generator[Piece, None, None]:
        """Compact, where that is wanted, until `message` and an answer fit. Raises BadRequestError where they
        do not."""
        n_tokens = self.count(message)
        for _ in range(MOST_ROUNDS):
            n_prompt = self._n_prompt(message)
            too_long = n_tokens + self.room > self.model.n_ctx
            if self.on_full == "stop" or n_prompt + self.room <= self.model.n_ctx or too_long:
                break
            yield Piece("note", "The context is full; the older turns are summarised.")
            try:
                yield from self._compact(asking)
            except BadRequestError:
                break
            yield Piece("note", "")  # a blank line: what follows is no part of the summary
            if asking.cancelled:
                return
        self._check_room(message, n_prompt, n_tokens)

    def _check_room(self, message: Message, n_prompt: int, n_tokens: int) -> None:
        n_ctx = self.model.n_ctx
        if n_prompt <= n_ctx:
            return
        what = "document" if message.kind == "file" else "message"
        if n_tokens > n_ctx or not self.conversation.live:
            raise BadRequestError(
                f"The {what} has {n_tokens:,} tokens, but the context holds {n_ctx:,}; -c N at the start makes it "
                "larger."
            )
        raise BadRequestError(
            f"The {what} has {n_tokens:,} tokens and makes the conversation {n_prompt:,} long, but the context holds "
            f"{n_ctx:,}: {FULL}."
        )

    def _compact(self, asking: Asking) -> Generator[Piece, None, None]:
        conversation, model = self.conversation, self.model
        cut = find_cut(conversation, model.n_ctx, lambda prompt: len(model.chat_tokens(prompt)) if prompt else 0)
        how = {**self.options, "temperature": 0.0, "max_tokens": cut.max_tokens, "grammar": None}
        reasoning, stream = self._begin(cut.prompt, how)
        pieces = [piece for text in asking.follow(stream) for piece in reasoning.push(text)]
        summary = "".join(p.text for p in [*pieces, *reasoning.finish()] if p.kind == "text").strip()
        if asking.cancelled:
            yield Piece("note", "Stopped; nothing was compacted.")
            return
        if asking.completion is not None and asking.completion.finish_reason == "length":
            summary = whole_part(summary)
        if not summary:
            raise BadRequestError("The model wrote no summary; nothing was compacted.")
        shorter = compacted(conversation, cut, summary, self.count(Message("user", summary)))
        before, n_tokens = self._n_prompt(), len(model.chat_tokens(conversation.prompt(live(shorter))))
        if n_tokens >= before:
            raise BadRequestError("The summary is no shorter than what it stands for; nothing was compacted.")
        conversation.messages = shorter
        self.store.save(conversation, 0)
        yield Piece(
            "note",
            f"{cut.end - cut.first} messages became this summary (they are kept, see /export); the conversation has "
            f"{n_tokens:,} tokens instead of {before:,}:\n{summary}",
        )

    def _begin(self, prompt: Sequence[dict[str, str]], options: Mapping[str, Any]) -> tuple[Reasoning, Stream]:
        """Let the model continue `prompt`: its stream, and what tells thinking from speaking in it. (Some templates
        open the thinking themselves.)"""
        model, tokens = self.model, self.model.chat_tokens(prompt)
        reasoning = Reasoning(begun=model.detokenize(tokens[-8:]).rstrip().endswith(OPEN))
        return reasoning, model.generate(tokens, stream=True, **{**options, "stop": model.chat_template.stop})

    def _append(self, message: Message) -> None:
        messages = self.conversation.messages
        messages.append(message)
        try:
            self.store.save(self.conversation, len(messages) - 1)
        except HybridError:
            messages.pop()
            raise

    def _n_prompt(self, *more: Message) -> int:
        """Tokens of the conversation with `more` at its end."""
        return len(self.model.chat_tokens(self.conversation.prompt([*self.conversation.live, *more])))


def _sound(text: str) -> str:
    """Text without the lone surrogates that a terminal may give for bytes that are no UTF-8."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
