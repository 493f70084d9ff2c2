"""Arguments of requests, from whatever form they may be given in."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

from hybrid.errors import BadRequestError


def token_ids(prompt: object) -> list[int]:
    """Token ids as plain ints. Raises BadRequestError for what is neither text nor token ids."""
    if isinstance(prompt, Iterable) and not isinstance(prompt, (bytes, bytearray, Mapping)):
        try:
            return [operator.index(token) for token in prompt]
        except TypeError:
            pass
    raise BadRequestError(f"A prompt is text or a list of token ids, not {type(prompt).__name__} {prompt!r:.40}.")


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """What may be given as `stop`, as a tuple of strings."""
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (stop,)
    if not all(isinstance(s, str) for s in stops):
        raise BadRequestError(f"stop must be a string or a list of strings, not {stop!r:.40}.")
    return stops
