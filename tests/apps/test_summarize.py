"""Claims about `summarize`: the Python function, on a tiny random model and once on a real one."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest

import hybrid
from hybrid import Hybrid, HybridError, Summary, summarize
from hybrid.apps.summarize import work
from hybrid.apps.summarize.api import SummaryOptions, SummaryRun, together
from hybrid.apps.summarize.checkpoint import Checkpoint
from hybrid.apps.summarize.document import Document, read_document
from hybrid.apps.summarize.prompts import Form
from hybrid.apps.summarize.work import Answering, Job, Sampling
from hybrid.errors import BadRequestError
from hybrid.model.catalog import resolve_model
from tests.tiny import write_tiny

TEXT = "\n\n".join(f"In {1900 + i} the town built house number {i} of the old street." for i in range(40))


def document(text: str = TEXT) -> Document:
    return Document.of_text(text, "town.txt")


@pytest.mark.parametrize("strategy", ["map-reduce", "refine"])
def test_every_token_is_read_and_counted(strategy: str, model: Hybrid, tmp_path: Path) -> None:
    summary = summarize(document(), model, strategy=strategy, length="20 words", checkpoint=tmp_path)
    assert isinstance(summary, Summary)
    report = summary.to_dict()
    assert report["document"]["share_read"] == 1.0
    assert report["document"]["tokens"] == len(model.tokenize(TEXT, add_special=False)) - 1  # the space put before it
    phase = report["phases"]["map" if strategy == "map-reduce" else "refine"]
    assert phase["jobs"] == report["chunks"] > 1
    assert phase["prompt_tokens"] > report["document"]["tokens"]
    assert phase["prefill_tok_per_s"] > 0
    assert list(tmp_path.iterdir()) == []  # a finished run leaves nothing behind


def test_the_prefix_is_prefilled_once_and_each_answer_depends_on_its_prompt_alone(tiny: Path) -> None:
    for architecture in ("llama", "gemma3"):
        path = write_tiny(
            tiny.with_name(f"{architecture}-x.gguf"), architecture, n_layers=7, n_embd=64, n_ff=64, n_ctx=2048
        )
        with Hybrid(path, n_gpu_layers=2, device="cpu", n_ctx=700, n_batch=64, n_threads=1) as loaded:
            vocabulary = loaded.engine.vocabulary
            form = Form(
                (tuple(vocabulary.tokenize("Read " * 20)), tuple(vocabulary.tokenize(" Now:", add_special=False))),
                ("text",),
            )
            texts = [vocabulary.tokenize(f"{i} the house of a man " * (4 + 3 * i), add_special=False) for i in range(4)]
            jobs = [
                Job(str(i), "map", form.fill({"text": t}), form.n_prefix, len(t), len(t), 24)
                for i, t in enumerate(texts)
            ]
            runner = Answering(loaded, Sampling())
            together_ = {a.id: (a.text, a.n_read, a.n_cached) for a in runner(jobs)}
            assert [n_cached for _, _, n_cached in together_.values()] == [0] + 3 * [form.n_prefix]
            for job in reversed(jobs):
                loaded.engine.trim(0)  # as after a restart
                (alone,) = Answering(loaded, Sampling())([job])
                assert (alone.text, alone.n_read) == together_[job.id][:2]
                assert alone.n_cached == 0
                assert alone.n_read == job.n_text


def test_a_disk_that_fills_up_costs_only_the_resuming(
    model: Hybrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SummaryOptions(strategy="map-reduce", length="20 words")
    whole = summarize(document(), model, options=options, checkpoint=False)
    append, calls = Checkpoint._append, []

    def fill_up(self: Checkpoint, record: Mapping[str, Any]) -> None:
        calls.append(record)
        if len(calls) > 2:  # what the run depends on, and one answer
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(self, record)

    monkeypatch.setattr(Checkpoint, "_append", fill_up)
    with SummaryRun(document(), model, options, checkpoint=tmp_path) as run:
        summary = run.run()
        assert run.n_saved == 1
    assert summary == whole
    assert [note for note in summary.report.notes if "Only one answer is saved: No space left" in note]
    assert len(calls) == 3


def test_a_resumed_run_gives_the_same_text_and_repeats_nothing(model: Hybrid, tmp_path: Path) -> None:
    options = SummaryOptions(strategy="map-reduce", length="20 words")
    whole = summarize(document(), model, options=options, checkpoint=False)
    with SummaryRun(document(), model, options, checkpoint=tmp_path) as run:
        run.run()
        saved = run._checkpoint.path  # type: ignore[union-attr]
    lines = saved.read_bytes().splitlines(keepends=True)
    for n in (1, 2, len(lines) // 2, len(lines)):
        saved.write_bytes(b"".join(lines[:n]) + b"torn")
        model.engine.trim(0)
        with SummaryRun(document(), model, options, True, tmp_path) as run:
            again = run.run()
        assert again == whole
        assert sum(phase.from_checkpoint for phase in again.report.phases.values()) == n - 1


def test_a_changed_document_or_option_starts_afresh_and_says_so(model: Hybrid, tmp_path: Path) -> None:
    path = tmp_path / "town.txt"

    def notes(text: str, resume: bool, **more: object) -> str:
        path.write_text(text)
        options = SummaryOptions(length="20 words", **more)  # type: ignore[arg-type]
        with SummaryRun(read_document(path), model, options, resume, tmp_path / "saved") as run:
            return " ".join(run.run().report.notes)

    short = TEXT[:400]
    assert notes(short, False) == ""
    assert notes(short, True) == ""
    assert "the document changed" in notes(short + ".", True)
    assert "the options changed" in notes(short, True, focus="x")


def test_several_summaries_are_combined(model: Hybrid) -> None:
    options = SummaryOptions(length="20 words")
    parts = [summarize(Document.of_text(TEXT[:300], name), model, options=options, checkpoint=False) for name in "ab"]
    both = together(parts)
    assert str(parts[1]) in both.text
    with SummaryRun(both, model, options, checkpoint=False, last="combine") as run:
        assert run.run().report.share_read == 1.0


HARD = {
    "one word": "A" * 20_000,
    "one-line JSON": '{"key":[1,2,3],"text":"value"},' * 700,
    "blank lines": "a" + "\n" * 50_000 + "b",
    "CJK without punctuation": "深度学习" * 1500,
    "mixed scripts and emoji": "Καλημέρα мир 🙂👩‍👩‍👧 नमस्ते हिन्दी مرحبا " * 60,
    "control tokens": "<|user|></s><|end|> " * 200,
    "no letters": "\u200b" * 50,
}


@pytest.mark.parametrize("name", HARD)
def test_hard_texts_are_read_whole(name: str, model: Hybrid, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        work, "cleaned", lambda text: f"Summary: {text.strip()}"
    )  # a random model may write blanks only
    done: list[int] = []
    summary = summarize(
        document(HARD[name]), model, length="10 words", checkpoint=False, progress=lambda p: done.append(p.done_tokens)
    )
    assert summary.report.share_read == 1.0
    assert summary.report.n_tokens == done[-1] > 0


def test_a_model_without_a_chat_template_is_used_in_a_plain_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf.GGUFWriter, "add_chat_template", lambda self, template: None)
    path = write_tiny(tmp_path / "plain.gguf", n_layers=2, n_embd=64, n_ff=64, n_ctx=2048)
    with Hybrid(path, n_gpu_layers=0, n_ctx=1024, n_threads=1) as plain:
        assert summarize(document(TEXT[:300]), plain, length="9 words", checkpoint=False).report.share_read == 1.0
        assert any("plain 'User:" in note for note in plain.notes)


def test_a_context_too_small_for_the_instructions_is_one_sentence(tiny: Path) -> None:
    with (
        Hybrid(tiny, n_gpu_layers=0, n_ctx=128, n_threads=1) as small,
        pytest.raises(BadRequestError, match=r"128 .* -c"),
    ):
        summarize(document(), small, checkpoint=False)


@pytest.mark.parametrize(
    ("options", "error"),
    [({"strategy": "best"}, BadRequestError), ({"parallel": 2}, BadRequestError), ({"overlap": -1}, BadRequestError)],
)
def test_senseless_options_are_one_sentence(
    options: dict[str, object], error: type[HybridError], model: Hybrid
) -> None:
    with pytest.raises(error):
        summarize(document(), model, **options)


def test_summarize_is_exported_without_importing_torch() -> None:
    assert hybrid.summarize is summarize
    assert "summarize" in hybrid.__all__


@pytest.mark.real
def test_a_real_model_summarises_a_short_text() -> None:
    try:
        path = resolve_model("smollm2-135m")
    except HybridError as e:
        pytest.skip(str(e))
    text = (
        "The Harbour Board of Eastport met on Tuesday. Engineers said that the northern pier has lost a third of its "
        "timber piles and must be closed by winter. The repair costs four million crowns. The board voted seven to two "
        "to begin in May, and asked the treasurer, Ingrid Dahl, to find the money by selling the old fish hall.\n"
    )
    with Hybrid(path, n_gpu_layers=0, n_ctx=1024) as real:
        summary = summarize(Document.of_text(text), real, length="30 words", checkpoint=False)
    assert summary.report.strategy == "single"
    assert summary.report.share_read == 1.0
    assert "pier" in summary or "Harbour" in summary or "harbour" in summary
    assert summary.report.flagged == []


def test_the_folder_script_summarises_what_it_can_and_leaves_alone_what_is_done(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "papers"
    folder.mkdir()
    (folder / "a.txt").write_text(TEXT[:600])
    (folder / "b.md").write_text("# Title\n\n" + TEXT[:300])
    (folder / "empty.txt").write_text("")
    (folder / "notes.xyz").write_text("not a document")
    script = Path(hybrid.__file__).parents[1] / "scripts" / "summarize_folder.py"

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), str(folder), str(tiny)]
        return subprocess.run(command, env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True)

    done = run()
    assert done.returncode == 1  # one document could not be summarised
    assert "empty.txt" in done.stderr
    assert "Traceback" not in done.stderr
    written = {path.name: path.read_text() for path in folder.glob("*.summary.txt")}
    assert set(written) == {"a.txt.summary.txt", "b.md.summary.txt"}
    assert done.stdout.count("(100%)") == 2
    assert "100%" not in run().stdout
    assert {path.name: path.read_text() for path in folder.glob("*.summary.txt")} == written
