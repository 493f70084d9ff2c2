"""A chat on a terminal: lines in, answers and words out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from hybrid.apps.chat.commands import Commands, Outcome
from hybrid.apps.chat.facts import status
from hybrid.apps.chat.talk import Asking, Talk
from hybrid.cli import INTERRUPTED
from hybrid.cli.terminal.keyboard import silent_keyboard
from hybrid.cli.terminal.screen import Screen
from hybrid.errors import BadRequestError, HybridError

if TYPE_CHECKING:
    from hybrid import Hybrid
    from hybrid.schedule.placement import Placement

LEAVES = "(Ctrl-C again, Ctrl-D or /exit leaves)"


class Reader(Protocol):
    """Where the person's lines come from."""

    def read(self) -> str:
        """One message; KeyboardInterrupt and EOFError for Ctrl-C and Ctrl-D."""


class TerminalChat:
    """Joins a Talk, its commands, a screen and a keyboard; the Desk that commands turn to."""

    def __init__(
        self,
        talk: Talk,
        screen: Screen,
        load: Callable[[str, Mapping[str, Any]], Hybrid],
        tuning: Mapping[str, Any] | None = None,
    ) -> None:
        """`tuning`: what a TuneRequest is to say beside the context, as the person asked for it at the start."""
        self.talk, self.screen = talk, screen
        self._tuning = tuning or {}
        self.load = load
        """See `Desk.load`."""
        self.commands = Commands(talk, self)

    def run(self, reader: Reader) -> int:
        """Read, answer, repeat, until the person leaves; the exit code."""
        interrupted = False
        while True:
            try:
                line = reader.read()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                if interrupted:
                    return INTERRUPTED
                interrupted = True
                self.screen.say(LEAVES)
                continue
            interrupted = False
            try:
                if not self.take(line):
                    return 0
            except KeyboardInterrupt:
                return INTERRUPTED

    def take(self, line: str) -> bool:
        """Obey or answer one line; False when the person wants to leave. KeyboardInterrupt where Ctrl-C was pressed
        twice."""
        try:
            if line.startswith("/"):
                outcome = self._obey(line)
            elif line.strip():
                outcome = Outcome(asking=self.talk.ask(line.strip()))
            else:
                return True
            if outcome.text:
                self.screen.say(f"{outcome.text}\n")
            if outcome.asking is not None:
                self._answer(outcome.asking)
        except HybridError as e:
            self.screen.say(f"{e}\n")
            return True
        return not outcome.leave

    # -- the desk ----------------------------------------------------------------------------------------------------

    def edit(self, text: str) -> str | None:
        """See `Desk.edit`."""
        try:
            return click.edit(text, extension=".md", require_save=True)
        except click.ClickException as e:
            raise BadRequestError(f"{e.format_message().rstrip('.')}; $EDITOR names the editor.") from e

    def tune_options(self, text: str) -> Mapping[str, Any]:
        """See `Desk.tune_options`."""
        from hybrid.cli.tune import chat_options

        return chat_options(text)

    def tune(self, model: Path, name: str, placement: Placement, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Desk.tune`."""
        from hybrid.apps.commands import arguments
        from hybrid.apps.tune import TuneRequest, tune
        from hybrid.cli.measuring import measuring
        from hybrid.cli.tune_table import tuning_text

        asked = {**self._tuning, **options}
        request = TuneRequest(n_ctx=placement.n_ctx, kv_dtype=placement.kv_dtype, **asked)
        with silent_keyboard(), measuring(lambda: "Ctrl-C goes by what is measured by then") as show:

            def on_progress(what: str, spent: float, left: float) -> None:
                show(what, spent / max(spent + left, 1e-9))

            report = tune(model, request, name=name, on_progress=on_progress)
        self.screen.say(tuning_text(report, self.screen.width))
        if report.best is None:
            raise BadRequestError(report.trouble)
        return arguments(report.rows[report.best].placement)

    def reasoning(self) -> str:
        """See `Desk.reasoning`."""
        return self.screen.reasoning

    # -- inside ------------------------------------------------------------------------------------------------------

    def _obey(self, line: str) -> Outcome:
        """A command; Ctrl-C ends it and not the chat."""
        try:
            return self.commands.obey(line)
        except KeyboardInterrupt:
            return Outcome("Stopped.")

    def _answer(self, asking: Asking) -> None:
        screen, talk = self.screen, self.talk
        screen.answer(asking)
        done = asking.completion
        if done is not None and asking.answered and not screen.quiet:
            screen.say(status(talk.model, done, screen.width))
        if talk.conversation.unanswered and asking.cancelled:
            screen.say("Stopped before an answer; your message is kept: /retry answers it, /undo takes it back.")
        if asking.answered and (warning := talk.warning()):
            screen.say(warning)
        screen.say("")
