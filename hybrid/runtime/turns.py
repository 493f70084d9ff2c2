"""Who may use a model: one request at a time, and of unfinished streams only the latest."""

from __future__ import annotations

import threading

from hybrid.errors import BadRequestError


class Turns:
    """Guards the one KV state that all requests to a model share.

    Requests of several threads wait for each other. A stream gives the model free between its pieces; once another
    request has used it then, the stream cannot go on: its text would continue the other's. A request works within

        with turns.queue, turns.begin(request):  # or turns.resume(request)

    Both are locks, which Python takes and releases in one step: Ctrl-C at any moment leaves neither held.
    (A context manager written in Python can be interrupted between its own last line and the block it guards.)
    """

    def __init__(self) -> None:
        self.queue = threading.RLock()
        self._work = threading.Lock()
        self._latest: object = None

    def begin(self, request: object) -> threading.Lock:
        """The lock within which a new `request` alone uses the model.

        Raises BadRequestError for a request made from inside another (from a progress callback).
        """
        if self._work.locked():  # by this very thread: the queue keeps the others out
            raise BadRequestError("The model is at work: it cannot be used from its own progress callback.")
        self._latest = request
        return self._work

    def resume(self, request: object) -> threading.Lock:
        """As `begin`, for a request that has begun. Raises BadRequestError if another has begun since."""
        if self._latest is not request:
            raise BadRequestError(
                "This stream cannot go on: the model was used for something else before it ended. "
                "Read a stream to its end before the next request, or load the model twice."
            )
        return self.begin(request)

    def at_work(self, request: object) -> bool:
        """Whether it is `request` that uses the model at this moment."""
        return self._work.locked() and self._latest is request
