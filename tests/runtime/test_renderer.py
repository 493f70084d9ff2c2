"""Templates are programs out of downloaded files: they reach nothing, and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from hybrid.errors import BadRequestError, EngineError
from hybrid.runtime import renderer as module
from hybrid.runtime.renderer import Renderer, SandboxedTemplate, TemplateError, compiled, renderer
from hybrid.runtime.template import compile_template

TALK = [{"role": "user", "content": "x"}]
GROWING = "{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s | length }}"
SQUARED = "{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n > 0 }}"


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Renderer]:
    """A renderer of the test's own, with little patience."""
    own = Renderer()
    monkeypatch.setattr(module, "_renderer", own)
    monkeypatch.setattr(module, "CPU_S", 0.3)
    yield own
    own.close()


@pytest.mark.parametrize(
    "source",
    [
        "{{ '%2000000000d' % 1 }}",
        "{{ '{:2000000000}'.format(1) }}",
        "{{ 'a'.center(2000000000) }}",
        "{{ 'a'.ljust(2000000000) }}",
        "{{ 'a' | center(2000000000) }}",
        "{{ 'a\n' | indent(2000000000) }}",
        "{{ [1] | batch(400000000, 0) | list }}",
        "{{ messages | tojson(indent=2000000000) }}",
        "{{ strftime_now('%d' * 1000) * 10000000 }}",
        "{% set ns = namespace(s='ab') %}" + GROWING,
        "{% set ns = namespace(n=7) %}" + SQUARED,
        "{{ range(99999) | map('string') | join(',' * 99999) | length }}",
        "{{ lipsum(n=99999999) }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{{ loop(messages) }}{% endfor %}",
    ],
)
def test_a_template_may_not_take_all_memory_or_time(own: Renderer, source: str) -> None:
    with pytest.raises(BadRequestError, match="does not accept these messages: "):
        compile_template(source).render(TALK)
    assert SandboxedTemplate("{{ 1 + 1 }}").render() == "2"


def test_what_is_computed_when_a_template_is_compiled_is_limited_too(own: Renderer) -> None:
    assert "more than 0.3 s" in (compile_template("{{ 10 ** (10 ** 10) }}").note or "")
    assert SandboxedTemplate("{{ 1 + 1 }}").render() == "2"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}{{ messages.__class__.__base__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ joiner.__init__.__globals__.os }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ (1).__class__ }}{{ (1).__class__.__base__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.clear() }}",
        "{{ ().__class__.__bases__[0].__subclasses__()[0].__init__.__globals__.__builtins__.open }}",
        "{{ open('/etc/passwd') }}",
        "{{ __import__('os') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends '/etc/passwd' %}",
    ],
)
def test_a_template_reaches_nothing_but_its_messages(source: str) -> None:
    template = compile_template(source)
    with pytest.raises(BadRequestError, match="does not accept these messages: "):
        template.render(TALK)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ '' | attr('__class__') }}", ""),
        ("{{ '{0.__class__}'.format(1) }}", ""),
        ("{{ lipsum.__globals__ }}{{ raise_exception.__globals__ }}{{ strftime_now.__code__ }}", ""),
        ("{{ messages | map(attribute='__class__') | list }}", "[Undefined]"),
    ],
)
def test_what_looks_like_a_way_out_is_none(source: str, text: str) -> None:
    assert compile_template(source).render(TALK) == text


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_the_process_can_open_nothing(own: Renderer) -> None:
    """Should a template get out of its sandbox after all."""
    assert SandboxedTemplate("{{ x }}").render(x=1) == "1"
    assert own._process is not None
    limits = psutil.Process(own._process.pid).rlimit
    assert limits(psutil.RLIMIT_NOFILE) == (0, 0)
    assert limits(psutil.RLIMIT_FSIZE) == (0, 0)


def test_a_refusal_is_one_printable_line() -> None:
    with pytest.raises(TemplateError) as caught:
        SandboxedTemplate(r"{{ raise_exception('no\n\x1b[2J' ~ 'x' * 9999) }}").render()
    assert str(caught.value).startswith("no ?[2Jxxx")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("text", ["\udc80 and \ud800", "\ufdd0", "🦊\u2028\r\n\0", "x" * 3_000_000])
def test_any_text_passes_unchanged(text: str) -> None:
    assert SandboxedTemplate("{{ x }}").render(x=text) == text


def test_a_template_is_compiled_before_it_is_used() -> None:
    with pytest.raises(TemplateError, match="Unexpected end of template"):
        compiled("{% if true %}")
    with pytest.raises(TemplateError):
        compiled("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")


def test_variables_that_are_no_json_are_refused() -> None:
    with pytest.raises(BadRequestError, match="not JSON serializable"):
        compile_template("{{ tools }}").render(TALK, variables={"tools": object()})


def test_one_process_renders_everything(own: Renderer) -> None:
    first = compiled("{{ x }}")
    assert own._process is not None
    pid = own._process.pid
    assert [first.render(x=i) for i in range(3)] == ["0", "1", "2"]
    assert compiled("{{ 2 * x }}").render(x=2) == "4"
    assert own._process.pid == pid


def test_a_process_that_was_killed_is_replaced(own: Renderer) -> None:
    template = compiled("{{ x }}")
    assert own._process is not None
    os.kill(own._process.pid, signal.SIGKILL)
    own._process.wait()
    assert template.render(x=1) == "1"


def test_an_interrupted_rendering_does_not_answer_the_next_one(own: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    template = compiled("{{ x }}")

    def interrupt(*args: object) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "_readable", interrupt)
        with pytest.raises(KeyboardInterrupt):
            template.render(x="late")
    assert template.render(x="next") == "next"


def test_a_process_that_does_not_answer_is_ended(own: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMMAND", ("sleep", "600"))
    monkeypatch.setattr(module, "WALL_S", 0.01)
    with pytest.raises(TemplateError, match="was not done"):
        compiled("{{ x }}")
    assert own._process is None


def test_a_process_that_cannot_start_is_no_fault_of_the_template(own: Renderer, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(EngineError, match=r"could not run \(exit code 3\)"):
        compile_template("{{ x }}")


def test_a_forked_process_has_a_renderer_of_its_own(own: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: own.pid + 1)
    other = renderer()
    assert other is not own
    other.close()


def test_the_process_ends_with_the_program(tmp_path: Any) -> None:
    code = (
        "import os, signal, sys; from hybrid.runtime.renderer import compiled, renderer\n"
        "compiled('{{ x }}'); print(renderer()._process.pid, flush=True); os.kill(os.getpid(), int(sys.argv[1]))"
    )
    for number in (0, signal.SIGKILL):
        done = subprocess.run([sys.executable, "-c", code, str(int(number))], stdout=subprocess.PIPE, check=False)
        try:
            psutil.Process(int(done.stdout)).wait(10)
        except psutil.NoSuchProcess:
            continue
