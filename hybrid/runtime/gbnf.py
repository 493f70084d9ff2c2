"""Reading a GBNF grammar before llama.cpp does.

llama.cpp answers a mistake with a line on stderr, some grammars with a crash of the process (deep nesting), some with
memory that never stops growing (`x{5,3}`, left recursion behind an optional rule). Here all of them are one sentence.
The syntax is that of `llama_grammar_parser` in llama.cpp's llama-grammar.cpp.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

from hybrid.errors import BadRequestError
from hybrid.runtime.gbnf_rules import Rules, Symbol, check_recursion

MAX_BYTES = 1 << 20
MAX_REPEATS = 2000
"""llama.cpp's MAX_REPETITION_THRESHOLD; it takes some larger counts for "any number"."""
MAX_DEPTH = 2000
"""Groups inside groups, which llama.cpp follows by recursion."""
MAX_ELEMENTS = 1_000_000
"""What repetitions may expand to."""

_SPACE, _LINES = re.compile(r"(?:[ \t]|#[^\r\n]*)*"), re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[a-zA-Z0-9-]+")
_ESCAPE = r'\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[trn\\"\[\]-])'
_STRING = re.compile(rf'"((?:{_ESCAPE}|[^\\"])*)"')
_CLASS = re.compile(rf"\[\^?((?:{_ESCAPE}|[^\\\]])*)\]")
_REPEAT = re.compile(r"\{_([0-9]+)_(,_([0-9]*)_)?\}".replace("_", _SPACE.pattern))


@dataclass
class _Group:
    """A rule's right side, or what stands between two parentheses."""

    name: str
    alternatives: list[list[Symbol]] = field(default_factory=lambda: [[]])
    n_rules_before: int = 0


def check_grammar(text: str) -> None:
    """Raise BadRequestError, with the line, unless `text` is a grammar that llama.cpp can take and has a rule `root`.

    One that names tokens (`<think>`, `!<[12]>`) is refused: where a token's text goes on beyond the characters before
    such a name, llama.cpp lets it pass, finds that it does not fit, and ends the process.
    """
    if not isinstance(text, str):
        raise BadRequestError(f"A grammar is GBNF text, not {type(text).__name__}.")
    _check(text)


@lru_cache(maxsize=8)  # before a request begins, and where the grammar of each of its sequences is made
def _check(text: str) -> None:
    if len(text.encode("utf-8", "replace")) > MAX_BYTES:
        raise BadRequestError(f"The grammar is longer than {MAX_BYTES >> 10} KiB.")
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise BadRequestError("The grammar contains characters that are no text.")
    reader = _Reader(text)
    while reader.at < len(text):
        reader.rule()
    if "root" not in reader.rules:
        raise BadRequestError("The grammar has no rule `root`, where it would begin.")
    for name, line in reader.references.items():
        if name not in reader.rules:
            raise BadRequestError(f"The grammar uses the rule `{name}` (line {line}) but does not define it.")
    check_recursion(reader.rules)


class _Reader:
    """One pass over the text, with a stack of open parentheses instead of recursion."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.rules: Rules = {}
        self.references: dict[str, int] = {}
        """Rules that are used, and the line where each is first."""
        self._n_elements = self._n_rules = 0
        self._skip(lines=True)

    def rule(self) -> None:
        """Read `name ::= alternatives` and the line's end."""
        name = self._match(_NAME)
        if name is None:
            raise self._error("a rule's name is expected")
        self._skip(lines=False)
        if not self.text.startswith("::=", self.at):
            raise self._error(f"`::=` is expected after `{name[0]}`")
        self.at += 3
        self._skip(lines=True)
        self._n_rules += 1
        self.rules[name[0]] = self._alternatives(name[0])
        if self.at < len(self.text) and self.text[self.at] not in "\r\n":
            raise self._error("this does not belong in a rule")
        self._skip(lines=True)

    def _alternatives(self, name: str) -> list[list[Symbol]]:
        stack = [_Group(name)]
        while self.at < len(self.text):
            c = self.text[self.at]
            sequence = stack[-1].alternatives[-1]
            if c == "|":
                self.at += 1
                stack[-1].alternatives.append([])
            elif c == "(":
                self.at += 1
                stack.append(_Group(self._made_up(name), n_rules_before=self._n_rules))
                if len(stack) > MAX_DEPTH:
                    raise self._error(f"more than {MAX_DEPTH} parentheses are open")
            elif c == ")" and len(stack) > 1:
                self.at += 1
                group = stack.pop()
                self.rules[group.name] = group.alternatives
                n_rules = 1 + self._n_rules - group.n_rules_before
                stack[-1].alternatives[-1].append(Symbol(group.name, n_rules=n_rules))
            elif c in "*+?{":
                self._repeat(name, c, sequence)
            elif not self._symbol(c, sequence):
                break
            self._skip(lines=c in "|(" or len(stack) > 1)
        if len(stack) > 1:
            raise self._error("`)` is expected")
        return stack[0].alternatives

    def _symbol(self, c: str, sequence: list[Symbol]) -> bool:
        """Read one symbol into `sequence`; False where none begins."""
        if c == '"':
            string = self._match(_STRING)
            if string is None:
                raise self._error("this text has no closing quote, or an escape that is none")
            sequence.append(Symbol("", len(string[1])))
        elif c == "[":
            characters = self._match(_CLASS)
            if characters is None:
                raise self._error("this character class has no closing bracket, or an escape that is none")
            sequence.append(Symbol("", len(characters[1])))
        elif c in "<!":
            raise self._error("a token's name ends the process in llama.cpp; write its text in quotes instead")
        elif c == ".":
            self.at += 1
            sequence.append(Symbol())
        elif (name := self._match(_NAME)) is not None:
            self.references.setdefault(name[0], self._line())
            sequence.append(Symbol(name[0]))
        else:
            return False
        self._count(sequence[-1].n_elements)
        return True

    def _repeat(self, name: str, c: str, sequence: list[Symbol]) -> None:
        """Apply `*`, `+`, `?` or `{m,n}` to the last symbol of `sequence`, by rules as llama.cpp makes them."""
        if not sequence or sequence[-1].is_empty:
            raise self._error(f"there is nothing before `{c}` that could be repeated")
        least, most = self._times(c)
        symbol = sequence.pop()
        total = most or least or 1
        if max(least, most or 0) > MAX_REPEATS or symbol.n_rules * total > MAX_REPEATS:
            raise self._error(f"llama.cpp repeats nothing more than {MAX_REPEATS} times")
        n_optional = 1 if most is None else most - least
        self._count(least * symbol.n_elements + n_optional * (symbol.n_elements + 3))
        parts = [symbol] * min(least, 1)
        if n_optional:
            optional = self._made_up(name)
            # S' ::= S S' | for any number; for up to n, n rules that go on in one another, which "" stands for
            rest = Symbol(optional) if most is None else Symbol("", 0)
            self.rules[optional] = [[symbol, rest] if n_optional > 1 or most is None else [symbol], []]
            self._n_rules += n_optional - 1
            parts.append(Symbol(optional))
        whole = self._made_up(name, counts=False)
        self.rules[whole] = [parts]
        n_elements = least * symbol.n_elements + (n_optional > 0)
        sequence.append(Symbol(whole, n_elements, n_rules=symbol.n_rules * total))

    def _times(self, c: str) -> tuple[int, int | None]:
        """Read a repetition: at least and at most (None: any number)."""
        if c != "{":
            self.at += 1
            return (1 if c == "+" else 0), (1 if c == "?" else None)
        counts = self._match(_REPEAT)
        if counts is None:
            raise self._error("a repetition is written {n}, {n,} or {n,m}")
        least = _number(counts[1])
        most = least if counts[2] is None else _number(counts[3]) if counts[3] else None
        if most is not None and most < least:
            raise self._error(f"the repetition {{{least},{most}}} ends before it begins")
        return least, most

    def _made_up(self, name: str, *, counts: bool = True) -> str:
        """A name for a rule of our own; no name in a grammar has an underscore."""
        self._n_rules += counts
        return f"{name}_{len(self.rules)}_{self._n_rules}_{self.at}{'' if counts else '_'}"

    def _count(self, n: int) -> None:
        self._n_elements += n
        if self._n_elements > MAX_ELEMENTS:
            raise self._error("its repetitions make the grammar too large")

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
        return found

    def _skip(self, *, lines: bool) -> None:
        self._match(_LINES if lines else _SPACE)

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def _error(self, what: str) -> BadRequestError:
        rest = self.text[self.at : self.at + 24].split("\n")[0].strip()
        where = f" at `{rest}`" if rest else ""
        return BadRequestError(f"Line {self._line()} of the grammar is not valid{where}: {what}.")


def _number(digits: str) -> int:
    return int(digits) if len(digits) < 10 else 10**9
