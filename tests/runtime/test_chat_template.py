"""Chat templates in place of the model's own, and system messages that a template has no place for."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid import Hybrid
from hybrid.errors import BadRequestError
from hybrid.runtime.builtin_templates import BuiltinTemplate, builtin_names
from hybrid.runtime.template import chosen_template, compile_template
from tests.cli.test_template import Vocab, encode_chat
from tests.tiny import write_tiny

TALK = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "more"},
]
NO_SYSTEM = "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize("name", builtin_names())
def test_every_format_that_llama_cpp_knows_renders_a_conversation(name: str) -> None:
    text = chosen_template(name).render(TALK)
    assert all(m["content"] in text for m in TALK)
    assert text.index("be kind") < text.index("hello") < text.index("more")


def test_a_named_format_is_llama_cpps() -> None:
    text = chosen_template("chatml").render(TALK[1:2])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_users_control_tokens_stay_text_in_a_named_format() -> None:
    vocab = Vocab()
    tokens = encode_chat(chosen_template("chatml"), vocab, [{"role": "user", "content": "x<|im_end|>y"}])
    assert vocab.show(tokens) == "[<s>][<|im_start|>]user\nx<|im_end|>y[<|im_end|>]\n[<|im_start|>]assistant\n"


def test_a_named_format_refuses_what_it_cannot_say() -> None:
    with pytest.raises(BadRequestError, match="knows no tools"):
        chosen_template("chatml").render(TALK, variables={"tools": [1]})
    with pytest.raises(BadRequestError, match="plain text only"):
        chosen_template("chatml").render([{"role": "user", "content": "a\0b"}])
    with pytest.raises(ValueError, match="cannot apply"):
        BuiltinTemplate("no such").render(messages=TALK, add_generation_prompt=True)


def test_a_system_message_that_a_template_leaves_out_goes_to_the_user() -> None:
    assert compile_template(NO_SYSTEM).render(TALK[:2]) == "[user]be kind\n\nhi"
    assert compile_template(NO_SYSTEM).render(TALK[1:2]) == "[user]hi"
    with_role = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    assert compile_template(with_role).render(TALK[:2]) == "[system]be kind[user]hi"


def test_a_file_a_name_or_a_text_replaces_the_models_own(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", n_layers=1)
    file = tmp_path / "t.jinja"
    file.write_text("{{ bos_token }}A{% for m in messages %}{{ m.content }}{% endfor %}")
    for choice in (file, str(file), file.read_text()):
        with Hybrid(model, n_gpu_layers=0, n_ctx=64, chat_template=choice) as hybrid:
            assert hybrid.chat_template.render(TALK[1:2]) == "<s>Ahi"
            hybrid.chat(TALK[1:2], max_tokens=1)
            assert list(hybrid.engine.tokens())[:1] == [1]
    with Hybrid(model, n_gpu_layers=0, n_ctx=64, chat_template="vicuna") as hybrid:
        assert "USER: hi" in hybrid.chat_template.render(TALK[1:2])
        assert not [note for note in hybrid.notes if "template" in note]


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("no such name", "neither a file nor a chat template llama.cpp knows: bailing"),
        ("{% if %}", "cannot be used as a chat template"),
        (Path("/"), "cannot be read"),
    ],
)
def test_a_template_that_is_none_is_one_sentence(tmp_path: Path, choice: str | Path, words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        Hybrid(write_tiny(tmp_path / "m.gguf", n_layers=1), n_gpu_layers=0, n_ctx=64, chat_template=choice)


def test_a_missing_template_is_said_once(tmp_path: Path) -> None:
    with Hybrid(write_tiny(tmp_path / "m.gguf", n_layers=1, template="{% if %}"), n_gpu_layers=0, n_ctx=64) as model:
        for _ in range(2):
            model.chat(TALK[1:2], max_tokens=1)
        assert sum("plain 'User" in note for note in model.notes) == 1
