"""Talking with a real engine: what is stopped, retried or rewritten leaves the conversation and the caches agreeing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid import Hybrid
from hybrid.apps.chat.conversation import Conversation
from hybrid.apps.chat.states import StateFolder
from hybrid.apps.chat.store import Store
from hybrid.apps.chat.talk import Asking, Talk
from tests.tiny import TEMPLATE, write_tiny

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
THINKLESS = TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'].split('ing')[-1] }}")
"""Rewrites old answers, as templates do that leave out what was thought."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf", n_layers=4)


@pytest.fixture(params=[0, 2, 4])
def model(tiny: Path, request: pytest.FixtureRequest) -> Iterator[Hybrid]:
    with opened(tiny, request.param) as model:
        yield model


def opened(path: Path, k: int) -> Hybrid:
    return Hybrid(path, n_gpu_layers=k, device="cpu", n_ctx=512, n_batch=32, n_threads=1)


def talk_with(model: Hybrid, **how: Any) -> Talk:
    return Talk(model, Conversation("tiny"), Store(None), options=GREEDY, **how)


def whole(asking: Asking) -> str:
    return "".join(piece.text for piece in asking)


def replayed(talk: Talk, path: Path) -> str:
    """What a model that was just loaded answers to the conversation but its last answer."""
    with opened(path, talk.model.placement.n_gpu_layers) as fresh:
        messages = talk.conversation.prompt(talk.conversation.messages[:-1])
        return str(fresh.chat(messages, **GREEDY))


@pytest.mark.parametrize("words", [1, 4])
def test_after_a_stopped_answer_the_next_one_equals_a_replay(model: Hybrid, tiny: Path, words: int) -> None:
    talk = talk_with(model)
    asking = talk.ask("Hello world")
    for n, _ in enumerate(asking, 1):
        if n == words:
            asking.cancel()
    assert talk.last is not None
    assert talk.last.finish_reason == "interrupted"
    assert 0 < len(talk.last.tokens) < 12
    whole(talk.ask("and again"))
    assert talk.last.n_cached_tokens > 0
    assert talk.conversation.messages[-1].content == replayed(talk, tiny)


def test_after_a_prompt_stopped_half_way_the_next_answer_equals_a_replay(model: Hybrid, tiny: Path) -> None:
    talk = talk_with(model)
    asking = talk.ask("the ring of the world " * 12)
    model._progress = lambda part, done: asking.cancel()
    assert whole(asking) == ""
    model._progress = None
    assert [m.role for m in talk.conversation.messages] == ["user"]
    assert 0 < model.n_used < 200
    whole(talk.ask("and again"))
    assert talk.last is not None
    assert talk.last.n_cached_tokens > 0
    assert talk.conversation.messages[-1].content == replayed(talk, tiny)


def test_a_retry_reads_nothing_again_and_an_undone_turn_leaves_nothing_behind(model: Hybrid, tiny: Path) -> None:
    talk = talk_with(model)
    whole(talk.ask("Hello world"))
    first = talk.conversation.messages[-1].content
    whole(talk.retry())
    assert talk.last is not None
    assert talk.last.n_prompt_tokens - talk.last.n_cached_tokens == 1
    assert talk.conversation.messages[-1].content == first
    whole(talk.ask("something else"))
    talk.undo()
    whole(talk.ask("an inning"))
    assert talk.conversation.messages[-1].content == replayed(talk, tiny)


def test_a_template_that_rewrites_answers_costs_what_it_changed(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "thinkless.gguf", n_layers=4, template=THINKLESS)
    with opened(path, 2) as model:
        talk = talk_with(model)
        whole(talk.ask("a long beginning of the world " * 4))
        before = model.chat_tokens(talk.conversation.prompt(talk.conversation.messages[:1]))
        talk.conversation.messages[1] = talk.conversation.messages[1].__class__("assistant", "so going home")
        whole(talk.ask("more"))
        assert talk.last is not None
        assert talk.last.n_cached_tokens >= len(before) - 1
        assert talk.conversation.messages[-1].content == replayed(talk, path)


@pytest.mark.parametrize("k", [0, 2])
def test_a_conversation_reopened_with_its_state_is_not_read_again(k: int, tiny: Path, tmp_path: Path) -> None:
    store, states = Store(tmp_path / "c.sqlite3"), StateFolder(tmp_path / "states", 1 << 30)
    with opened(tiny, k) as model:
        talk = Talk(model, Conversation("tiny"), store, options=GREEDY, states=states)
        whole(talk.ask("the ring of the world " * 5))
        assert talk.leave() == ""
        id = talk.conversation.id
    assert id is not None
    with opened(tiny, k) as model:
        talk = Talk(model, store.load(id), store, options=GREEDY, states=states)
        assert "was restored" in talk.restore()
        whole(talk.ask("and"))
        assert talk.last is not None
        assert talk.last.n_cached_tokens > 100
        assert talk.conversation.messages[-1].content == replayed(talk, tiny)
    with opened(tiny, 4) as model:
        talk = Talk(model, store.load(id), store, options=GREEDY, states=states)
        assert f"n_gpu_layers {k}, now 4" in talk.restore()
    store.close()
