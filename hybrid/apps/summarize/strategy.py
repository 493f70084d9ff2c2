"""single, map-reduce and refine: which prompts are asked, in which order, and what becomes of the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybrid.apps.summarize.checkpoint import Checkpoint
from hybrid.apps.summarize.chunking import Chunk, Piece, chunked, tokenized
from hybrid.apps.summarize.progress import DECODE_COST, Meter
from hybrid.apps.summarize.prompts import Form
from hybrid.apps.summarize.quality import CUT_OFF
from hybrid.apps.summarize.report import Phase, Report
from hybrid.apps.summarize.sizes import Sizes
from hybrid.apps.summarize.tokens import Tokenizer
from hybrid.apps.summarize.work import Answer, Job, Runner
from hybrid.errors import BadRequestError, EngineError

STRATEGIES = ("auto", "single", "map-reduce", "refine")
MIN_TEXT = 48
"""Tokens of text a chunk must have room for, beside the instructions and the answer."""


@dataclass(frozen=True)
class Setting:
    """Everything a strategy works with."""

    n_ctx: int
    forms: Mapping[str, Form]
    """"single", "map", "refine"; "reduce" asks for a whole summary and "merge" for a part's."""
    sizes: Sizes
    overlap: int | None
    """The most tokens that two chunks share; None: a twentieth of a chunk."""
    tokenizer: Tokenizer
    runner: Runner
    checkpoint: Checkpoint | None
    meter: Meter
    report: Report

    def capacity(self, form: str, room: int) -> int:
        """Tokens of text that fit into a prompt of `form` beside an answer of `room` tokens."""
        return self.n_ctx - self.forms[form].overhead - room

    def checked_capacity(self, form: str, room: int, least: int = MIN_TEXT) -> int:
        """`capacity`. Raises BadRequestError where that is too little to work with."""
        capacity = self.capacity(form, room)
        if capacity < least:
            raise BadRequestError(
                f"The context of {self.n_ctx} tokens is too small: the instructions take {self.forms[form].overhead}, "
                f"the answer may take {room}, and at least {least} are needed for text; make it larger with -c"
                " or ask for less with --length."
            )
        return capacity


def choose(strategy: str, setting: Setting, n_tokens: int) -> str:
    """The strategy for a text of `n_tokens`. Raises BadRequestError where `single` does not fit."""
    fits = n_tokens <= setting.capacity("single", setting.sizes.room)
    if strategy == "auto":
        return "single" if fits else "map-reduce"
    if strategy == "single" and not fits:
        need = n_tokens + setting.forms["single"].overhead + setting.sizes.room
        raise BadRequestError(
            f"The text has {n_tokens} tokens and needs a context of {need} to be read at once, but there are "
            f"{setting.n_ctx}; raise it with -c or use --strategy map-reduce."
        )
    return strategy


def run(strategy: str, setting: Setting, pieces: Sequence[Piece]) -> str:
    """The summary of `pieces` by `strategy` (any but "auto"); `setting.report` and the checkpoint are filled."""
    setting.report.strategy = strategy
    return {"single": _single, "map-reduce": _map_reduce, "refine": _refine}[strategy](setting, pieces)


def _single(s: Setting, pieces: Sequence[Piece]) -> str:
    capacity = s.capacity("single", s.sizes.room)
    (chunk,) = chunked(pieces, capacity, 0, s.tokenizer)
    _read_plan(s, [chunk], 0)
    (answer,) = _ask(s, [_job(s, "single", "single", chunk, s.sizes.room, "single")], reads=True)
    return _final(s, answer)


def _map_reduce(s: Setting, pieces: Sequence[Piece]) -> str:
    capacity = s.checked_capacity("map", s.sizes.part_room)
    merge = s.checked_capacity("merge", s.sizes.part_room, 2 * s.sizes.part_room)
    last = s.checked_capacity("reduce", s.sizes.room, max(MIN_TEXT, s.sizes.part_room))
    overlap = capacity // 20 if s.overlap is None else s.overlap
    if overlap > capacity // 2:
        raise BadRequestError(f"An overlap of {overlap} tokens is more than half of a chunk ({capacity} tokens).")
    chunks = chunked(pieces, capacity, overlap, s.tokenizer)
    _read_plan(s, chunks, overlap)
    jobs = [_job(s, "map", f"map/{i + 1}", chunk, s.sizes.part_room, "map") for i, chunk in enumerate(chunks)]
    text = _joined(_ask(s, jobs, reads=True))
    while True:
        parts = tokenized(text, s.tokenizer)
        n = sum(len(piece.tokens) for piece in parts)
        if n <= last:
            (chunk,) = chunked(parts, last, 0, s.tokenizer)
            s.report.levels.append({"prompts": 1, "tokens": n})
            (answer,) = _ask(s, [_job(s, "reduce", "reduce/last", chunk, s.sizes.room, "reduce")])
            return _final(s, answer)
        groups = chunked(parts, merge, 0, s.tokenizer)
        level = len(s.report.levels)
        jobs = [
            _job(s, "reduce", f"reduce/{level}/{i + 1}", group, s.sizes.part_room, "merge")
            for i, group in enumerate(groups)
        ]
        merged = _joined(_ask(s, jobs))
        n_merged = sum(len(piece.tokens) for piece in tokenized(merged, s.tokenizer))
        s.report.levels.append({"prompts": len(jobs), "tokens": n})
        text = merged
        if n_merged >= n:
            s.report.complete = False
            s.report.notes.append(
                f"The summaries do not get shorter any more ({n} tokens became {n_merged}), so they stand side by "
                "side: a larger context (-c), another model or a shorter --length may help."
            )
            return text


def _refine(s: Setting, pieces: Sequence[Piece]) -> str:
    room = s.sizes.room
    kept = room + room // 2 + 16  # a summary in tokens of its own may be longer than the tokens it was made of
    capacity = s.checked_capacity("refine", room + kept)
    chunks = chunked(pieces, min(capacity, s.checked_capacity("single", room)), s.overlap or 0, s.tokenizer)
    _read_plan(s, chunks, s.overlap or 0)
    answer: Answer | None = None
    text = ""
    for i, chunk in enumerate(chunks):
        later = (len(chunks) - i - 1) * (capacity + (1 + DECODE_COST) * room)
        if not text:
            job = _job(s, "refine", f"refine/{i + 1}", chunk, room, "single")
        else:
            summary = s.tokenizer(text)
            if len(summary) > kept:
                raise BadRequestError(
                    f"The summary so far takes {len(summary)} tokens, more than the {kept} there is room for; "
                    "make the context larger with -c or use --strategy map-reduce."
                )
            job = _job(s, "refine", f"refine/{i + 1}", chunk, room, "refine", summary)
        (answer,) = _ask(s, [job], reads=True, later=later)
        text = answer.whole or text
    assert answer is not None
    return _final(s, answer, text)


def _read_plan(s: Setting, chunks: Sequence[Chunk], overlap: int) -> None:
    """Note what is going to be read."""
    report = s.report
    report.n_tokens = sum(chunk.n_new for chunk in chunks)
    report.n_tokens_overlap = sum(chunk.n_overlap for chunk in chunks)
    report.n_chunks, report.overlap = len(chunks), overlap
    report.levels.append({"prompts": len(chunks), "tokens": report.n_tokens + report.n_tokens_overlap})


def _job(s: Setting, phase: str, id: str, chunk: Chunk, room: int, form: str, summary: Sequence[int] = ()) -> Job:
    prompt = s.forms[form].fill({"text": chunk.tokens, "summary": summary})
    return Job(id, phase, prompt, s.forms[form].n_prefix, len(chunk.tokens), chunk.n_new, room)


def _ask(s: Setting, jobs: Sequence[Job], *, reads: bool = False, later: float = 0.0) -> list[Answer]:
    """The answers in the order of `jobs`: those in the checkpoint, and those the model gives now, each saved at once.

    `reads`: the jobs' texts are the document's, and count as read when answered.
    """
    phase = s.report.phases.setdefault(jobs[0].phase, Phase())
    done: dict[str, Answer] = {}
    if jobs[0].phase == "map":  # what merging will take, roughly
        later = len(jobs) * s.sizes.part_room + DECODE_COST * s.sizes.room
    s.meter.begin(jobs, later)

    def take(job: Job, answer: Answer, *, saved: bool) -> None:
        done[job.id] = answer
        phase.add(answer, from_checkpoint=saved)
        if reads:
            s.report.n_tokens_read += answer.n_read - (job.n_text - job.n_new)
        if answer.first_problem:
            s.report.flagged.append(
                {"job": job.id, "problem": answer.first_problem, "retried": True, "mended": answer.problem is None}
            )
        s.meter.done(job, saved=saved, reads=reads)

    left: dict[str, Job] = {}
    for job in jobs:
        answer = s.checkpoint.get(job) if s.checkpoint is not None else None
        if answer is None:
            left[job.id] = job
        else:
            take(job, answer, saved=True)
    if left:
        s.meter.start_clock()
    for answer in s.runner(list(left.values())):
        if s.checkpoint is not None:
            s.checkpoint.add(left[answer.id], answer)
        take(left[answer.id], answer, saved=False)
    if len(done) != len(jobs):
        raise EngineError(f"{len(jobs) - len(done)} of {len(jobs)} answers are missing.")
    return [done[job.id] for job in jobs]


def _joined(answers: Sequence[Answer]) -> str:
    """The summaries, one after the other. Raises EngineError where there is nothing in any of them."""
    texts = [answer.whole for answer in answers if answer.text]
    if not texts:
        raise EngineError("The model answered nothing to any part of the text; try another model or other --prompts.")
    return "\n\n".join(texts)


def _final(s: Setting, answer: Answer, text: str | None = None) -> str:
    s.report.truncated = answer.cut_off
    s.report.n_levels = len(s.report.levels)
    return (answer.whole if text is None else text) + CUT_OFF * answer.cut_off
