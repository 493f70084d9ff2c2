"""From token bytes to text a person may see: no character cut in two, no stop string leaked."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from hybrid.errors import BadRequestError


class TextStream:
    """Turns a stream of token bytes into pieces of text.

    A piece never ends inside a UTF-8 character; bytes become U+FFFD only when no continuation could make them valid.
    With `stop` strings the text ends where the first of them begins (of two that overlap, the one that begins
    earlier): characters that may yet turn out to belong to one are held back until that is decided.
    How the bytes are cut into pushes never changes the text.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        """Raises BadRequestError for an empty stop string, which would match everywhere."""
        if isinstance(stop, str) or any(not s for s in stop):
            raise BadRequestError("stop must be a list of strings, none of them empty.")
        self._stop = tuple(dict.fromkeys(stop))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met: everything pushed from now on is ignored."""
        return self._stopped

    def push(self, data: bytes) -> str:
        """Feed the bytes of one token (or of many); returns the text that is now certain, perhaps none."""
        return "" if self._stopped else self._advance(self._decoder.decode(data), final=False)

    def finish(self) -> str:
        """No more bytes will come: returns what was held back, up to a stop string if one is in it."""
        return "" if self._stopped else self._advance(self._decoder.decode(b"", final=True), final=True)

    def _advance(self, text: str, *, final: bool) -> str:
        if not self._stop:
            return text
        self._held += text
        found = min((i for i in (self._held.find(s) for s in self._stop) if i >= 0), default=len(self._held))
        undecided = len(self._held) if final else self._first_partial(found)
        if found < len(self._held) and found <= undecided:
            self._stopped = True
            out, self._held = self._held[:found], ""
            return out
        out, self._held = self._held[:undecided], self._held[undecided:]
        return out

    def _first_partial(self, limit: int) -> int:
        """Index before `limit` where a suffix of the held text begins that is the beginning of a stop string."""
        n = len(self._held)
        for i in range(max(0, n - max(map(len, self._stop)) + 1), min(limit, n)):
            tail = self._held[i:]
            if any(s.startswith(tail) for s in self._stop):
                return i
        return limit
