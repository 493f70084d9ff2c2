"""Claims about the chat's own logic, on a stand-in model."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from hybrid.apps.chat.conversation import Conversation
from hybrid.errors import BadRequestError
from tests.cli.fake import FakeModel, FakeStream, Lines, chat_with, press_at, said, talk


def test_every_turn_sends_the_whole_conversation_and_stdout_holds_the_answers_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = FakeModel()
    talk(model, "hi", " /not a command", system="Be kind.")
    assert [m["content"] for m in model.seen[1]] == ["Be kind.", "hi", " You said hi", "/not a command"]
    assert capsys.readouterr().out == "You said hi\nYou said /not a command\n"


def test_commands_are_obeyed_and_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    model = FakeModel()
    chat = talk(
        model, "hi", "/system Talk like a fox.", "/system", "/stats", "/help", "/nonsense", "/clear", "", "/exit", "x"
    )
    assert len(model.seen) == 1
    assert said(chat) == []
    assert chat.talk.conversation.system == "Talk like a fox."
    err = capsys.readouterr().err
    for words in ("Talk like a fox.", "1 token, 1 of them reused", "/clear", "no command /nonsense", "2 layers on cpu"):
        assert words in err


def test_the_line_after_an_answer_has_what_it_took_and_quiet_leaves_it_out(capsys: pytest.CaptureFixture[str]) -> None:
    chat = chat_with(FakeModel())
    chat.take("hi")
    assert (
        "3 tokens · read 0, reused 1 · first 0.25 s · context 4/100 · layers 2/4 · VRAM 0 MiB (emulated) · RAM 1 MiB"
        in capsys.readouterr().err
    )
    chat.screen.quiet = True
    chat.take("hi")
    assert capsys.readouterr().err.strip() == ""


def test_ctrl_c_stops_the_answer_and_the_conversation_keeps_what_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    chat = talk(FakeModel(between=press_at(3)), "one two three", "again")
    assert said(chat)[:2] == [("user", "one two three"), ("assistant", " You said")]
    assert said(chat)[2:] == [("user", "again"), ("assistant", " You said again")]
    assert "stopped · 2 tokens" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


def test_a_message_stopped_before_its_answer_is_kept_and_joins_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    model = FakeModel(between=press_at(1))
    chat = talk(model, "hi", "ho")
    assert said(chat) == [("user", "hi"), ("user", "ho"), ("assistant", " You said hi ho")]
    assert model.seen[1] == [{"role": "user", "content": "hi\n\nho"}]
    assert "your message is kept" in capsys.readouterr().err


def test_ctrl_c_twice_in_an_answer_leaves_and_keeps_what_was_said() -> None:
    def press_twice(stream: FakeStream) -> None:
        count[0] += 1
        if count[0] == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    count = [0]
    chat = chat_with(FakeModel(between=press_twice))
    assert chat.run(Lines("one two three", "never read")) == 130
    assert said(chat) == [("user", "one two three"), ("assistant", " You said")]


def test_ctrl_c_at_the_prompt_leaves_when_pressed_again_and_not_otherwise() -> None:
    model = FakeModel()
    chat = chat_with(model)
    assert chat.run(Lines(KeyboardInterrupt(), "hi", KeyboardInterrupt(), KeyboardInterrupt(), "never read")) == 130
    assert len(model.seen) == 1


def test_a_message_that_does_not_fit_is_refused_with_its_size_and_the_conversation_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    chat = talk(FakeModel(n_ctx=20), "hi", "x " * 21, "x " * 19, "ho")
    assert [content for _, content in said(chat)] == ["hi", " You said hi", "ho", " You said ho"]
    err = capsys.readouterr().err
    assert "21 tokens, but the context holds 20" in err
    assert "19 tokens and makes the conversation 23 long" in err


def test_a_context_nearly_full_and_full_is_said_with_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    chat = talk(FakeModel(n_ctx=12), "one two three", "ho")
    assert len(said(chat)) == 4
    err = capsys.readouterr().err
    assert "nearly full (8 of 12" not in err
    assert "The context is full (12 of 12" in err
    assert "/compact" in err


def test_retry_puts_the_new_answer_in_the_place_of_the_old_one_and_undo_takes_both_back() -> None:
    texts = iter(["first", "second", "third"])
    chat = chat_with(FakeModel(says=lambda text: next(texts)))
    chat.take("hi")
    chat.take("/retry")
    assert said(chat) == [("user", "hi"), ("assistant", " second")]
    chat.take("ho")
    chat.take("/undo")
    assert said(chat) == [("user", "hi"), ("assistant", " second")]
    chat.take("/undo")
    chat.take("/undo")
    assert said(chat) == []


def test_a_retry_that_is_stopped_before_its_first_word_leaves_the_old_answer() -> None:
    chat = talk(FakeModel(between=press_at(4)), "hi", "/retry")
    assert said(chat) == [("user", "hi"), ("assistant", " You said hi")]


def test_edit_changes_the_last_message_and_leaves_it_where_the_change_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = chat_with(FakeModel(n_ctx=30))
    chat.take("one")
    chat.take("two")
    for edited, now in (("deux", "deux"), ("x " * 40, "deux"), (None, "deux")):
        monkeypatch.setattr(chat, "edit", lambda text, edited=edited: edited)
        chat.take("/edit")
        assert said(chat)[2:] == [("user", now), ("assistant", f" You said {now}")]
    err = capsys.readouterr().err
    assert "40 tokens" in err
    assert "> deux\n" in err, "what was sent is shown"
    monkeypatch.setattr(chat, "edit", lambda text: "\n".join(map(str, range(20))))
    chat.take("/edit")
    assert "> 0\n  1\n" in (err := capsys.readouterr().err)
    assert "  11 …\n" in err


def test_a_document_is_read_with_the_next_message_and_can_be_taken_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("The boat is red.\n")
    (tmp_path / "long.txt").write_text("word " * 200)
    model = FakeModel()
    chat = chat_with(model)
    chat.take(f"/file {tmp_path / 'notes.txt'}")
    assert "notes.txt was added: 5 tokens" in capsys.readouterr().err
    for written in (f"'{tmp_path}/notes.txt'", f"{tmp_path}/no\\tes.txt"):  # as a terminal inserts a dropped file
        chat.take(f"/file {written}")
        assert "notes.txt was added" in capsys.readouterr().err
        chat.take("/undo")
    for bad, words in (("long.txt", "document has 201 tokens"), ("none.txt", "no file"), ("", "not a file")):
        chat.take(f"/file {tmp_path / bad}")
        assert words in capsys.readouterr().err
    chat.take("/file /dev/zero")
    chat.take("What colour is it?")
    assert model.seen[0] == [{"role": "user", "content": "notes.txt:\n\nThe boat is red.\n\n\nWhat colour is it?"}]
    chat.take("/undo")
    assert [content for _, content in said(chat)] == ["notes.txt:\n\nThe boat is red.\n"]
    chat.take("/undo")
    assert said(chat) == []


def test_compacting_puts_a_summary_in_the_place_of_older_turns_and_keeps_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = FakeModel(n_ctx=100, says=lambda text: "the gist" if "Summarize" in text else "yes " * 10)
    chat = chat_with(model, system="Be kind.")
    for message in ("one", "two", "three"):
        chat.take(message)
    chat.take("/compact")
    assert "the gist" in capsys.readouterr().err
    live = chat.talk.conversation.live
    assert live[0].kind == "summary"
    chat.take("four")
    sent = model.seen[-1]
    assert sent[0] == {"role": "system", "content": "Be kind."}
    assert "the gist" in sent[1]["content"]
    assert "one" not in str(sent)
    assert sent[-1]["content"].endswith("four")
    chat.take(f"/export {tmp_path / 'all.json'}")
    messages = json.loads((tmp_path / "all.json").read_text())["messages"]
    assert [m["content"] for m in messages if m["role"] == "user" and m["kind"] == "text"] == [
        "one", "two", "three", "four"
    ]  # fmt: skip
    assert messages[0]["archived"]
    said(chat)


def test_a_full_context_is_compacted_by_itself_where_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    model = FakeModel(n_ctx=100, says=lambda text: "the gist" if "Summarize" in text else "yes " * 10)
    chat = chat_with(model, on_full="compact")
    for i in range(12):
        chat.take(f"message {i}")
    err = capsys.readouterr().err
    assert "older turns are summarised" in err
    assert err.count("this summary") == err.count("the gist\n\n") > 0, "a blank line before the answer"
    assert "does not fit" not in err
    assert sum(m.role == "assistant" for m in chat.talk.conversation.messages) == 12
    assert chat.talk.last is not None
    assert chat.talk.last.finish_reason == "stop"


def test_a_summary_that_its_limit_cuts_off_ends_with_a_whole_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    gist = "It was about boats of the north. Then it " + "went on " * 99
    chat = talk(FakeModel(says=lambda text: gist if "Summarize" in text else "yes " * 30), "one", "two", "/compact")
    assert chat.talk.conversation.live[0].content.endswith("of the north.)")
    assert "of the north.\n" in capsys.readouterr().err


def test_nothing_is_compacted_where_there_is_nothing_or_ctrl_c_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    chat = chat_with(FakeModel(between=press_at(4)))
    chat.take("/compact")
    assert "nothing to compact" in capsys.readouterr().err
    chat.take("hi")
    before = said(chat)
    chat.take("/compact")
    assert "nothing was compacted" in capsys.readouterr().err
    assert said(chat) == before


def test_a_message_that_cannot_be_saved_is_not_half_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(conversation: Conversation, first: int) -> None:
        raise BadRequestError("The disk is full.")

    chat = chat_with(FakeModel())
    chat.take("hi")
    with monkeypatch.context() as patch:
        patch.setattr(chat.talk.store, "save", full)
        chat.take("ho")
    assert "The disk is full." in capsys.readouterr().err
    chat.take("he")
    assert [content for _, content in said(chat)] == ["hi", " You said hi", "he", " You said he"]


def test_an_answer_that_could_not_be_saved_is_saved_on_leaving(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = chat_with(FakeModel())
    save, broken = chat.talk.store.save, [True]

    def sometimes(conversation: Conversation, first: int) -> None:
        if broken[0] and conversation.messages[-1].role == "assistant":
            raise BadRequestError("The disk is full.")
        save(conversation, first)

    monkeypatch.setattr(chat.talk.store, "save", sometimes)
    chat.take("hi")
    assert "The disk is full." in capsys.readouterr().err
    id = chat.talk.conversation.id
    assert id is not None
    assert len(chat.talk.store.load(id).messages) == 1
    assert "is not saved: The disk is full." in chat.talk.leave()
    broken[0] = False
    assert chat.talk.leave() == ""
    assert chat.talk.store.load(id) == chat.talk.conversation


def test_a_summary_that_is_no_shorter_takes_no_turns_place(capsys: pytest.CaptureFixture[str]) -> None:
    chat = chat_with(FakeModel(says=lambda text: "word " * 30 if "Summarize" in text else "yes"))
    chat.take("hi")
    chat.take("/compact")
    assert "no shorter" in capsys.readouterr().err
    assert said(chat) == [("user", "hi"), ("assistant", " yes")]


def test_settings_change_how_the_next_answer_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    model = FakeModel()
    chat = chat_with(model)
    for line in ("/set temp 0.25", "/set top-k 7", "/set seed 3", "/set n 2", "/set", "hi there you"):
        chat.take(line)
    assert {**model.options[0], "stop": None} == {
        "temperature": 0.25, "top_k": 7, "seed": 3, "max_tokens": 2, "stop": None
    }  # fmt: skip
    capsys.readouterr()
    for bad in ("/set temp hot", "/set temp", "/set colour red", "/set top_p 3", "/set seed 1.5"):
        chat.take(bad)
        assert capsys.readouterr().err.count("\n") == 2  # one sentence and an empty line
    assert chat.talk.options["temperature"] == 0.25


def test_conversations_are_named_listed_and_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    chat = chat_with(FakeModel(), system="Be kind.")
    for line in ("hi", "/save first", "/clear", "ho", "/load nowhere", "/load first", "/list"):
        chat.take(line)
    err = capsys.readouterr().err
    assert "no conversation called 'nowhere'" in err
    assert "*   1" in err
    assert said(chat) == [("user", "hi"), ("assistant", " You said hi")]
    chat.take("/load 2")
    assert said(chat)[0] == ("user", "ho")
    chat.take("/save first")
    assert "called 'first' already" in capsys.readouterr().err


def test_an_export_is_markdown_or_json_and_replaces_nothing_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = chat_with(FakeModel(), system="Be kind.")
    path = tmp_path / "chat.md"
    chat.take(f"/export {path}")
    assert "Nothing was said yet" in capsys.readouterr().err
    assert not path.exists()
    chat.take("hi")
    chat.take(f"/export {path}")
    assert path.read_text().split("\n\n")[2:] == [
        "## System", "Be kind.", "## User", "hi", "## Assistant", "You said hi\n"
    ]  # fmt: skip
    path.write_text("mine")
    for bad in (f"/export {path}", f"/export {tmp_path / 'chat.doc'}", f"/export {tmp_path}/no/chat.md", "/export"):
        chat.take(bad)
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]
    chat.take(f"/export -f {path}")
    assert "You said hi" in path.read_text()


def test_ctrl_c_ends_a_command_and_not_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(model: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("hybrid.apps.chat.facts.split", interrupted)
    chat = talk(FakeModel(), "/split", "hi")
    assert len(said(chat)) == 2


def test_what_a_model_thinks_is_told_from_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    chat = chat_with(FakeModel(says=lambda text: "<think> so it is </think> Yes."))
    chat.take("hi")
    captured = capsys.readouterr()
    assert captured.out == "Yes.\n"
    assert "Thinking" in captured.err
    chat.take("/think")
    assert "so it is" in capsys.readouterr().err
    assert said(chat)[1][1] == " <think> so it is </think> Yes."  # the template sees all of it


def test_a_model_cannot_move_the_cursor_of_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    talk(FakeModel(), "a\x1b[2Jb")
    assert capsys.readouterr().out == "You said a\ufffd[2Jb\n"


def test_completion_knows_commands_settings_and_conversations() -> None:
    chat = chat_with(FakeModel())
    chat.take("hi")
    chat.take("/save holidays")
    complete = lambda line: [text for text, _ in chat.commands.completions(line)]  # noqa: E731
    assert complete("/re") == ["/retry"]
    assert complete("/set top") == ["top_k", "top_p"]
    assert complete("/load h") == ["holidays"]
    assert "smollm2-135m" in complete("/model smol")
