"""The Jinja environment chat templates are written for (that of Hugging Face transformers), sandboxed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 1_000_000
"""Loop passes and calls one rendering may take; a real template takes a few for every message."""
MAX_REPEATED = 10_000_000
"""Items `text * n` may have."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, in which a template also ends: jinja2 bounds neither nested loops nor repeated text."""

    intercepted_binops = frozenset({"*"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.steps = 0
        self.filters["_counted"] = self._counted

    def count(self) -> None:
        """One step of the template. Raises TemplateError when it has taken too many."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise TemplateError(f"it takes more than {MAX_STEPS} steps")

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.count()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for items, n in ((left, right), (right, left)):
            if isinstance(n, int) and isinstance(items, (str, list, tuple)) and len(items) * n > MAX_REPEATED:
                raise TemplateError(f"it repeats something {n} times")
        return super().call_binop(context, operator, left, right)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for loop in source.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None)
        return super()._generate(source, *args, **kwargs)

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.count()
            yield item


class Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what a model said, for training; here its body is just text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance's set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ChatEnvironment:
    """A fresh environment: a template comes out of a downloaded file and must reach nothing but its messages."""
    env = ChatEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes <, > and & for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
