"""Chat templates: messages to prompt tokens, with the model's own Jinja template."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hybrid.errors import BadRequestError, EngineError
from hybrid.files import read_all
from hybrid.runtime.controls import guard_all, split, unused_marker
from hybrid.runtime.renderer import SandboxedTemplate, TemplateError, compiled

if TYPE_CHECKING:
    from hybrid.runtime.builtin_templates import BuiltinTemplate

Message = Mapping[str, Any]
"""One chat message: `role` and `content`, and whatever else the template understands."""

DEFAULT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] | capitalize }}: {{ m['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
DEFAULT_STOP = ("\nUser:",)
"""Without control tokens a model does not say when its answer ends; this is where the next turn would begin."""


class ChatVocabulary(Protocol):
    """What rendering needs to know of a vocabulary (`hybrid.tail.vocab.Vocabulary` is one)."""

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Text -> id of every control token."""

    @property
    def bos(self) -> int:
        """The token that begins a text; -1 where there is none."""

    @property
    def add_bos(self) -> bool:
        """Whether a prompt is to begin with it."""

    def attributes(self, token: int) -> int:
        """The token's `llama_token_attr` bits."""

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of `text`."""


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled template."""

    template: SandboxedTemplate | BuiltinTemplate
    bos_token: str = ""
    eos_token: str = ""
    stop: tuple[str, ...] = ()
    """Stop strings the format needs beside the model's end-of-turn tokens."""
    note: str | None = None
    """One line for the user where this is not the model's own template."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text. A system message that the template refuses, or leaves out without a word, goes in front
        of the first user message.

        `variables` are what else a template may look at, such as `tools`; None values are as if they were not there.

        Raises BadRequestError with the template's own words where it refuses the messages.
        """
        folded = _fold_system(messages)
        try:
            text = self._render(messages, add_generation_prompt, variables)
            if folded is None or text != self._without_system(messages, add_generation_prompt, variables):
                return text
        except BadRequestError:
            if folded is None:
                raise
        return self._render(folded, add_generation_prompt, variables)

    def _without_system(self, messages: Sequence[Message], *others: Any) -> str | None:
        """The prompt as if there were no system message; None where the template wants one."""
        try:
            return self._render(messages[1:], *others)
        except BadRequestError:
            return None

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool, variables: Mapping[str, Any] | None
    ) -> str:
        try:
            return self.template.render(
                **(variables or {}),
                messages=[dict(m) for m in messages],
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
            )
        except EngineError:
            raise
        except Exception as e:  # the template is a program out of the file: whatever it raises is its refusal
            why = str(e).strip().rstrip(".!") or type(e).__name__
            raise BadRequestError(f"The model's chat template does not accept these messages: {why}.") from e


def compile_template(source: str | None, *, bos_token: str = "", eos_token: str = "") -> ChatTemplate:
    """Compile `tokenizer.chat_template`; a plain default, with a note that says so, where it is missing or broken."""
    why = "the file has no chat template"
    if source is not None:
        try:
            return ChatTemplate(compiled(source), bos_token, eos_token)
        except TemplateError as e:
            why = f"its chat template does not compile ({e})"
    note = f"Chat uses a plain 'User: … Assistant: …' format, because {why}."
    return ChatTemplate(SandboxedTemplate(DEFAULT_TEMPLATE), bos_token, eos_token, DEFAULT_STOP, note)


def chosen_template(choice: str | Path, *, bos_token: str = "", eos_token: str = "") -> ChatTemplate:
    """The template that takes the place of the model's own: a name that llama.cpp knows, a file, or Jinja text.

    Raises BadRequestError where it is none of them, or does not compile.
    """
    from hybrid.runtime.builtin_templates import BuiltinTemplate, builtin_names

    name, text = str(choice), None
    if isinstance(choice, str) and choice in builtin_names():
        return ChatTemplate(BuiltinTemplate(choice), bos_token, eos_token)
    if isinstance(choice, str) and ("{{" in choice or "{%" in choice):
        name, text = "The text", choice
    else:
        try:
            with open(os.path.expanduser(choice), "rb") as file:
                text = read_all(file).decode("utf-8-sig")
        except FileNotFoundError:
            known = ", ".join(builtin_names())
            raise BadRequestError(f"{name} is neither a file nor a chat template llama.cpp knows: {known}.") from None
        except (OSError, ValueError) as e:
            why = getattr(e, "strerror", None) or "it is not UTF-8 text"
            raise BadRequestError(f"The chat template {name} cannot be read: {why}.") from e
    own = compile_template(text, bos_token=bos_token, eos_token=eos_token)
    if own.note:
        raise BadRequestError(f"{name} cannot be used as a chat template: {own.note.partition('because ')[2]}")
    return own


def encode_chat(
    template: ChatTemplate,
    vocabulary: ChatVocabulary,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Prompt tokens of a conversation: the template's control tokens as such, everything a user wrote as plain text,
    in `messages` and in `variables` (`tools` and the like).

    Raises BadRequestError for malformed messages or messages the template refuses.
    """
    check_messages(messages)
    controls = {text: i for text, i in vocabulary.control_tokens.items() if len(text) > 1}
    given = {name: value for name, value in (variables or {}).items() if value is not None}
    marker = unused_marker([*messages, given], controls)
    if marker is None:
        raise BadRequestError("The messages use every Unicode noncharacter from U+FDD0 to U+FDEF; remove one of them.")
    guarded = [{**guard_all(m, controls, marker), "role": m["role"]} for m in messages]
    seen = {name: guard_all(value, controls, marker) for name, value in given.items()}
    text = template.render(guarded, add_generation_prompt=add_generation_prompt, variables=seen)
    tokens: list[int] = []
    for piece in split(text, controls, vocabulary.attributes):
        if isinstance(piece, int):
            tokens.append(piece)
        elif plain := piece.replace(marker, ""):
            tokens += vocabulary.tokenize(plain, add_special=False, parse_special=False)
    return one_bos(tokens, vocabulary.bos, vocabulary.add_bos)


def check_messages(messages: Sequence[Message]) -> None:
    """Raise BadRequestError unless `messages` is a non-empty list of mappings with a `role` and a `content`."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise BadRequestError('messages must be a list such as [{"role": "user", "content": "Hello"}].')
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not re.fullmatch(r"[\w.-]+", role):
            raise BadRequestError(f"Message {i} needs a role, one word such as user, assistant or system.")
        content = message.get("content")
        calls = message.get("tool_calls") or message.get("function_call")
        if isinstance(content, list):
            kinds = [part.get("type", "text") if isinstance(part, Mapping) else "text" for part in content]
            if other := next((kind for kind in kinds if kind != "text"), None):
                raise BadRequestError(f"Message {i} has a part of type {other!r:.40}; only text can be read.")
        elif not isinstance(content, str) and not (content is None and calls):
            kind = type(content).__name__
            raise BadRequestError(f"Message {i} needs a content that is text, not {kind}.")


def one_bos(tokens: list[int], bos: int, add_bos: bool) -> list[int]:
    """`tokens` with exactly one BOS in front where the vocabulary wants one, and never two."""
    if bos < 0:
        return tokens
    n = next((i for i, t in enumerate(tokens) if t != bos), len(tokens))
    return [bos] * (add_bos or n > 0) + tokens[n:]


def _fold_system(messages: Sequence[Message]) -> list[Message] | None:
    """The messages with a leading system message put in front of the user message after it; None if there is none."""
    if len(messages) < 2 or messages[0]["role"] != "system" or messages[1]["role"] != "user":
        return None
    system, user = messages[0]["content"], messages[1]["content"]
    if not isinstance(system, str) or not isinstance(user, str):
        return None
    return [{**messages[1], "content": f"{system}\n\n{user}"}, *messages[2:]]
