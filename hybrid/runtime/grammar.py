"""Grammars: what a generation may say, by llama.cpp's grammar sampler and llama-cpp-python's JSON-schema converter."""

from __future__ import annotations

import ctypes
import importlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from hybrid.errors import BadRequestError, EngineError
from hybrid.runtime.gbnf import check_grammar
from hybrid.tail.llama import LogMark
from hybrid.tail.llama import lib as llama_cpp
from hybrid.tail.vocab import Vocabulary

_ANY_CHARACTER, _JSON_CHARACTER = r'char ::= [^"\\]', r'char ::= [^"\\\x7F\x00-\x1F]'
"""JSON strings hold no control characters: llama.cpp's own converter knows, the one in Python does not."""
MAX_SIZE = 1000
"""The longest string or list a schema may ask for: the converter writes each item out, as groups inside groups."""
MAX_PATTERN = 1 << 24
"""Characters that a repetition in a pattern may be written out to."""
_PATTERN_PART = re.compile(r"\\.|\[(?:\\.|[^\\\]])*(?:\]|\\?\Z)|\{(?P<times>[^}]*)(?:\}|\Z)|[\]}]", re.DOTALL)
"""What takes its characters as they are (an escape, a class); a repetition; a bracket without its partner."""
_SIZES = ("minItems", "maxItems", "minLength", "maxLength")


class Grammar:
    """A GBNF grammar at work: which token may come next, after those accepted. One for one generation.

    llama.cpp ends the process when a token is accepted that the grammar does not allow: ask `allows` first.
    Raises BadRequestError for a grammar that is not sound.
    """

    def __init__(self, text: str, vocabulary: Vocabulary) -> None:
        check_grammar(text)
        lib = self._lib = llama_cpp()
        self._vocabulary = vocabulary
        log = LogMark()
        self._sampler: Any = lib.llama_sampler_init_grammar(vocabulary.handle, text.encode(), b"root")
        if not self._sampler:
            raise BadRequestError(str(log.error("take the grammar")))
        self._one = (lib.llama_token_data * 1)()
        self._one_array = lib.llama_token_data_array(self._one, 1, -1, False)
        # To llama.cpp a control token is the text that spells it; in our output it is nothing.
        self._unseen = _unseen(vocabulary)
        self._unseen_ids = np.array(sorted(self._unseen), np.int32)

    def allows(self, token: int) -> bool:
        """Whether `token` may come next; an end-of-generation token may where the grammar is complete."""
        if token in self._unseen:
            return False
        self._one[0] = (token, 1.0, 0.0)
        self._lib.llama_sampler_apply(self._sampler, ctypes.byref(self._one_array))
        return bool(self._one[0].logit != -np.inf)

    def mask(self, array: Any, ids: npt.NDArray[np.int32], logits: npt.NDArray[np.float32]) -> None:
        """Set the logit of every token that may not come next to -inf.

        `array` is a llama_token_data_array; `ids` and `logits` [n] show what is in it.
        """
        if len(self._unseen_ids):
            logits[np.isin(ids, self._unseen_ids)] = -np.inf
        self._lib.llama_sampler_apply(self._sampler, array)

    def accept(self, token: int) -> None:
        """`token`, which the grammar allows, was chosen."""
        self._lib.llama_sampler_accept(self._sampler, token)

    @property
    def complete(self) -> bool:
        """Whether the text may end here. True also where the vocabulary has no token that says so."""
        ends = self._vocabulary.eog_tokens
        return not ends or self.allows(min(ends))

    def close(self) -> None:
        """Free it; calling it again does nothing."""
        if self._sampler:
            self._lib.llama_sampler_free(self._sampler)
            self._sampler = None


def grammar_text(grammar: Any) -> str:
    """GBNF out of what may be given as a grammar: text, or llama-cpp-python's `LlamaGrammar`."""
    text = getattr(grammar, "_grammar", grammar)
    if not isinstance(text, str):
        raise BadRequestError(f"A grammar is GBNF text or a LlamaGrammar, not {type(grammar).__name__}.")
    return text


def schema_grammar(schema: str | Mapping[str, Any]) -> str:
    """The grammar of the JSON texts that a JSON schema (its text, or parsed) describes.

    Raises BadRequestError where llama-cpp-python's converter cannot express it; nothing weaker is used instead.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as e:
            raise BadRequestError(f"The JSON schema is not valid JSON ({e}).") from e
    if not isinstance(schema, Mapping):
        raise BadRequestError(f"A JSON schema is an object, not {type(schema).__name__}.")
    try:
        _check_sizes(schema)
        text = str(_converter().json_schema_to_gbnf(json.dumps(schema)))
    except BadRequestError:
        raise
    except Exception as e:  # the converter asserts, and stumbles over what it does not expect in any way
        why = f"{e}".strip() or type(e).__name__
        if isinstance(e, (KeyError, AttributeError, TypeError)):
            why = f"{type(e).__name__}: {why}"
        raise BadRequestError(f"This JSON schema cannot be made into a grammar ({why:.200}).") from e
    text = text.replace(_ANY_CHARACTER, _JSON_CHARACTER)
    try:
        check_grammar(text)
    except BadRequestError as e:
        raise BadRequestError(f"This JSON schema cannot be made into a grammar ({str(e).rstrip('.')}).") from e
    return text


def any_json() -> str:
    """The grammar of any JSON text."""
    return str(_converter().JSON_GBNF)


@cache
def _converter() -> Any:
    """llama-cpp-python's `llama_grammar`, without the rest of that package, which would take llama.cpp's log."""
    llama_cpp()
    return importlib.import_module("llama_cpp.llama_grammar")


def _check_sizes(schema: Any) -> None:
    """Refuse what would fill the memory before llama.cpp could refuse it."""
    todo = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, Mapping):
            for key in _SIZES:
                size = part.get(key)
                if isinstance(size, (int, float)) and size > MAX_SIZE:
                    raise BadRequestError(f"The JSON schema has a {key} of {size}; at most {MAX_SIZE} is possible.")
            pattern = part.get("pattern")
            if isinstance(pattern, str):
                _check_pattern(pattern)
            todo += part.values()
        elif isinstance(part, (list, tuple)):
            todo += part


def _check_pattern(pattern: str) -> None:
    """The same of a regular expression, whose repetitions the converter writes out too. It never comes back from a
    bracket or brace that closes nothing."""
    for part in _PATTERN_PART.finditer(pattern):
        if part[0] in ("]", "}"):
            raise BadRequestError(
                f"The JSON schema has a pattern with a `{part[0]}` that closes nothing: {pattern:.30}."
            )
        for times in (part["times"] or "").split(","):
            with suppress(ValueError):  # no number: the converter will say so
                if int(times) > MAX_SIZE or int(times) * len(pattern) > MAX_PATTERN:
                    raise BadRequestError(f"The JSON schema has a pattern that repeats more than {MAX_SIZE} times.")


def _unseen(vocabulary: Vocabulary) -> frozenset[int]:
    return frozenset(vocabulary.control_tokens.values()) - vocabulary.eog_tokens


def stuck() -> EngineError:
    """What to raise where a grammar is not complete and yet allows no token."""
    return EngineError("The grammar asks for text that this model's vocabulary cannot spell.")
