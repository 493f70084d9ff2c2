"""What the commands that run a model share: opening it, reading a prompt, saying what it noted."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from hybrid.cli import takes_more
from hybrid.cli.options import PLACEMENT, pick
from hybrid.cli.progress import ProgressBar
from hybrid.errors import BadRequestError
from hybrid.files import read_all
from hybrid.printable import harmless, printable

if TYPE_CHECKING:
    from hybrid import Completion, Hybrid, Stream


class Notes:
    """What a model notes, on stderr, each line once."""

    def __init__(self, progress: ProgressBar) -> None:
        self._progress = progress
        self._said = 0

    def say(self, model: Hybrid) -> None:
        """Print those that were not printed yet."""
        self._progress.clear()
        for note in model.notes[self._said :]:
            click.echo(printable(note), err=True)
        self._said = len(model.notes)


class Session:
    """A loaded model and the terminal beside it."""

    def __init__(self, model: Hybrid, progress: ProgressBar) -> None:
        self.model = model
        self.progress = progress
        self._notes = Notes(progress)

    def say_notes(self) -> None:
        """Print the model's notes that were not printed yet, on stderr."""
        self._notes.say(self.model)


@contextmanager
def open_session(model: str | None, options: Mapping[str, Any]) -> Iterator[Session]:
    """Load `model` as the placement options say; notes and a progress bar go to stderr."""
    from hybrid import Hybrid

    progress = ProgressBar()
    try:
        with Hybrid(
            model, progress=progress, chat_template=options.get("chat_template"), **pick(PLACEMENT, options)
        ) as loaded:
            session = Session(loaded, progress)
            session.say_notes()
            yield session
    finally:
        progress.clear()


def read_prompt(text: str | None, file: str | None) -> str:
    """The prompt from -p, -f or stdin. A file's and stdin's last line end is not part of it, as in llama.cpp.

    Raises a usage error where there is none or more than one, BadRequestError for text that is not UTF-8.
    """
    if text is not None and file is not None:
        raise click.UsageError("Give the prompt with -p or -f, not both")
    if text is not None:
        return checked_text(text)
    if file is None and sys.stdin.isatty():
        raise click.UsageError("Give a prompt with -p TEXT, -f FILE or on stdin")
    if file is None or file == "-":
        return _decode(read_all(sys.stdin.buffer), "The prompt from stdin")
    return _decode(_read(file), f"The prompt from {file}")


def read_form(options: dict[str, Any]) -> dict[str, Any]:
    """Take --grammar and --json-schema out of `options`: what they give to `generate` and `chat`.

    Raises a usage error for both, BadRequestError for a file that is no text, no grammar or no schema.
    """
    grammar, schema = options.pop("grammar_file"), options.pop("schema_file")
    if grammar is not None and schema is not None:
        raise click.UsageError("Give --grammar or --json-schema, not both")
    if grammar is not None:
        from hybrid.runtime.gbnf import check_grammar

        text = _decode(_read(grammar), f"The grammar in {grammar}")
        _of(grammar, check_grammar, text)
        return {"grammar": text}
    if schema is not None:
        from hybrid.runtime.grammar import schema_grammar

        return {"grammar": _of(schema, schema_grammar, _decode(_read(schema), f"The JSON schema in {schema}"))}
    return {}


def _of(file: str, check: Callable[[str], Any], text: str) -> Any:
    """`check(text)`, its errors with the file they are about; now, and not when the model has been loaded."""
    try:
        return check(text)
    except BadRequestError as e:
        raise BadRequestError(f"{file}: {e}") from e


def _read(file: str) -> bytes:
    try:
        with open(file, "rb") as f:
            return read_all(f)
    except OSError as e:
        raise BadRequestError(f"{file} cannot be read: {e.strerror}.") from e


def checked_text(text: str) -> str:
    """An argument of the command line as UTF-8 text, whatever encoding the locale made Python read it in.

    Bytes that encoding lacks come as lone surrogates, of which `os.fsencode` makes bytes again.
    """
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError as e:
        raise BadRequestError("The prompt is not valid UTF-8 text.") from e


def _decode(data: bytes, what: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise BadRequestError(f"{what} is not valid UTF-8 text (byte {e.start}).") from e
    return text.removesuffix("\n").removesuffix("\r")


def emit(session: Session, stream: Stream, *, as_json: bool, max_tokens: int | None, chat: bool = False) -> None:
    """Print a stream's text on stdout as it is made, or with `as_json` the whole as one object at the end.

    A chat's answer is printed without the white space some formats leave before it. Where something ends the text
    amid a line, what is said of it goes on a line of its own.
    """
    begun, last = False, ""
    try:
        for piece in stream:
            session.progress.clear()
            text = piece.lstrip() if chat and not begun else piece
            begun = begun or bool(text)
            if text and not as_json:
                last = text
                sys.stdout.write(harmless(text) if sys.stdout.isatty() else text)
                sys.stdout.flush()
    except BaseException:
        if last and not last.endswith("\n") and takes_more(sys.stdout):
            with suppress(OSError, ValueError):  # it may be stdout that failed, or is closed
                click.echo()
        raise
    session.say_notes()
    completion = stream.completion
    assert completion is not None, "a stream that is exhausted has its completion"
    if as_json:
        click.echo(json.dumps(result_object(session.model, completion), ensure_ascii=False))
    elif not last.endswith("\n"):
        click.echo()
    say_if_full(session.model, completion, max_tokens)


def result_object(model: Hybrid, completion: Completion) -> dict[str, Any]:
    """What `--json` prints for a completion."""
    return {"model": str(model.model_path), **completion.to_dict()}


def say_if_full(model: Hybrid, completion: Completion, max_tokens: int | None) -> None:
    """Say on stderr that the context ended the text, where it was not the limit that did."""
    if completion.finish_reason == "length" and (max_tokens is None or len(completion.tokens) < max_tokens):
        click.echo(f"The context of {model.n_ctx} tokens is full; -c makes it larger.", err=True)
