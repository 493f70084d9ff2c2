"""A chat in a terminal window that a test types into and looks at."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pexpect
import pyte

from tests.cli.conftest import HYBRID


class _Screen(pyte.HistoryScreen):
    """Shows dim text in grey; pyte does not know what dim is."""

    def select_graphic_rendition(self, *attributes: int, **kwargs: bool) -> None:
        super().select_graphic_rendition(*(90 if a == 2 else a for a in attributes), **kwargs)


class Window:
    """`hybrid chat` with these arguments, on a terminal of its own."""

    def __init__(
        self, *args: str | Path, env: dict[str, str], columns: int = 90, rows: int = 40, patience_s: float = 120
    ) -> None:
        self.patience_s = patience_s
        self.screen = _Screen(columns, rows, history=5000, ratio=0.5)
        self._stream = pyte.Stream(self.screen)
        command = [*HYBRID[1:], "chat", *map(str, args)]
        self.child = pexpect.spawn(
            HYBRID[0], command, env=env, encoding="utf-8", codec_errors="replace", dimensions=(rows, columns)
        )
        self.child.delaybeforesend = None

    @property
    def text(self) -> str:
        """Everything that was shown, what has left at the top included."""
        past = ["".join(row[i].data for i in range(self.screen.columns)) for row in self.screen.history.top]
        return "\n".join(line.rstrip() for line in [*past, *self.screen.display]).rstrip()

    def until(self, there: Callable[[], bool], what: object) -> None:
        """Read what the program writes until that is there."""
        deadline = time.monotonic() + self.patience_s
        while not there():
            if time.monotonic() > deadline:
                raise AssertionError(f"never came: {what}\n{self.text}")
            try:
                self._stream.feed(self.child.read_nonblocking(65536, timeout=self.patience_s))
            except (pexpect.EOF, pexpect.TIMEOUT) as e:
                raise AssertionError(f"ended before {what}:\n{self.text}") from e

    def expect(self, words: str) -> None:
        """Until these words are shown, wherever lines were broken."""
        self.until(lambda: words in self.text or words in " ".join(self.text.split()), words)

    def prompt(self) -> str:
        """Until it asks for the next line; returns all that is shown."""
        self.until(lambda: self.text.endswith("\n>") or self.text == ">", "a prompt")
        return self.text

    def say(self, line: str) -> str:
        """Type a line, wait for the next prompt, return what was shown in between."""
        before = self.prompt()
        self.type(f"{line}\r")
        self.until(lambda: len(self.text) > len(before) and self.text.endswith("\n>"), "an answer")
        return self.text[len(before) :].removesuffix("\n>")

    def type(self, keys: str) -> None:
        """Press keys."""
        self.child.send(keys)

    def leave(self) -> int:
        """Ctrl-D; the exit code."""
        self.prompt()
        self.type("\x04")
        return self.end()

    def end(self) -> int:
        """Read on until it has ended; the exit code, negative for a signal."""
        while True:
            try:
                self._stream.feed(self.child.read_nonblocking(65536, timeout=self.patience_s))
            except pexpect.EOF:
                break
        self.child.wait()
        return self.child.exitstatus if self.child.exitstatus is not None else -int(self.child.signalstatus or 0)

    def close(self) -> None:
        """Whatever it does, end it."""
        self.child.close(force=True)

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
