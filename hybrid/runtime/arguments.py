"""Arguments of requests, from whatever form they may be given in."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hybrid.errors import BadRequestError


def plain_text(text: object) -> str:
    """Text as a str. Raises BadRequestError for what is neither that nor UTF-8."""
    if isinstance(text, (bytes, bytearray)):
        try:
            return text.decode()
        except UnicodeDecodeError as e:
            raise BadRequestError(f"The text is not UTF-8 ({e.reason} at byte {e.start}).") from e
    if not isinstance(text, str):
        raise BadRequestError(f"Text is a str or UTF-8 bytes, not {type(text).__name__}.")
    return text


def token_ids(prompt: object) -> list[int]:
    """Token ids as plain ints. Raises BadRequestError for what is neither text nor token ids."""
    if isinstance(prompt, Iterable) and not isinstance(prompt, (bytes, bytearray, Mapping)):
        try:
            return [operator.index(token) for token in prompt]
        except TypeError:
            pass
    raise BadRequestError(f"A prompt is text or a list of token ids, not {type(prompt).__name__} {prompt!r:.40}.")


def token_biases(logit_bias: Mapping[Any, float] | None) -> dict[int, float]:
    """Token id -> what is added to its logit; ids may be written as text, which is all that JSON has for keys."""
    try:
        return {int(token): float(value) for token, value in (logit_bias or {}).items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as e:
        raise BadRequestError("logit_bias maps token ids to numbers.") from e


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """What may be given as `stop`, as a tuple of strings."""
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (stop,)
    if not all(isinstance(s, str) for s in stops):
        raise BadRequestError(f"stop must be a string or a list of strings, not {stop!r:.40}.")
    return stops
