"""The prompts: templates a person can replace, and the tokens the model gets instead of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid.apps.summarize.tokens import Tokenizer
from hybrid.errors import BadRequestError, UnsupportedError
from hybrid.runtime.controls import NONCHARACTERS, guard_all, split
from hybrid.runtime.template import one_bos

if TYPE_CHECKING:
    from hybrid import Hybrid

TEMPLATES = {
    "single": (
        "Summarize the following text {length}. Keep the important names, numbers and conclusions, and add nothing "
        "that is not in the text.{focus}{language}\n\nText:\n\n{text}\n\nWrite the summary now."
    ),
    "map": (
        "The following text is a part of a longer document. Summarize this part {length}. Keep the important names, "
        "numbers and conclusions, and add nothing that is not in the text.{focus}{language}\n\nText:\n\n{text}\n\n"
        "Write the summary of this part now."
    ),
    "reduce": (
        "The following are summaries of consecutive parts of one document. Merge them into one coherent summary "
        "{length}. Keep the important names, numbers and conclusions, and add nothing.{focus}{language}\n\n"
        "Summaries:\n\n{text}\n\nWrite the merged summary now."
    ),
    "refine": (
        "Below are the summary of a document so far and the next part of the document. Write a new summary of "
        "everything up to here {length}. Keep the important names, numbers and conclusions, and add nothing that is "
        "not there.{focus}{language}\n\nSummary so far:\n\n{summary}\n\nNext part:\n\n{text}\n\n"
        "Write the new summary now."
    ),
    "combine": (
        "The following are summaries of several documents. Write one summary of all of them {length}: what they have "
        "in common, and where they differ.{focus}{language}\n\nSummaries:\n\n{text}\n\nWrite the summary now."
    ),
}
"""By name; a folder given with --prompts may hold NAME.txt for any of them."""
FIELDS = ("text", "summary", "length", "focus", "language")
MARKS = {"text": NONCHARACTERS[-1], "summary": NONCHARACTERS[-2]}
"""What stands in a rendered prompt where document text will be: code points that no text should hold."""
GUARD = NONCHARACTERS[0]
NONCHARACTER = re.compile(f"[{NONCHARACTERS[0]}-{NONCHARACTERS[-1]}]")
FIELD = re.compile(rf"\{{({'|'.join(FIELDS)})\}}")
PLACEHOLDER = re.compile(r"\{(\w+)\}")
"""What somebody who writes a template means to be replaced."""


def read_prompts(folder: str | Path | None) -> dict[str, str]:
    """The templates, those of `folder` in place of the built-in ones.

    Raises BadRequestError where the folder has none of them, or one that leaves the text out or names a field that
    there is not.
    """
    templates = dict(TEMPLATES)
    if folder is None:
        return templates
    found = [name for name in TEMPLATES if (Path(folder) / f"{name}.txt").is_file()]
    if not found:
        names = ", ".join(f"{name}.txt" for name in TEMPLATES)
        raise BadRequestError(f"{folder} holds no prompt templates; it may hold {names}.")
    for name in found:
        path = Path(folder) / f"{name}.txt"
        try:
            text = path.read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as e:
            raise BadRequestError(f"{path} cannot be read as UTF-8 text.") from e
        for field in ("text", "summary") if name == "refine" else ("text",):
            if text.count(f"{{{field}}}") != 1:
                raise BadRequestError(f"{path} must name {{{field}}} exactly once: the document's text goes there.")
        if name != "refine" and "{summary}" in text:
            raise BadRequestError(f"{path} names {{summary}}, which only refine.txt has.")
        if unknown := next((word for word in PLACEHOLDER.findall(text) if word not in FIELDS), None):
            known = ", ".join(f"{{{field}}}" for field in FIELDS)
            raise BadRequestError(f"{path} names {{{unknown}}}, which is none of {known}.")
        templates[name] = text.strip("\n")
    return templates


@dataclass(frozen=True)
class Form:
    """A prompt in tokens, with gaps: `parts[0]`, the field `fields[0]`, `parts[1]`, … `parts[-1]`."""

    parts: tuple[tuple[int, ...], ...]
    fields: tuple[str, ...]

    @property
    def overhead(self) -> int:
        """Tokens of the prompt without what fills its gaps."""
        return sum(map(len, self.parts))

    @property
    def n_prefix(self) -> int:
        """Tokens that all prompts of this form begin with."""
        return len(self.parts[0])

    def fill(self, values: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
        """The prompt with `values` in its gaps."""
        tokens = list(self.parts[0])
        for field, part in zip(self.fields, self.parts[1:], strict=True):
            tokens += values[field]
            tokens += part
        return tuple(tokens)


def sentences(length: str, focus: str | None, language: str | None) -> dict[str, str]:
    """What the fields of a template become. `length` is a phrase such as "in about 60 words"."""
    return {
        "length": length,
        "focus": f" Pay special attention to: {focus.strip().rstrip('.')}." if focus else "",
        "language": f" Write in {language}." if language else " Write in the language of the text.",
    }


def form_of(model: Hybrid, tokenizer: Tokenizer, template: str, values: Mapping[str, str]) -> Form:
    """`template` with its fields filled, as the user's message in the model's chat format.

    Control tokens come from the chat template alone. Raises UnsupportedError for a chat template that does not pass
    a message on as it is.
    """
    filled = {**{name: NONCHARACTER.sub("", value) for name, value in values.items()}, **MARKS}
    content = FIELD.sub(lambda m: filled[m[1]], NONCHARACTER.sub("", template))
    vocabulary = model.engine.vocabulary
    controls = {text: i for text, i in vocabulary.control_tokens.items() if len(text) > 1}
    guarded = guard_all([{"role": "user", "content": content}], controls, GUARD)
    rendered = model.chat_template.render([{**guarded[0], "role": "user"}])
    texts = re.split(f"([{''.join(MARKS.values())}])", rendered)
    names = {mark: field for field, mark in MARKS.items()}
    fields = tuple(names[mark] for mark in texts[1::2])
    if sorted(fields) != sorted(field for field, mark in MARKS.items() if mark in content):
        raise UnsupportedError("The model's chat template does not pass a message's text on as it is.")
    parts: list[list[int]] = []
    for i, text in enumerate(texts[::2]):
        part: list[int] = []
        for piece in split(text, controls, vocabulary.attributes):
            if isinstance(piece, int):
                part.append(piece)
            elif plain := piece.replace(GUARD, ""):
                continues = i > 0 and not part
                part += tokenizer(plain) if continues else vocabulary.tokenize(plain, add_special=False)
        parts.append(part)
    parts[0] = one_bos(parts[0], vocabulary.bos, vocabulary.add_bos)
    return Form(tuple(map(tuple, parts)), fields)
