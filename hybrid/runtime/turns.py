"""Who may use a model: one request at a time, and of unfinished streams only the latest."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hybrid.errors import BadRequestError


class Turns:
    """Guards the one KV state that all requests to a model share.

    Requests of several threads wait for each other. A stream gives the model free between its pieces; once another
    request has used it then, the stream cannot go on: its text would continue the other's.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._latest: object = None
        self._busy = False

    def at_work(self, request: object) -> bool:
        """Whether it is `request` that uses the model at this moment."""
        return self._busy and self._latest is request

    @contextmanager
    def take(self, request: object, *, begin: bool) -> Iterator[None]:
        """Within, `request` alone uses the model; it `begin`s, or goes on.

        Raises BadRequestError for a request that goes on after another began, and for one made from inside another
        (from a progress callback).
        """
        with self._lock:
            if self._busy:  # by this very thread: the lock keeps the others out
                raise BadRequestError("The model is at work: it cannot be used from its own progress callback.")
            if not begin and self._latest is not request:
                raise BadRequestError(
                    "This stream cannot go on: the model was used for something else before it ended. "
                    "Read a stream to its end before the next request, or load the model twice."
                )
            try:
                self._busy = True
                self._latest = request
                yield
            finally:
                self._busy = False
