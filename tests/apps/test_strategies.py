"""Claims about the strategies, with a stand-in for the model: what is asked, and what is made of the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid.apps.summarize.checkpoint import Checkpoint
from hybrid.apps.summarize.chunking import tokenized
from hybrid.apps.summarize.progress import Meter, Progress
from hybrid.apps.summarize.prompts import Form
from hybrid.apps.summarize.report import Report
from hybrid.apps.summarize.sizes import Sizes
from hybrid.apps.summarize.strategy import Setting, choose, run
from hybrid.apps.summarize.work import Answer, Job
from hybrid.errors import BadRequestError, EngineError

SENTENCE = "Someone did something somewhere on a certain day of that year. "


class Letters:
    """A tokenizer with a token a letter."""

    n_unspelled = 0

    def __call__(self, text: str) -> list[int]:
        return list(map(ord, text))


class Fake:
    """Answers every job with `reply(job)`, the last job first, and remembers what it was asked."""

    def __init__(self, reply: Callable[[Job], str], *, forgets: int = 0) -> None:
        self.reply, self.forgets = reply, forgets
        self.asked: list[Job] = []

    def __call__(self, jobs: Sequence[Job]) -> Iterator[Answer]:
        for job in reversed(jobs):
            self.asked.append(job)
            n = len(job.prompt)
            yield Answer(job.id, self.reply(job), job.n_text - self.forgets, n, job.n_prefix, 5, "stop")


def setting(
    runner: Fake, n_ctx: int = 500, checkpoint: Checkpoint | None = None, seen: list[Progress] | None = None
) -> Setting:
    form = Form(((1, 2, 3), (4, 5)), ("text",))
    refine = Form(((1, 2), (3,), (4, 5)), ("summary", "text"))
    return Setting(
        n_ctx=n_ctx,
        forms={"single": form, "map": form, "reduce": form, "merge": form, "refine": refine},
        sizes=Sizes(20, 60, 10, 40),
        overlap=None,
        tokenizer=Letters(),  # type: ignore[arg-type]
        runner=runner,
        checkpoint=checkpoint,
        meter=Meter("a.txt", 0, (seen if seen is not None else []).append),
        report=Report(),
    )


def text_of(job: Job, form_parts: tuple[int, int] = (3, 2)) -> str:
    return "".join(map(chr, job.prompt[form_parts[0] : -form_parts[1]]))


def test_map_reduce_reads_all_of_the_text_in_as_many_levels_as_needed() -> None:
    fake = Fake(lambda job: f"Summary of {job.id}.")
    s = replace(setting(fake), overlap=60)
    text = SENTENCE * 200
    out = run("map-reduce", s, tokenized(text, s.tokenizer))
    assert out == "Summary of reduce/last."
    first = sorted((job for job in fake.asked if job.phase == "map"), key=lambda job: int(job.id[4:]))
    assert "".join(text_of(job)[job.n_text - job.n_new :] for job in first) == text
    assert s.report.n_tokens == s.report.n_tokens_read == len(text)
    assert s.report.n_tokens_overlap == sum(job.n_text - job.n_new for job in first) > 0
    assert s.report.n_levels == 3
    assert all(len(job.prompt) + job.max_tokens <= s.n_ctx for job in fake.asked)
    merged = sorted((job for job in fake.asked if job.id.startswith("reduce/1/")), key=lambda job: int(job.id[9:]))
    assert "\n\n".join(f"Summary of {job.id}." for job in first) == "".join(map(text_of, merged))


def test_what_the_token_limit_cut_off_ends_with_a_whole_sentence_and_is_marked_at_the_end_alone() -> None:
    class Cut(Fake):
        def __call__(self, jobs: Sequence[Job]) -> Iterator[Answer]:
            return (replace(answer, finish="length") for answer in super().__call__(jobs))

    for strategy in ("single", "map-reduce", "refine"):
        fake = Cut(lambda job: f"This is about {job.id} alone. It then goes on to sa")
        s = setting(fake, n_ctx=2000 if strategy == "single" else 500)
        out = run(strategy, s, tokenized(SENTENCE * 20, s.tokenizer))
        assert out == f"This is about {fake.asked[-1].id} alone. […]"
        assert s.report.truncated
        assert any("[…]" in line for line in s.report.lines())
        assert not any(words in text_of(job) for job in fake.asked for words in ("[…]", "goes on"))


def test_answers_may_come_in_any_order_and_are_merged_in_the_texts_order() -> None:
    fake = Fake(lambda job: job.id)
    s = setting(fake)
    run("map-reduce", s, tokenized(SENTENCE * 12, s.tokenizer))
    assert text_of(fake.asked[-1]).split("\n\n") == [f"map/{i + 1}" for i in range(s.report.n_chunks)]


def test_refine_gives_each_chunk_the_summary_so_far() -> None:
    fake = Fake(lambda job: f"S{job.id[7:]}")
    s = setting(fake)
    text = SENTENCE * 30
    assert run("refine", s, tokenized(text, s.tokenizer)) == f"S{s.report.n_chunks}"
    assert s.report.n_tokens_read == len(text)
    for i, job in enumerate(fake.asked[1:], 1):
        assert "".join(map(chr, job.prompt[2:4])) == f"S{i}"[:2]
        assert len(job.prompt) + job.max_tokens <= s.n_ctx


def test_summaries_that_do_not_shrink_stop_with_a_message_and_all_of_them() -> None:
    fake = Fake(lambda job: text_of(job)[:400] if job.phase == "map" else text_of(job))
    s = setting(fake)
    out = run("map-reduce", s, tokenized(SENTENCE * 40, s.tokenizer))
    assert not s.report.complete
    assert "do not get shorter" in s.report.notes[0]
    assert len(out) > 1000
    assert s.report.n_tokens_read == s.report.n_tokens


def test_auto_is_single_where_the_text_fits_and_single_refuses_where_not() -> None:
    s = setting(Fake(lambda job: "x"))
    fits = s.capacity("single", s.sizes.room)
    assert choose("auto", s, fits) == "single"
    assert choose("auto", s, fits + 1) == "map-reduce"
    with pytest.raises(BadRequestError, match="-c"):
        choose("single", s, fits + 1)


@pytest.mark.parametrize("strategy", ["map-reduce", "refine"])
def test_a_context_too_small_for_the_instructions_is_an_error_with_the_numbers(strategy: str) -> None:
    s = setting(Fake(lambda job: "x"), n_ctx=90)
    with pytest.raises(BadRequestError, match=r"context of 90 .* -c"):
        run(strategy, s, tokenized(SENTENCE * 5, s.tokenizer))


def test_tokens_the_model_did_not_evaluate_do_not_count_as_read() -> None:
    s = setting(Fake(lambda job: "x", forgets=3))
    run("map-reduce", s, tokenized(SENTENCE * 20, s.tokenizer))
    assert s.report.n_tokens_read == s.report.n_tokens - 3 * s.report.n_chunks


def test_flags_are_reported_and_empty_parts_left_out() -> None:
    class Odd(Fake):
        def __call__(self, jobs: Sequence[Job]) -> Iterator[Answer]:
            for answer in super().__call__(jobs):
                if answer.id == "map/2":
                    answer = replace(answer, text="", problem="empty", first_problem="empty")
                yield answer

    fake = Odd(lambda job: job.id)
    s = setting(fake)
    run("map-reduce", s, tokenized(SENTENCE * 20, s.tokenizer))
    assert s.report.flagged == [{"job": "map/2", "problem": "empty", "retried": True, "mended": False}]
    assert "map/2" not in text_of(fake.asked[-1])
    assert any("second try" in line for line in s.report.lines())


def test_nothing_but_empty_answers_is_an_error() -> None:
    s = setting(Fake(lambda job: ""))
    with pytest.raises(EngineError, match="answered nothing"):
        run("map-reduce", s, tokenized(SENTENCE * 20, s.tokenizer))


@pytest.mark.parametrize("strategy", ["map-reduce", "refine"])
def test_a_run_that_dies_after_any_answer_goes_on_without_asking_anything_twice(strategy: str, tmp_path: Path) -> None:
    text = SENTENCE * 40
    whole = Fake(lambda job: f"Summary of {job.id}.")
    s = setting(whole)
    expected = run(strategy, s, tokenized(text, s.tokenizer))
    asked: list[str] = []

    class DiesError(Exception):
        pass

    def reply(job: Job) -> str:
        if len(asked) % 3 == 2 and asked[-1] != "died":
            asked.append("died")
            raise DiesError
        asked.append(job.id)
        return f"Summary of {job.id}."

    for _ in range(100):
        with Checkpoint(
            tmp_path, "a.txt", dict.fromkeys(("document", "model", "options", "prompts"), ""), resume=True
        ) as c:
            s = setting(Fake(reply), checkpoint=c)
            try:
                got = run(strategy, s, tokenized(text, s.tokenizer))
                break
            except DiesError:
                continue
    assert got == expected
    done = [id for id in asked if id != "died"]
    assert sorted(done) == sorted(job.id for job in whole.asked)
    assert s.report.n_tokens_read == len(text)
    assert sum(phase.from_checkpoint for phase in s.report.phases.values()) > 0


def test_progress_ends_with_every_token_and_time_left_falls_to_nothing() -> None:
    seen: list[Progress] = []
    fake = Fake(lambda job: job.id)
    s = setting(fake, seen=seen)
    run("map-reduce", s, tokenized(SENTENCE * 20, s.tokenizer))
    assert seen[-1].done_tokens == s.report.n_tokens
    assert seen[-1].left_s == 0
    assert [p.done_tokens for p in seen] == sorted(p.done_tokens for p in seen)
