"""`summarize`: a document in, a summary and a report out."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hybrid import __version__
from hybrid.apps.summarize import strategy as strategies
from hybrid.apps.summarize.checkpoint import Checkpoint, checkpoint_folder
from hybrid.apps.summarize.chunking import tokenized
from hybrid.apps.summarize.document import Document, read_document
from hybrid.apps.summarize.progress import Meter, Progress
from hybrid.apps.summarize.prompts import form_of, read_prompts, sentences
from hybrid.apps.summarize.report import Report
from hybrid.apps.summarize.sizes import phrase, sizes_of, words_of
from hybrid.apps.summarize.tokens import Tokenizer
from hybrid.apps.summarize.work import Answering, Sampling
from hybrid.errors import BadRequestError, EngineError
from hybrid.runtime.curve import BatchCurve
from hybrid.schedule.scheduler import DEFAULT_N_CTX

if TYPE_CHECKING:
    from hybrid import Hybrid

Strategy = Literal["auto", "single", "map-reduce", "refine"]
HEAD_BYTES = 1 << 20
MOST_PARALLEL = 8
"""Chunks at a time that `auto` takes at most: beyond, batches gain little."""
N_DRAFT = 7
"""Tokens drafted at a time, at most: with the one before them a batch of eight."""


class Summary(str):
    """The text of a summary; `report` tells what it took and whether everything was read."""

    report: Report

    def __new__(cls, text: str, report: Report) -> Summary:
        self = super().__new__(cls, text)
        self.report = report
        return self

    def to_dict(self) -> dict[str, Any]:
        """Text and report as JSON-ready values."""
        return {"text": str(self), **self.report.to_dict()}


@dataclass(frozen=True, kw_only=True)
class SummaryOptions:
    """What a person can choose; `summarize` takes the same names. Raises BadRequestError for senseless values."""

    strategy: Strategy = "auto"
    length: str | int = "medium"
    """"short", "medium", "long", "80 words" or 80."""
    focus: str | None = None
    language: str | None = None
    prompts: str | Path | None = None
    """A folder with templates that replace the built-in ones."""
    overlap: int | None = None
    """Tokens that neighbouring chunks may share; None: a twentieth of a chunk (none with refine)."""
    temperature: float = 0.0
    repeat_penalty: float = 1.0
    seed: int = 0
    parallel: int | str = "auto"
    """Chunks at a time, in as many sequences of the model; "auto": all it was loaded with. Answers given at the same
    time may differ in the last bits from those given one at a time."""
    speculate: int = N_DRAFT
    """Tokens drafted at a time from what a text repeats, at most (and at most what the model was loaded for)."""

    def __post_init__(self) -> None:
        if self.strategy not in strategies.STRATEGIES:
            raise BadRequestError(f"strategy must be one of {', '.join(strategies.STRATEGIES)}, not {self.strategy!r}.")
        if self.parallel != "auto" and (not isinstance(self.parallel, int) or self.parallel < 1):
            raise BadRequestError(f"parallel must be a number of 1 or more, or 'auto', not {self.parallel!r}.")
        if not isinstance(self.speculate, int) or self.speculate < 0:
            raise BadRequestError(f"speculate must be a number of 0 or more, not {self.speculate!r}.")
        if self.overlap is not None and self.overlap < 0:
            raise BadRequestError(f"overlap must be 0 or more tokens, not {self.overlap}.")
        words_of(self.length)


def summarize(
    source: str | Path | Document,
    model: Hybrid | str | Path | None = None,
    *,
    resume: bool = False,
    checkpoint: str | Path | bool = True,
    encoding: str | None = None,
    progress: Callable[[Progress], None] | None = None,
    options: SummaryOptions | None = None,
    **more: Any,
) -> Summary:
    """Summarise a file ("-" is stdin) or a Document with a loaded model, or one that is loaded for it.

    `more` are fields of SummaryOptions: length="short", focus="costs", … Every finished answer is saved at once in
    `checkpoint`, a folder (True: the user's state directory, False: nowhere); with `resume` an interrupted run of the
    same document, model and options goes on where it was. Greedy runs (the default) give the same text either way.
    The saved answers are removed when the summary is returned. Raises HybridError.
    """
    document = source if isinstance(source, Document) else read_document(source, encoding=encoding)
    chosen = replace(options or SummaryOptions(), **more)
    with (
        _loaded(model, chosen, document) as loaded,
        SummaryRun(document, loaded, chosen, resume, checkpoint, progress) as run,
    ):
        summary = run.run()
        run.finish()
        return summary


def together(summaries: Sequence[Summary]) -> Document:
    """The summaries of several documents as one, for `SummaryRun(…, last="combine")`."""
    text = "\n\n".join(f"# {summary.report.name}\n\n{summary}" for summary in summaries)
    return Document.of_text(text, "All documents together")


def most_useful(documents: Sequence[Document], strategy: Strategy, n_ctx: int | None = None) -> int:
    """About as many sequences as the longest of the documents will have chunks to be answered at once, but not more
    than MOST_PARALLEL. What a token is, a model must say; here it is three bytes."""
    if strategy in ("single", "refine"):
        return 1
    longest = max((len(document.text.encode()) for document in documents), default=0) // 3
    return max(1, min(MOST_PARALLEL, -(-longest // (n_ctx or DEFAULT_N_CTX))))


class SummaryRun:
    """One document on its way to its summary. As a context manager it holds the checkpoint; `finish` removes that."""

    def __init__(
        self,
        document: Document,
        model: Hybrid,
        options: SummaryOptions,
        resume: bool = False,
        checkpoint: str | Path | bool = True,
        progress: Callable[[Progress], None] | None = None,
        *,
        last: str = "",
    ) -> None:
        """`last` "combine": the text is summaries of several documents, and the last prompt is the one for that."""
        self._document, self._model, self._options = document, model, options
        self._parallel = _parallel(options, model)
        self._n_draft = min(options.speculate, model.placement.n_draft)
        self._curve = model.batch_curve() if self._n_draft or self._parallel > 1 else None
        self._progress = progress or (lambda p: None)
        self._templates = read_prompts(options.prompts)
        if last:
            self._templates["single"] = self._templates["reduce"] = self._templates[last]
        self._checkpoint: Checkpoint | None = None
        self._trouble = ""
        if checkpoint is not False:
            folder = checkpoint_folder() if checkpoint is True else Path(checkpoint)
            parts = {
                "document": [document.sha256, hashlib.sha256(document.text.encode()).hexdigest()],
                "model": _identity(model),
                "options": [_plain(options), last, {**model.placement.to_dict(), "n_sequences": None}],
                "prompts": self._templates,
                "version": __version__,
            }
            kept = {"curve": self._curve and self._curve.to_dict()}
            try:
                self._checkpoint = Checkpoint(
                    folder, document.name, parts, resume=resume, key=_key(document), kept=kept
                )
                kept = self._checkpoint.kept
            except OSError as e:
                self._trouble = f"No answer is saved on the way, and none can be resumed: {e.strerror} ({folder})."
            if (curve := kept["curve"]) is not None:  # drafts as before, wherever that was measured
                self._curve = BatchCurve.from_dict(curve)

    def run(self) -> Summary:
        """Read everything, return the summary. Raises EngineError should a token of the document not have been read."""
        start = time.perf_counter()
        document, model, options = self._document, self._model, self._options
        report = Report(
            name=document.name,
            format=document.format,
            encoding=document.encoding,
            sha256=document.sha256,
            model=str(model.model_path),
            options=_plain(options),
            placement=model.placement.to_dict(),
            notes=self.notes,
        )
        tokenizer = Tokenizer(model.engine.vocabulary)
        pieces = tokenized(document.text, tokenizer)
        n_tokens = sum(len(piece.tokens) for piece in pieces)
        setting = self._setting(tokenizer, n_tokens, report)
        chosen = strategies.choose(options.strategy, setting, n_tokens)
        if tokenizer.n_unspelled:
            report.notes.append(f"{tokenizer.n_unspelled} places hold characters that the model's tokens cannot spell.")
        text = strategies.run(chosen, setting, pieces)
        if self._checkpoint is not None and self._checkpoint.trouble:
            report.notes.append(self._checkpoint.trouble)
        report.n_levels = len(report.levels)
        report.wall_s = time.perf_counter() - start
        if report.n_tokens_read != report.n_tokens:
            raise EngineError(f"Only {report.n_tokens_read} of the document's {report.n_tokens} tokens were read.")
        return Summary(text, report)

    def finish(self) -> None:
        """The summary is where it belongs: the saved answers are not needed any more."""
        if self._checkpoint is not None:
            self._checkpoint.finish()

    @property
    def notes(self) -> list[str]:
        """What a person should know before it begins (they are in the report, too)."""
        trouble = [self._trouble] if self._trouble else []
        return [*self._document.notes, *trouble, *(self._checkpoint.notes if self._checkpoint is not None else ())]

    @property
    def n_saved(self) -> int:
        """Answers in the checkpoint."""
        return len(self._checkpoint) if self._checkpoint is not None else 0

    def __enter__(self) -> SummaryRun:
        return self

    def __exit__(self, *_: object) -> None:
        if self._checkpoint is not None:
            self._checkpoint.close()

    def _setting(self, tokenizer: Tokenizer, n_tokens: int, report: Report) -> strategies.Setting:
        model, options = self._model, self._options

        def form(name: str, words: int) -> Any:
            values = sentences(phrase(words), options.focus, options.language)
            return form_of(model, tokenizer, self._templates[name], values)

        words = words_of(options.length)
        whole = {name: form(name, words) for name in ("single", "reduce", "refine")}
        instructions = max(f.overhead for f in whole.values()) + 4  # the number of words may take more tokens
        sizes = sizes_of(words, self._document.text, n_tokens, model.n_ctx - instructions)
        meter = Meter(self._document.name, n_tokens, self._progress)
        sampling = Sampling(options.temperature, options.seed, options.repeat_penalty)
        return strategies.Setting(
            n_ctx=model.n_ctx,
            forms={**whole, "map": form("map", sizes.part_words), "merge": form("reduce", sizes.part_words)},
            sizes=sizes,
            overlap=options.overlap,
            tokenizer=tokenizer,
            runner=Answering(model, sampling, self._parallel, self._curve, self._n_draft, meter.tick),
            checkpoint=self._checkpoint,
            meter=meter,
            report=report,
        )


def _parallel(options: SummaryOptions, model: Hybrid) -> int:
    """Chunks at a time. Raises BadRequestError where the model was loaded for fewer."""
    most = min(model.placement.n_sequences, model.placement.n_batch)
    if isinstance(options.parallel, int) and options.parallel > most:
        raise BadRequestError(
            f"The model was loaded for {most} sequences at a time, not {options.parallel}; load it with n_sequences."
        )
    return options.parallel if isinstance(options.parallel, int) else most


@contextmanager
def _loaded(model: Hybrid | str | Path | None, options: SummaryOptions, document: Document) -> Iterator[Hybrid]:
    from hybrid import Hybrid

    if isinstance(model, Hybrid):
        yield model
        return
    most = most_useful([document], options.strategy)
    with Hybrid(model, n_sequences=options.parallel, most_sequences=most, n_draft=options.speculate) as loaded:
        yield loaded


def _plain(options: SummaryOptions) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items()}


def _key(document: Document) -> str:
    """What stays the same when a document changes: a file's path. Other texts are known by what they say."""
    path = os.path.abspath(document.name)
    return path if os.path.exists(path) else f"{document.name} {document.sha256}"


def _identity(model: Hybrid) -> Mapping[str, Any]:
    """What tells a model file from another, without reading all of it."""
    shards = [shard.path for shard in model.engine.file.shards]
    with open(shards[0], "rb") as f:
        head = hashlib.sha256(f.read(HEAD_BYTES)).hexdigest()
    return {"head": head, "shards": [(path.stat().st_size, path.stat().st_mtime_ns) for path in shards]}
