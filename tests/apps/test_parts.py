"""Claims about the small parts: prompts, lengths, bad answers, checkpoints."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from hybrid import Hybrid
from hybrid.apps.summarize.checkpoint import Checkpoint
from hybrid.apps.summarize.prompts import TEMPLATES, form_of, read_prompts, sentences
from hybrid.apps.summarize.quality import cleaned, problem, whole_part, without_loop
from hybrid.apps.summarize.sizes import sizes_of, words_of
from hybrid.apps.summarize.tokens import Tokenizer
from hybrid.apps.summarize.work import Answer, Job
from hybrid.errors import BadRequestError
from hybrid.runtime.template import encode_chat

PROSE = (
    "The committee met in Oslo on Tuesday. It heard three reports about the harbour, agreed to repair the northern "
    "pier first, and asked Ms Berg for a budget by June. Two members voted against the plan because of its cost. "
)


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_a_filled_form_is_the_prompt_that_chat_would_send(model: Hybrid) -> None:
    tokenizer = Tokenizer(model.engine.vocabulary)
    values = sentences("in about 9 words", "money", "Latin")
    form = form_of(model, tokenizer, TEMPLATES["refine"], values)
    assert form.fields == ("summary", "text")
    got = form.fill({"text": tokenizer("the world\n"), "summary": tokenizer("a <|end|> of it")})
    text = TEMPLATES["refine"].replace("{text}", "the world\n").replace("{summary}", "a <|end|> of it")
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    whole = encode_chat(model.chat_template, model.engine.vocabulary, [{"role": "user", "content": text}])
    spell = model.engine.vocabulary.piece
    assert b"".join(spell(t, special=True) for t in got) == b"".join(spell(t, special=True) for t in whole)
    assert got.count(4) == whole.count(4) == 1  # <|end|> once, the template's: the one in the summary is text
    assert form.overhead + len(tokenizer("the world\n")) + len(tokenizer("a <|end|> of it")) == len(got)
    assert got[: form.n_prefix] == form.parts[0]


def test_fields_in_a_focus_are_not_filled_again(model: Hybrid) -> None:
    form = form_of(model, Tokenizer(model.engine.vocabulary), TEMPLATES["map"], sentences("short", "{text} {x}", None))
    assert form.fields == ("text",)


def test_prompts_of_a_folder_replace_those_they_name(tmp_path: Path) -> None:
    (tmp_path / "map.txt").write_text("Now {text} {in braces}\n")
    found = read_prompts(tmp_path)
    assert found["map"] == "Now {text} {in braces}"
    assert found["reduce"] == TEMPLATES["reduce"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("map", "no field"),
        ("map", "{text} {text}"),
        ("refine", "{text}"),
        ("single", "{text}{summary}"),
        ("map", "{text} {legnth}"),
    ],
)
def test_a_prompt_without_the_text_or_with_unknown_fields_is_refused(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.txt").write_text(text)
    with pytest.raises(BadRequestError, match=f"{name}.txt"):
        read_prompts(tmp_path)


def test_a_folder_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match=r"map\.txt"):
        read_prompts(tmp_path)


# -- lengths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("One is here. Two is th", "One is here."),
        ('He said "No." And th', 'He said "No."'),
        ("It rose by 3.5 per cent in all of the ye", "It rose by 3.5 per cent in all of the"),
        ("Yes. A long sentence that takes most of it, and mo", "Yes. A long sentence that takes most of it, and"),
        ("1. Read it well\n2. Wri", "1. Read it well"),
        ("Points of it all:\n\n1. Read\n2. Write it dow", "Points of it all:\n\n1. Read"),
        ("第一句话。第二句", "第一句话。"),
        ("没有句号的一段文字", "没有句号的一段文字"),
        ("All is well.", "All is well."),
        ("", ""),
    ],
)  # fmt: skip
def test_what_was_cut_off_ends_with_a_whole_sentence_or_word(text: str, whole: str) -> None:
    assert whole_part(text) == whole


@pytest.mark.parametrize(("length", "words"), [("short", 60), ("80 words", 80), ("1 word", 1), (" 7 ", 7), (300, 300)])
def test_lengths(length: str | int, words: int) -> None:
    assert words_of(length) == words


@pytest.mark.parametrize("length", ["tiny", "0 words", "-3", "8 pages", ""])
def test_lengths_that_make_no_sense_are_refused(length: str) -> None:
    with pytest.raises(BadRequestError, match="--length"):
        words_of(length)


def test_two_part_summaries_always_fit_beside_their_merger() -> None:
    for free in (100, 300, 1000, 10_000):
        sizes = sizes_of(400, PROSE, 50, free)
        assert 3 * sizes.part_room <= free
        assert sizes.part_words * 1.2 <= max(sizes.part_room, 12)


# -- bad answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", [PROSE, PROSE * 2, "Yes.", "# Results\n\n- one\n- two\n- three", "会议在奥斯陆举行。" * 2]
)
def test_good_answers_pass(text: str) -> None:
    assert problem(text) is None


@pytest.mark.parametrize("text", ["", "  \n", "...", "---\n***"])
def test_answers_without_a_word_are_empty(text: str) -> None:
    assert problem(text) == "empty"


@pytest.mark.parametrize(
    "text",
    [
        PROSE + " and then" * 40,
        PROSE * 4,
        "会议在奥斯陆举行，" * 30,
        "a" * 200,
        "".join(f"{i}. The pier. " * 9 for i in (1, 2)),
    ],
)
def test_answers_that_go_round_in_circles_are_looping(text: str) -> None:
    assert problem(text) == "looping"


def test_a_loop_is_cut_to_one_round() -> None:
    assert without_loop(PROSE + "It rained. " * 30) == PROSE + "It rained."
    assert without_loop(PROSE) == PROSE


def test_thoughts_are_no_part_of_an_answer() -> None:
    assert cleaned("<think>\nHm.\n</think>\n\nThe pier.\n") == "The pier."
    assert cleaned("<think>never ends") == ""
    assert cleaned("The \ufffdpier\ufffd") == "The pier"


# -- checkpoints -------------------------------------------------------------------------------------------------------

PARTS = {"document": "d", "model": "m", "options": "o", "prompts": "p", "version": "1"}


def job(i: int) -> Job:
    return Job(f"map/{i}", "map", (1, 2, i), 1, 2, 2, 9)


def answer(i: int) -> Answer:
    return Answer(f"map/{i}", f"text {i} \u2028é", 2, 3, 1, 4, "stop", prefill_s=0.5)


def write(folder: Path, n: int) -> Path:
    with Checkpoint(folder, "a.txt", PARTS, resume=False) as checkpoint:
        for i in range(n):
            checkpoint.add(job(i), answer(i))
        return checkpoint.path


def test_answers_come_back_as_they_were(tmp_path: Path) -> None:
    write(tmp_path, 3)
    with Checkpoint(tmp_path, "a.txt", PARTS, resume=True) as checkpoint:
        assert [checkpoint.get(job(i)) for i in range(4)] == [answer(0), answer(1), answer(2), None]
        assert checkpoint.get(Job("map/1", "map", (1, 2, 99), 1, 2, 2, 9)) is None  # same place, another prompt
        assert checkpoint.notes == []


def test_a_checkpoint_cut_off_at_any_byte_gives_the_answers_before_it(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for cut in range(0, len(whole), 7):
        path.write_bytes(whole[:cut])
        with Checkpoint(tmp_path, "a.txt", PARTS, resume=True) as checkpoint:
            sound = max(0, sum(end <= cut for end in ends) - 1)
            assert len(checkpoint) == sound
            checkpoint.add(job(sound), answer(sound))
        with Checkpoint(tmp_path, "a.txt", PARTS, resume=True) as checkpoint:
            assert [checkpoint.get(job(i)) for i in range(sound + 1)] == [answer(i) for i in range(sound + 1)]


NESTED = b"[" * 20_000


@pytest.mark.parametrize("damage", [b"7", b"%08x %s\n" % (zlib.crc32(NESTED), NESTED)])
def test_a_damaged_line_and_what_follows_it_are_ignored(damage: bytes, tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b"text 1", b"text 7") if damage == b"7" else damage
    path.write_bytes(b"".join(lines))
    with Checkpoint(tmp_path, "a.txt", PARTS, resume=True) as checkpoint:
        assert len(checkpoint) == 1


@pytest.mark.parametrize(
    ("part", "words"),
    [("document", "the document"), ("model", "the model"), ("options", "the options"), ("version", "the program")],
)
def test_a_change_starts_afresh_and_says_what_changed(part: str, words: str, tmp_path: Path) -> None:
    write(tmp_path, 3)
    with Checkpoint(tmp_path, "a.txt", {**PARTS, part: "new"}, resume=True) as checkpoint:
        assert len(checkpoint) == 0
        assert f"{words} changed" in checkpoint.notes[0]
    with Checkpoint(tmp_path, "a.txt", PARTS, resume=True) as checkpoint:
        assert len(checkpoint) == 3  # going back to the old options finds the old answers


def test_without_resume_it_begins_empty_and_says_so(tmp_path: Path) -> None:
    write(tmp_path, 3)
    with Checkpoint(tmp_path, "a.txt", PARTS, resume=False) as checkpoint:
        assert len(checkpoint) == 0
        assert "--resume" in checkpoint.notes[0]


def test_who_forgot_to_resume_loses_nothing_until_a_run_is_finished(tmp_path: Path) -> None:
    write(tmp_path, 3)
    for n in (0, 2):  # started afresh twice, and interrupted sooner than the first time
        with Checkpoint(tmp_path, "a.txt", PARTS, resume=False) as checkpoint:
            for i in range(n):
                checkpoint.add(job(i), answer(i + 10))
    with Checkpoint(tmp_path, "a.txt", PARTS, resume=True) as checkpoint:
        assert [checkpoint.get(job(i)) for i in range(4)] == [answer(0), answer(1), answer(2), None]
        checkpoint.add(job(3), answer(3))
    with Checkpoint(tmp_path, "a.txt", PARTS, resume=True) as checkpoint:
        assert len(checkpoint) == 4
        checkpoint.finish()
    assert list(tmp_path.iterdir()) == []


def test_two_processes_do_not_share_a_checkpoint(tmp_path: Path) -> None:
    with (
        Checkpoint(tmp_path, "a.txt", PARTS, resume=True),
        pytest.raises(BadRequestError, match="another process"),
    ):
        Checkpoint(tmp_path, "a.txt", PARTS, resume=True)


def test_finishing_removes_what_was_saved_of_that_document_only(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with (
        Checkpoint(tmp_path, "b.txt", PARTS, resume=True) as other,
        Checkpoint(tmp_path, "a.txt", PARTS, resume=True) as it,
    ):
        it.finish()
        assert list(tmp_path.iterdir()) == [other.path]
