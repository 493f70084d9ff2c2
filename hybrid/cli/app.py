"""`hybrid`: finds the command, and turns whatever goes wrong into one sentence and an exit code."""

from __future__ import annotations

import difflib
import gc
import importlib
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from types import FrameType
from typing import NoReturn, TextIO

import click

from hybrid.cli import ENDING, INTERRUPTED, takes_more
from hybrid.cli.clash import check_package
from hybrid.errors import HybridError
from hybrid.printable import printable

COMMANDS = {
    "chat": "Chat with a model.",
    "generate": "Continue a prompt.",
    "summarize": "Summarize long documents.",
    "inspect": "Show what a model is made of and where it can be split.",
    "models": "List and download small models.",
    "plan": "Show what fits and what it would cost.",
    "tune": "Measure which split is quickest here.",
    "compare": "Compare splits, KV caches and llama.cpp alone, measured here.",
    "machine": "Show this computer's memories and how fast they are.",
    "config": "Show your own defaults for chat and generate.",
}
"""Each is `command` in the module of its name; imported when called, so that `--help` costs nothing."""

CLOSED_PIPE = 141
"""128 + SIGPIPE: what a shell reports for a program whose reader went away."""
LONGEST = 2000
"""Characters of a sentence: it may quote a file, which may hold anything."""


class Commands(click.Group):
    """The group of lazily imported commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the help text."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import the command's module; None (click's usage error) where there is no such command."""
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"hybrid.cli.{name}").command
        command.name = name
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name the nearest command where there is none of that name."""
        close = difflib.get_close_matches(args[0], COMMANDS, n=1)
        if args[0] not in COMMANDS and close:
            ctx.fail(f"No such command {args[0]!r} (did you mean {close[0]!r}?)")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; a reader that went away (`hybrid … | head -1`) is no error worth a word."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _abandon(sys.stdout)
            ctx.exit(CLOSED_PIPE)
        return result


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        import hybrid

        click.echo(f"hybrid {hybrid.__version__}")
        ctx.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Show the version."
)
def commands() -> None:
    """Run GGUF models split at a layer: the early layers on the GPU in PyTorch, the late ones on the CPU in llama.cpp.

    MODEL is a GGUF file, a name from `hybrid models`, hf:ORG/REPO:Q4_K_M, hf:ORG/REPO/FILE.gguf, ollama:NAME or
    lmstudio:PUBLISHER/MODEL; without one it is smollm2-135m. Every command prints one JSON object with --json.
    """


def main() -> NoReturn:
    """Entry point of the console script. Exit codes: 0 fine, 2 bad input, 130 interrupted, 143 terminated, 129 hung up,
    141 nobody reads the output, 1 a bug of ours."""
    told: list[int] = []

    def end(number: int, frame: FrameType | None) -> NoReturn:
        """As after Ctrl-C: what the terminal was set to and what was half written is put right on the way out."""
        told.append(number)
        raise SystemExit(128 + number)

    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, end)
    _sound_streams()
    try:
        code = _run(sys.argv[1:] or ["--help"])
    except SystemExit as ended:  # a signal, or a command's own code
        if not isinstance(ended.code, int):
            raise
        code = ended.code
    code = 128 + told[0] if told else code  # what it interrupted may have had something to say first
    for stream in (sys.stdout, sys.stderr):
        try:
            if code > 128 and not takes_more(stream):
                _abandon(stream)  # told to end, and not when somebody has read on
            stream.flush()
        except (OSError, ValueError):
            code = code or CLOSED_PIPE
            _abandon(stream)
    if code > 128 and any(thread.name == "hybrid-head" for thread in threading.enumerate()):
        os._exit(code)  # torch is still being imported: Python would end that thread amid C++, or wait for it
    gc.freeze()  # else Python looks for cycles once more, which takes half a second where torch is loaded
    sys.exit(code)


def _sound_streams() -> None:
    """Streams that were closed (`hybrid … >&-`) become /dev/null; characters a terminal cannot show become `?`."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for as long as the program runs
        elif name != "stdin" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _run(args: list[str]) -> int:
    try:
        check_package()
        return commands.main(args, prog_name="hybrid", standalone_mode=False) or 0
    except HybridError as e:
        return _complain(str(e), e.exit_code)
    except click.UsageError as e:
        where = e.ctx.command_path if e.ctx else "hybrid"
        return _complain(f"{e.format_message().rstrip('.')}; see '{where} --help'.", 2)
    except click.ClickException as e:
        return _complain(e.format_message(), 2)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except MemoryError:
        return _complain("The machine is out of memory; use a smaller model or a shorter context (-c).", 2)
    except OSError as e:
        _abandon(sys.stdout)  # perhaps it was the disk behind stdout that is full
        name = f" ({e.filename})" if e.filename else ""
        return _complain(f"The operating system refused: {e.strerror or e}{name}.", 2)
    except Exception as e:
        return _complain(
            f"Something unforeseen went wrong ({type(e).__name__}: {' '.join(str(e).split())}); "
            "please report it with the command you ran. HYBRID_DEBUG=1 shows where it happened.",
            1,
        )


def _complain(sentence: str, code: int) -> int:
    """Print the sentence (and, for those who debug, the traceback of the exception being handled)."""
    if os.environ.get("HYBRID_DEBUG") == "1":
        traceback.print_exc()
    if len(sentence) > LONGEST:
        sentence = f"{sentence[: LONGEST // 2]} … {sentence[-LONGEST // 2 :]}"
    with suppress(OSError):  # a terminal that is gone, a full disk: the code says it
        click.echo(f"hybrid: {printable(sentence)}", err=True)
    return code


def _abandon(stream: TextIO) -> None:
    """Let what is still buffered go nowhere, so that Python does not complain about the closed pipe when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
