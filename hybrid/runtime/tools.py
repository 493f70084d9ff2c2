"""What a chat request asks of the answer's form: a JSON schema, or a call of a certain tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid.errors import BadRequestError, UnsupportedError
from hybrid.runtime.grammar import any_json, schema_grammar


@dataclass(frozen=True)
class Form:
    """The form of an answer."""

    grammar: str | None = None
    """GBNF; None: any text."""
    tool: str | None = None
    """The tool whose arguments the answer is."""


def wanted_form(
    response_format: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
) -> Form:
    """What these arguments of a chat completion ask for.

    As in llama-cpp-python a tool is certain to be called only where `tool_choice` names it (or is "required" and there
    is one tool); otherwise the model may write a call in its own format, which comes back as text.
    """
    named = _named_tool(tools, tool_choice)
    if named is not None:
        function = named["function"]
        return Form(schema_grammar(function.get("parameters") or {"type": "object"}), function["name"])
    if response_format is None:
        return Form()
    if not isinstance(response_format, Mapping):
        raise BadRequestError(
            f'response_format is an object such as {{"type": "json_object"}}, not {response_format!r:.40}.'
        )
    kind = response_format.get("type")
    if kind == "text":
        return Form()
    if kind == "json_object":
        schema = response_format.get("schema")
        return Form(any_json() if schema is None else schema_grammar(schema))
    if kind == "json_schema":  # OpenAI's newer spelling
        inner = response_format.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if not isinstance(schema, (str, Mapping)):
            raise BadRequestError('response_format of type json_schema needs {"json_schema": {"schema": …}}.')
        return Form(schema_grammar(schema))
    raise BadRequestError(f"response_format must be of type text, json_object or json_schema, not {kind!r:.40}.")


def as_tools(
    functions: Sequence[Mapping[str, Any]] | None,
    function_call: str | Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
) -> tuple[Sequence[Mapping[str, Any]] | None, str | Mapping[str, Any] | None]:
    """`tools` and `tool_choice`, out of the older `functions` and `function_call` where those are given."""
    if functions is not None:
        tools = [{"type": "function", "function": function} for function in functions]
    if isinstance(function_call, Mapping):
        tool_choice = {"type": "function", "function": {"name": function_call.get("name")}}
    elif function_call is not None:
        tool_choice = function_call
    return tools, tool_choice


def _named_tool(
    tools: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    by_name: dict[str, Mapping[str, Any]] = {}
    for tool in tools or ():
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRequestError('A tool is {"type": "function", "function": {"name": …, "parameters": {…}}}.')
        by_name[function["name"]] = tool
    if choice is None or choice in ("none", "auto"):
        return None
    if choice == "required":
        if len(by_name) != 1:
            raise UnsupportedError('tool_choice "required" works with one tool; name the one to call instead.')
        return next(iter(by_name.values()))
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if not isinstance(function, Mapping):
        raise BadRequestError(f"tool_choice must be none, auto, required or a function's name, not {choice!r:.40}.")
    if function.get("name") not in by_name:
        raise BadRequestError(f"tool_choice names {function.get('name')!r:.40}, which is not one of the tools.")
    return by_name[str(function["name"])]
