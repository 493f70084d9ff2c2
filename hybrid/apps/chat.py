"""The chat: a conversation in the terminal."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from hybrid.apps.lines import silent_keyboard
from hybrid.errors import HybridError

if TYPE_CHECKING:
    from hybrid import Completion, Hybrid

HELP = """\
/system TEXT  set the system prompt; alone: show it
/clear        forget the conversation (the system prompt stays)
/stats        what the last answer took, and what runs where
/exit         leave (so does Ctrl-D)
Ctrl-C stops an answer, Alt-Enter begins a new line of a message.
To send a message that begins with a slash, put a space before it."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What a terminal would obey: a model must not move the cursor."""


class Reader(Protocol):
    """Where the person's lines come from."""

    def read(self) -> str:
        """One message; KeyboardInterrupt and EOFError for Ctrl-C and Ctrl-D."""


class Chat:
    """A conversation with a loaded model, its commands, and how both look on a terminal."""

    def __init__(
        self,
        model: Hybrid,
        options: Mapping[str, Any],
        *,
        system: str | None = None,
        before_output: Callable[[], None] = lambda: None,
    ) -> None:
        """`options` go to `Hybrid.chat`. `before_output` is called before anything is printed (to clear a bar)."""
        self.model = model
        self.options = dict(options)
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.last: Completion | None = None
        self._before_output = before_output
        self.commands: dict[str, Callable[[str], bool]] = {
            "/help": self._help,
            "/system": self._system,
            "/clear": self._clear,
            "/stats": self._stats,
            "/exit": self._exit,
            "/quit": self._exit,
        }

    def run(self, reader: Reader) -> None:
        """Read, answer, repeat, until the person leaves."""
        where = self.model.placement
        self._say(f"{self.model.model_path.stem}, {where.where}.\n/help lists the commands, Ctrl-D leaves.\n")
        going = True
        while going:
            try:
                going = self.take(reader.read())
            except KeyboardInterrupt:
                self._say("(Ctrl-D or /exit leaves)")
            except EOFError:
                going = False

    def take(self, line: str) -> bool:
        """Obey or answer one line; False when the person wants to leave."""
        if line.startswith("/"):
            name, _, rest = line.partition(" ")
            command = self.commands.get(name.strip())
            if command is not None:
                return command(rest.strip())
            self._say(f"There is no command {name.strip()}; /help lists them. To send the line, put a space before it.")
        elif line.strip():
            self.answer(line.strip())
        return True

    def answer(self, text: str) -> None:
        """Send a message and print the answer as it is made.

        Both join the conversation, also when Ctrl-C cut the answer short; neither does where there is no answer.
        """
        messages = [*self._prefix(), *self.messages, {"role": "user", "content": text}]
        pieces: list[str] = []
        completion: Completion | None = None
        try:
            stream = self.model.chat(messages, stream=True, **self.options)
            with silent_keyboard(), _interrupts(stream.cancel, lambda: bool(pieces)):
                for piece in stream:
                    self._write(piece if pieces else piece.lstrip())
                    pieces.append(piece)
            completion = stream.completion
        except KeyboardInterrupt:
            pass
        except HybridError as e:
            self._say(f"{e}\n")
            return
        if pieces:
            self._write("" if pieces[-1].endswith("\n") else "\n")
            self.messages = [*self.messages, messages[-1], {"role": "assistant", "content": "".join(pieces)}]
        if completion is None:
            self._say("(stopped)\n")
            return
        self.last = completion
        self._say(f"({summary(completion, self.model.n_used, self.model.n_ctx)})")
        if completion.finish_reason == "length" and self.model.n_used >= self.model.n_ctx:
            self._say("The context is full: /clear begins a new conversation, -c N makes room for longer ones.")
        self._say("")

    def _prefix(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def _help(self, _: str) -> bool:
        self._say(HELP)
        return True

    def _system(self, text: str) -> bool:
        if text:
            self.system = text
        self._say(f"System prompt: {self.system}" if self.system else "There is no system prompt.")
        return True

    def _clear(self, _: str) -> bool:
        self.messages = []
        self._say("The conversation is forgotten.")
        return True

    def _stats(self, _: str) -> bool:
        self._say("\n".join(details(self.model, self.last)))
        return True

    def _exit(self, _: str) -> bool:
        return False

    def _write(self, text: str) -> None:
        self._before_output()
        sys.stdout.write(CONTROL.sub("\ufffd", text) if sys.stdout.isatty() else text)
        sys.stdout.flush()

    def _say(self, text: str) -> None:
        """The program's own words: dim, and on stderr, so that a redirected stdout holds the answers alone."""
        self._before_output()
        plain = not sys.stderr.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM", "dumb") == "dumb"
        sys.stderr.write(text + "\n" if plain else f"\x1b[2m{text}\x1b[0m\n")
        sys.stderr.flush()


def summary(completion: Completion, n_used: int, n_ctx: int) -> str:
    """One line about an answer."""
    timings, n = completion.timings, len(completion.tokens)
    parts = ["stopped"] * (completion.finish_reason == "interrupted") + [f"{n} token{'s' * (n != 1)}"]
    if timings.decode_tok_per_s is not None:
        parts.append(f"{timings.decode_tok_per_s:.1f} per second")
    if timings.ttft_s is not None:
        parts.append(f"the first after {timings.ttft_s:.2f} s")
    return f"{', '.join(parts)}; context {n_used} of {n_ctx}"


def details(model: Hybrid, last: Completion | None) -> list[str]:
    """What `/stats` prints."""
    where = model.placement
    lines = [
        f"model    {model.model_path}",
        f"layers   {where.where}, the others in llama.cpp" if where.n_gpu_layers else f"layers   {where.where}",
        f"context  {model.n_used} of {model.n_ctx} tokens, KV cache {where.kv} {where.kv_dtype}",
    ]
    if last is not None:
        speed, reused = last.timings, last.n_cached_tokens
        prefill = "" if speed.prefill_tok_per_s is None else f", {speed.prefill_tok_per_s:.1f} tokens per second"
        lines += [
            f"prompt   {last.n_prompt_tokens} tokens, {reused} of them reused{prefill}",
            f"answer   {summary(last, model.n_used, model.n_ctx)}",
            f"memory   {_mib(last.memory.device_bytes)} on the device, {_mib(last.memory.host_bytes)} on the host",
        ]
    return lines


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.0f} MiB"


@contextmanager
def _interrupts(cancel: Callable[[], None], begun: Callable[[], bool]) -> Iterator[None]:
    """Within, Ctrl-C calls `cancel`, so that the answer ends between two tokens and is kept. Before it has `begun`
    (while a long prompt is read), and when pressed again, it is raised as usual."""
    pressed = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed or not begun():
            raise KeyboardInterrupt
        pressed = True
        cancel()

    previous = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
