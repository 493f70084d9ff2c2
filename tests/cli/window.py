"""A chat in a terminal window that a test types into and looks at: an emulated one, and one of tmux."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL

import pexpect
import psutil
import pyte
import pytest

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
            if time.monotonic() > deadline or not self._read():
                raise AssertionError(f"never came: {what}\n{self.text}")

    def _read(self) -> bool:
        """Wait for more of what the program writes; False where no more comes."""
        try:
            self._stream.feed(self.child.read_nonblocking(65536, timeout=self.patience_s))
        except (pexpect.EOF, pexpect.TIMEOUT):
            return False
        return True

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
        echoes = self._times(line, before)
        self.type(f"{line}\r")
        # The prompt that is there may be drawn anew before it has got the line.
        self.until(lambda: self._times(line, self.text) > echoes and self.text.endswith("\n>"), "an answer")
        return self.text[len(before) :].removesuffix("\n>")

    def _times(self, line: str, text: str) -> int:
        """How often it stands there, wherever lines were broken."""
        return "".join(text.split()).count("".join(line.split()))

    def type(self, keys: str) -> None:
        """Press keys."""
        self.child.send(keys)

    def leave(self) -> int:
        """Ctrl-D; the exit code."""
        self.prompt()
        self.type("\x04")
        return self.end()

    def resize(self, columns: int, rows: int) -> None:
        """Drag its corner; the system tells the program (SIGWINCH)."""
        self.screen.resize(rows, columns)
        self.child.setwinsize(rows, columns)

    def kill(self, signal: int) -> None:
        """End the program, or ask it to."""
        self.child.kill(signal)

    def end(self) -> int:
        """Read on until it has ended; the exit code, negative for a signal."""
        while self._read():
            pass
        deadline = time.monotonic() + self.patience_s
        while self.child.isalive():
            assert time.monotonic() < deadline, f"it does not end\n{self.text}"
            time.sleep(0.01)
        return self.child.exitstatus if self.child.exitstatus is not None else -int(self.child.signalstatus or 0)

    def close(self) -> None:
        """Whatever it does, end it."""
        self.child.close(force=True)

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TmuxWindow(Window):
    """The same in tmux, a terminal that people use: it breaks lines anew where it is resized, and keeps a history.

    Skips the test where there is no tmux.
    """

    def __init__(
        self, *args: str | Path, env: dict[str, str], columns: int = 90, rows: int = 40, patience_s: float = 120
    ) -> None:
        if shutil.which("tmux") is None:
            pytest.skip("there is no tmux: apt install tmux")
        self.patience_s = patience_s
        self._folder = tempfile.TemporaryDirectory()
        self._env = {**env, "TERM": "tmux-256color"}
        # Its shell says how the program ended: tmux now and then forgets that of one which was killed.
        command = shlex.join([*HYBRID, "chat", *map(str, args)])
        command = f"trap : INT; {command}; echo $? > {self._folder.name}/code"
        size = ["-x", str(columns), "-y", str(rows)]
        options = {"remain-on-exit": "on", "remain-on-exit-format": "", "history-limit": "9999"}
        setting = [word for option in options.items() for word in ("set", "-gq", *option, ";")]
        self._tmux("start-server", ";", *setting, "new-session", "-d", *size, command)

    @property
    def text(self) -> str:
        """See `Window.text`."""
        lines = self._tmux("capture-pane", "-p", "-J", "-S", "-").split("\n")
        return "\n".join(line.rstrip() for line in lines).rstrip()

    def type(self, keys: str) -> None:
        """See `Window.type`."""
        self._tmux("send-keys", "-H", *(f"{byte:x}" for byte in keys.encode()))

    def resize(self, columns: int, rows: int) -> None:
        """See `Window.resize`."""
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    def kill(self, signal: int) -> None:
        """See `Window.kill`."""
        (program,) = psutil.Process(int(self._tmux("display-message", "-p", "#{pane_pid}"))).children()
        program.send_signal(signal)

    def end(self) -> int:
        """See `Window.end`."""
        while self._read():
            pass
        code = int(Path(self._folder.name, "code").read_text())
        return -SIGKILL if code == 128 + SIGKILL else code

    def close(self) -> None:
        """See `Window.close`."""
        self._tmux("kill-server")
        self._folder.cleanup()

    def _read(self) -> bool:
        time.sleep(0.03)  # tmux does not say when there is something new
        return self._tmux("display-message", "-p", "#{pane_dead}").strip() != "1"

    def _tmux(self, *words: str) -> str:
        """What a command of tmux prints; its server is the test's own."""
        command = ["tmux", "-u", "-S", f"{self._folder.name}/tmux", "-f", os.devnull, *words]
        return subprocess.run(command, env=self._env, capture_output=True, text=True, check=True, timeout=60).stdout
