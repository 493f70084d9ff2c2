"""The KV states of conversations, in files of a bounded folder: what makes yesterday's conversation open at once."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid.errors import BadRequestError, HybridError
from hybrid.schedule.budget import mib

if TYPE_CHECKING:
    from hybrid import Hybrid

LEAST_TOKENS = 64
"""Fewer are read again as quickly."""


class StateFolder:
    """One file a conversation, together at most `limit` bytes; the oldest are dropped. What cannot be written costs
    only the time to read the conversation again."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self.limit = path, limit

    def save(self, key: str, model: Hybrid) -> str | None:
        """Save what the model's context holds under `key`; a sentence where that was not to be done or failed."""
        from hybrid.runtime.saved_state import state_bytes
        from hybrid.schedule.limits import available_ram

        n_tokens = 0 if model.closed else model.n_used
        if not self.limit or n_tokens < LEAST_TOKENS:
            return None
        expected = state_bytes(model.engine, n_tokens)
        if expected > self.limit:
            return (
                f"The conversation's KV state ({mib(expected)}) is larger than --state-limit ({mib(self.limit)}) "
                "and was not saved; it will be read again."
            )
        if 2 * expected > available_ram():
            return f"There is no memory to save the conversation's KV state ({mib(expected)}); it will be read again."
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            model.save_state(self._file(key))
            self._drop_oldest(key)
        except (OSError, HybridError) as e:
            why = getattr(e, "strerror", None) or str(e).rstrip(".")
            return f"The conversation's KV state was not saved ({why}); it will be read again."
        return None

    def restore(self, key: str, model: Hybrid) -> int:
        """Give the model's context what was saved under `key`; returns its tokens.

        Raises BadRequestError with a clause that says why that cannot be.
        """
        path = self._file(key)
        try:
            n_tokens = model.restore_state(path)
        except FileNotFoundError:
            raise BadRequestError("it was not saved") from None
        except OSError as e:
            raise BadRequestError(f"it cannot be read: {e.strerror}") from e
        except HybridError as e:
            raise BadRequestError(str(e).rstrip(".")) from e
        with suppress(OSError):
            os.utime(path)
        return n_tokens

    def _file(self, key: str) -> Path:
        return self.path / f"{key}.state"

    def _drop_oldest(self, newest: str) -> None:
        """Keep the folder within its limit; `newest` is the last to go."""
        found = []
        for path in self.path.glob("*.state"):
            with suppress(OSError):  # another process dropped it
                status = path.stat()
                found.append((path == self._file(newest), status.st_mtime_ns, status.st_size, path))
        found.sort(reverse=True)
        room = self.limit
        for _, _, size, path in found:
            room -= size
            if room < 0:
                path.unlink(missing_ok=True)
