"""`hybrid summarize`: documents in, summaries out."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybrid.cli.options import PLACEMENT, json_option, pick, placement_options
from hybrid.cli.units import Number, Whole
from hybrid.errors import BadRequestError
from hybrid.files import write_atomically

if TYPE_CHECKING:
    from hybrid import Hybrid, Summary
    from hybrid.apps.summarize.api import SummaryOptions
    from hybrid.apps.summarize.document import Document
    from hybrid.cli.summarize_bar import SummaryBar

OPTIONS = (
    "strategy",
    "length",
    "focus",
    "language",
    "prompts",
    "overlap",
    "temperature",
    "repeat_penalty",
    "seed",
    "parallel",
    "speculate",
)
SUFFIX = ".summary.txt"
N_DRAFT = 7
"""As `hybrid.apps.summarize.api` has it, which is not imported for --help."""

DETAILS = """
\b
STRATEGIES
  single      The whole text in one prompt; refused where it does not fit.
  map-reduce  The text is cut into chunks at headings, paragraphs or sentences.
              Each is summarised; the summaries are merged, in as many levels as
              needed. When they get no shorter they are printed side by side,
              and that is said.
  refine      The first chunk is summarised, and the summary rewritten with each
              further chunk. Slower; follows a story better.
  auto        single where it fits, else map-reduce.

\b
WHAT IS READ
  Text, Markdown, HTML, EPUB, subtitles (srt, vtt), and with
  pip install pypdf python-docx  PDF and DOCX. Encodings are detected;
  bytes that cannot be read are replaced by U+FFFD and counted on stderr.
  Every token of a document is read: the report on stderr counts them, and a
  run that did not read all of them is an error. Empty summaries, and ones that
  repeat themselves, are asked for once more and reported. One that reaches its
  token limit ends with its last whole sentence and […], and that is said.

\b
INTERRUPTED RUNS
  Every answer is saved as soon as it is there, in hybrid/summaries in your
  state directory (~/.local/state on Linux). After Ctrl-C, a crash or a power
  cut the same command with --resume goes on from there. At temperature 0 and
  with --parallel 1 the result is the same as without the interruption. If the
  document, the model or an option changed, it starts afresh and says so. The
  saved answers are removed when the summary is written.

\b
SPEED
  --parallel N reads N chunks at a time, each in a context of its own, and
  decodes their summaries in one batch; where the model is split, the CPU works
  on one half of them while the GPU works on the other. On quantised models a
  summary may then differ in a word from the one made alone, and from one run
  to the next; --parallel 1 repeats exactly, and is what --resume repeats.
  --speculate N guesses up to N tokens at a time from what the text and the
  summary repeat, and verifies them together: the summary is the same, sooner
  where it quotes. Guesses are made only where they were right often enough to
  pay, by what a batch costs on this machine (measured once, then kept).

\b
PROMPTS
  --show-prompts prints the built-in templates. A folder given with --prompts
  may hold single.txt, map.txt, reduce.txt, refine.txt, combine.txt; the others
  stay as they are. A template names {text} (refine.txt also {summary}) and may
  name {length}, {focus} and {language}; other {words} in braces are refused.

\b
JSON
  One object: text, document (name, format, encoding, sha256, tokens,
  tokens_read, share_read), model, strategy, chunks, overlap, levels, n_levels,
  phases (per kind of prompt: jobs, from_checkpoint, tokens, seconds, speeds),
  flagged, truncated, complete, wall_s, options, placement, notes. For several
  files: {"documents": [one such object each], "combined": one or null}.

\b
EXAMPLES
  hybrid summarize report.pdf -o report.summary.txt
  hybrid summarize talk.vtt --length "80 words" --focus "decisions and dates"
  hybrid summarize papers/*.pdf -o summaries/ --combine --length long
  pdftotext book.pdf - | hybrid summarize - --json
"""


def _show_prompts(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from hybrid.apps.summarize.prompts import TEMPLATES

        for name, template in TEMPLATES.items():
            click.echo(f"== {name}.txt ==\n{template}\n")
        ctx.exit()


def _parallel(ctx: click.Context, param: click.Parameter, value: str) -> int | str:
    return "auto" if value.strip().lower() == "auto" else _number(ctx, param, value, 1, "auto")


def _speculate(ctx: click.Context, param: click.Parameter, value: str) -> int:
    return 0 if value.strip().lower() == "off" else _number(ctx, param, value, 0, "off")


def _number(ctx: click.Context, param: click.Parameter, value: str, least: int, word: str) -> int:
    text = value.strip()
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) >= least):
        raise click.BadParameter(f"{value!r} is not a whole number of {least} or more, or {word!r}", ctx, param)
    return int(text)


@click.command(epilog=DETAILS)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("-o", "--output", metavar="OUT", help="File for the summary; with several files, a folder for them.")
@click.option("-m", "--model", metavar="M", help="GGUF file or name from `hybrid models`.  [default: smollm2-135m]")
@click.option(
    "--strategy",
    type=click.Choice(["auto", "single", "map-reduce", "refine"]),
    default="auto",
    show_default=True,
    help="How a text longer than the context is read; see below.",
)
@click.option(
    "--length",
    default="medium",
    show_default=True,
    metavar="short|medium|long|'N words'",
    help="About how long the summary is to be (60, 150, 400 words).",
)
@click.option("--focus", metavar="TEXT", help="What to pay special attention to.")
@click.option("--language", metavar="LANG", help="Language of the summary.  [default: that of the text]")
@click.option("--combine", is_flag=True, help="With several files: also one summary of them all.")
@click.option("--resume", is_flag=True, help="Go on with a run that was interrupted.")
@click.option("--prompts", metavar="DIR", help="Folder of prompt templates that replace the built-in ones.")
@click.option(
    "--show-prompts", is_flag=True, expose_value=False, is_eager=True, callback=_show_prompts, help="Print them."
)
@click.option("--encoding", metavar="NAME", help="Encoding of the files.  [default: detected]")
@click.option(
    "--overlap",
    type=Whole(min=0),
    metavar="N",
    help="Tokens that neighbouring chunks may share.  [default: a twentieth of a chunk; refine: 0]",
)
@click.option(
    "--parallel",
    default="auto",
    show_default=True,
    metavar="N|auto",
    callback=_parallel,
    help="Chunks at a time; auto: as many as fit in memory, up to 8. See below.",
)
@click.option(
    "--speculate",
    default=str(N_DRAFT),
    show_default=True,
    metavar="N|off",
    callback=_speculate,
    help="Most tokens to guess at a time where a text is quoted. See below.",
)
@click.option(
    "--temp",
    "temperature",
    type=Number(min=0),
    default=0.0,
    show_default=True,
    metavar="T",
    help="0: greedy.",
)
@click.option(
    "--repeat-penalty",
    type=Number(min=0, min_open=True),
    default=1.0,
    show_default=True,
    metavar="X",
    help="Penalty on recent tokens; 1: off.",
)
@click.option("-s", "--seed", type=Whole(0, 2**32 - 1), default=0, show_default=True, metavar="N", help="Seed.")
@placement_options
@json_option
def command(
    files: tuple[str, ...],
    output: str | None,
    model: str | None,
    combine: bool,
    resume: bool,
    encoding: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Summarize long documents, however long they are; `-` is stdin.

    The summary goes to stdout (or, with -o, to a file that appears when it is complete), the report to stderr.
    """
    from hybrid.apps.summarize.api import SummaryOptions
    from hybrid.apps.summarize.document import read_document
    from hybrid.apps.summarize.prompts import read_prompts

    if files.count("-") > 1:
        raise click.UsageError("stdin (-) can be read once only")
    for name in ("focus", "language"):
        if options[name] is not None:
            _checked(options[name])
    chosen = SummaryOptions(**pick(OPTIONS, options))
    read_prompts(chosen.prompts)
    targets = _targets(files, output, combine)
    documents = [read_document(file, encoding=encoding) for file in files]  # all, before hours are spent on the first
    _Command(chosen, pick(PLACEMENT, options), targets, resume, as_json).run(documents, model, combine)


class _Command:
    """One call of the command: its model, its bar, what is printed and written."""

    def __init__(
        self,
        options: SummaryOptions,
        placement: Mapping[str, Any],
        targets: Sequence[Path | None],
        resume: bool,
        as_json: bool,
    ) -> None:
        from hybrid.cli.summarize_bar import SummaryBar

        self._options, self._placement, self._targets = options, placement, targets
        self._resume, self._as_json = resume, as_json
        self._bar: SummaryBar = SummaryBar()
        self._several = len(targets) > 1

    def run(self, documents: Sequence[Document], model: str | None, combined: bool) -> None:
        """Summarise everything. The answers saved on the way are removed when all is written."""
        from hybrid import Hybrid
        from hybrid.apps.summarize.api import SummaryRun, most_useful, together

        runs: list[SummaryRun] = []
        summaries: list[Summary] = []
        try:
            options = self._options
            with Hybrid(
                model,
                progress=self._bar.load,
                n_sequences=options.parallel,
                most_sequences=most_useful(documents, options.strategy, self._placement["n_ctx"]),
                n_draft=options.speculate,
                **self._placement,
            ) as loaded:
                self._say(loaded.notes)
                for document, target in zip(documents, self._targets, strict=False):
                    runs.append(SummaryRun(document, loaded, self._options, self._resume, True, self._bar.show))
                    summaries.append(self._one(runs[-1], loaded, target))
                if combined:
                    document = together(summaries)
                    runs.append(
                        SummaryRun(document, loaded, self._options, self._resume, True, self._bar.show, last="combine")
                    )
                    summaries.append(self._one(runs[-1], loaded, self._targets[-1]))
            if self._as_json:
                click.echo(json.dumps(self._object(summaries, combined), ensure_ascii=False))
            sys.stdout.flush()
            for run in runs:
                run.finish()
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C, SIGTERM
            self._bar.clear()
            if runs:
                n, said = runs[-1].n_saved, "; --resume goes on from there."
                saved = f"{n} answer{'s are' if n > 1 else ' is'} saved{said}" if n else "nothing is saved yet."
                with suppress(OSError):  # the terminal was closed
                    click.echo(f"Interrupted; {saved}", err=True)
            raise
        finally:
            self._bar.clear()
            for run in runs:
                run.__exit__()

    def _one(self, run: Any, model: Hybrid, target: Path | None) -> Summary:
        self._say(run.notes)
        if self._resume and not run.notes and not run.n_saved:
            self._say(["There is no interrupted run to go on with; starting afresh."])
        summary: Summary = run.run()
        self._bar.clear()
        if target is not None:
            write_atomically(target, str(summary).rstrip("\n") + "\n")
        elif not self._as_json:
            title = f"# {summary.report.name}\n\n" if self._several else ""
            click.echo(f"{title}{summary}" + "\n" * self._several)
        self._say([line for line in summary.report.lines() if line.strip() not in run.notes])
        return summary

    def _object(self, summaries: Sequence[Summary], combined: bool) -> dict[str, Any]:
        if not self._several:
            return summaries[0].to_dict()
        objects = [summary.to_dict() for summary in summaries]
        return {"documents": objects[:-1] if combined else objects, "combined": objects[-1] if combined else None}

    def _say(self, lines: Sequence[str]) -> None:
        self._bar.clear()
        for line in lines:
            click.echo(line, err=True)


def _targets(files: Sequence[str], output: str | None, combine: bool) -> list[Path | None]:
    """Where each summary goes (None: stdout), the combined one last. Raises before any work where that cannot be."""
    n = len(files) + combine
    if output is None:
        return [None] * n
    out = Path(output)
    if n == 1 and not out.is_dir() and not output.endswith(os.sep):
        targets = [out]
    else:
        if out.exists() and not out.is_dir():
            raise BadRequestError(f"There are several summaries to write, but {out} is not a folder.")
        names = ["stdin" if file == "-" else Path(file).name for file in files] + ["combined"] * combine
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise BadRequestError(f"Two summaries would be called {twice}{SUFFIX}; summarise those files one by one.")
        out.mkdir(parents=True, exist_ok=True)
        targets = [out / f"{name}{SUFFIX}" for name in names]
    for target in targets:
        if any(file != "-" and _same(Path(file), target) for file in files):
            raise BadRequestError(f"{target} is the document itself; choose another -o.")
        if not os.access(target.parent or Path(), os.W_OK):
            raise BadRequestError(f"{target} cannot be written: {target.parent} is missing or not writable.")
    return list(targets)


def _same(a: Path, b: Path) -> bool:
    try:
        return a.samefile(b)
    except OSError:
        return False


def _checked(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise BadRequestError("--focus and --language must be valid UTF-8 text.") from e
