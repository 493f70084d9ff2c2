"""The options of a generation: their names, and the object they are made into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from hybrid.errors import BadRequestError
from hybrid.runtime.arguments import stop_strings, token_biases
from hybrid.runtime.grammar import grammar_text, schema_grammar
from hybrid.runtime.reply import Options
from hybrid.runtime.sampling import SamplingParams


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments of `Hybrid.generate` and `Hybrid.chat` beside `stream`."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    repeat_last_n: int | None
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: str | Sequence[str] | None
    logit_bias: Mapping[Any, float] | None
    ignore_eos: bool
    grammar: Any
    json_schema: str | Mapping[str, Any] | None


def options_of(
    *,
    max_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    ignore_eos: bool = False,
    logit_bias: Mapping[Any, float] | None = None,
    grammar: str | None = None,
    json_schema: str | Mapping[str, Any] | None = None,
    repeat_last_n: int | None = None,
    **sampling: Any,
) -> Options:
    """The options of `generate` as one object. Raises BadRequestError for senseless values."""
    if grammar is not None and json_schema is not None:
        raise BadRequestError("Give a grammar or a JSON schema, not both.")
    if repeat_last_n is not None:
        sampling["repeat_last_n"] = repeat_last_n
    return Options(
        sampling=SamplingParams(logit_bias=token_biases(logit_bias), **sampling),
        max_tokens=max_tokens,
        stop=stop_strings(stop),
        ignore_eos=ignore_eos,
        grammar=schema_grammar(json_schema) if json_schema is not None else grammar_text(grammar or ""),
    )
