"""A stand-in for a loaded model, which echoes the last message word by word, and a chat with it. For what is the chat's
own logic."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hybrid.apps.chat.conversation import Conversation
from hybrid.apps.chat.store import Store
from hybrid.apps.chat.talk import Talk
from hybrid.cli.terminal.chat import TerminalChat
from hybrid.cli.terminal.screen import Screen
from hybrid.errors import BadRequestError
from hybrid.runtime.completion import Completion, Memory, Timings
from hybrid.schedule.placement import Placement


class FakeStream:
    """Yields words until cancelled; `between` is called before each."""

    def __init__(self, model: FakeModel, n_prompt: int, words: list[str], limit: int | None) -> None:
        self._model, self._n_prompt, self._words = model, n_prompt, words[:limit]
        self._cut = len(self._words) < len(words)
        self._cancelled = False
        self.completion: Completion | None = None

    def cancel(self) -> None:
        self._cancelled = True

    def __iter__(self) -> Iterator[str]:
        model, made = self._model, []
        model.n_used = self._n_prompt
        for word in self._words:
            model.between(self)
            if self._cancelled or model.n_used >= model.n_ctx:
                break
            made.append(word)
            model.n_used += 1
            yield word
        full = self._cut or model.n_used >= model.n_ctx
        self.completion = Completion(
            "".join(made),
            tokens=list(range(len(made))),
            n_prompt_tokens=self._n_prompt,
            n_cached_tokens=1,
            finish_reason="interrupted" if self._cancelled else "length" if full else "stop",
            placement=model.placement,
            timings=Timings(load_s=1.0, ttft_s=0.25, prefill_tok_per_s=100.0, decode_tok_per_s=None),
            memory=Memory(device_bytes=0, host_bytes=2**20),
        )


class FakeModel:
    """Has what a Talk needs of Hybrid. A word is a token. It says `says(last message)`."""

    def __init__(
        self,
        n_ctx: int = 100,
        between: Callable[[FakeStream], None] = lambda stream: None,
        says: Callable[[str], str] = lambda text: f"You said {text}",
    ) -> None:
        self.placement = Placement(device="cpu", n_gpu_layers=2, n_ctx=n_ctx)
        self.model_path = Path("fake.gguf")
        self.chat_template = SimpleNamespace(stop=())
        self.engine = SimpleNamespace(spec=SimpleNamespace(n_layers=4), head=None, tail=None, tokens=lambda: ())
        self.notes: list[str] = []
        self.n_ctx, self.n_used = n_ctx, 0
        self.between, self.says = between, says
        self.seen: list[list[dict[str, str]]] = []
        self.options: list[dict[str, Any]] = []
        self._asked: list[dict[str, str]] = []
        self.closed = False

    def tokenize(self, text: str, add_special: bool = True) -> list[int]:
        return [0] * len(text.split())

    def detokenize(self, tokens: Sequence[int]) -> str:
        return ""

    def chat_tokens(self, messages: Sequence[dict[str, str]]) -> list[int]:
        self._asked = [dict(message) for message in messages]
        roles = [m["role"] for m in messages if m["role"] != "system"]
        if any(a == b for a, b in pairwise(roles)):
            raise BadRequestError("Roles must take turns.")
        return [0] * sum(len(self.tokenize(m["content"])) for m in messages)

    def generate(self, tokens: Sequence[int], *, stream: bool, **options: Any) -> FakeStream:
        assert stream
        self.seen.append(self._asked)
        self.options.append(options)
        if len(tokens) > self.n_ctx:
            raise BadRequestError(f"The prompt has {len(tokens)} tokens, but the context holds {self.n_ctx}.")
        words = [" " + word for word in self.says(self._asked[-1]["content"]).split()]
        return FakeStream(self, len(tokens), words, options.get("max_tokens"))

    def close(self) -> None:
        self.closed = True


class Lines:
    """A person who types these lines and then Ctrl-D; an exception among them is raised."""

    def __init__(self, *lines: str | BaseException) -> None:
        self._lines = list(lines)

    def read(self) -> str:
        if not self._lines:
            raise EOFError
        line = self._lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line


def chat_with(
    model: FakeModel,
    *,
    system: str | None = None,
    store: Store | None = None,
    tuning: Mapping[str, Any] | None = None,
    **how: Any,
) -> TerminalChat:
    def load(name: str, changes: Mapping[str, Any]) -> FakeModel:
        if name == "broken":
            raise BadRequestError("It is broken.")
        return FakeModel()

    talk = Talk(model, Conversation("fake", system), store or Store(None), options={"max_tokens": None}, **how)  # type: ignore[arg-type]
    return TerminalChat(talk, Screen(), load, tuning)  # type: ignore[arg-type]


def talk(model: FakeModel, *lines: str | BaseException, **how: Any) -> TerminalChat:
    chat = chat_with(model, **how)
    chat.run(Lines(*lines))
    return chat


def said(chat: TerminalChat) -> list[tuple[str, str]]:
    """What is in the conversation, and just so in the store."""
    conversation = chat.talk.conversation
    if conversation.id is not None:
        assert chat.talk.store.load(conversation.id).messages == conversation.messages
    return [(m.role, m.content) for m in conversation.messages]


def press_at(word: int) -> Any:
    """Ctrl-C before the answer's word of that number, once."""
    count = [0]

    def press(stream: FakeStream) -> None:
        count[0] += 1
        if count[0] == word:
            os.kill(os.getpid(), signal.SIGINT)

    return press
