"""A grammar's rules, and whether one of them begins with itself or leads nowhere.

llama.cpp reads from left to right with a stack. A rule that begins with itself and goes on after that makes the stack
grow for ever; llama.cpp looks for such rules, but overlooks those behind a rule that may be empty only through others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from hybrid.errors import BadRequestError

MAX_DEPTH = 2000
"""Rules that begin with rules, which llama.cpp follows by recursion."""
MAX_PATHS = 10_000
"""Ways from a rule down its beginnings. llama.cpp's search takes every one of them."""


@dataclass(frozen=True)
class Symbol:
    """One item of a sequence: a reference to the rule `name`, or, with "", something matched as it stands."""

    name: str = ""
    n_elements: int = 1
    """What it takes in llama.cpp's rules; 0: it matches nothing."""
    n_rules: int = 1
    """Rules inside it, by llama.cpp's count: what repeating it repeats."""

    @property
    def is_empty(self) -> bool:
        """Whether it is no symbol at all, like `""`."""
        return not self.name and self.n_elements == 0


Rules = dict[str, list[list[Symbol]]]
"""Name -> alternatives, each a sequence."""


def check_recursion(rules: Rules) -> None:
    """Raise BadRequestError where a rule begins with itself, or where llama.cpp's own search for that would not end."""
    empty = _may_be_empty(rules)
    edges = {name: _beginnings(alternatives, empty) for name, alternatives in rules.items()}
    depth: dict[str, int] = {}
    paths: dict[str, int] = {}
    for component in _components(edges):
        inside = set(component)
        for name in component:
            if any(goes_on and target in inside for target, goes_on in edges[name]):
                raise BadRequestError(
                    f"The grammar's rule `{name.partition('_')[0]}` begins with itself (left recursion), which "
                    "llama.cpp cannot follow; let it end with itself instead."
                )
        below = [target for name in component for target, _ in edges[name] if target not in inside]
        for name in component:
            depth[name] = len(component) + max((depth[target] for target in below), default=0)
            paths[name] = len(component) + sum(paths[target] for target in below)
            if depth[name] > MAX_DEPTH or paths[name] > MAX_PATHS:
                raise BadRequestError(
                    f"The grammar's rule `{name.partition('_')[0]}` begins with too many other rules for llama.cpp."
                )
    for name in sorted(rules.keys() - empty - _may_begin(rules, empty)):
        raise BadRequestError(
            f"The grammar's rule `{name.partition('_')[0]}` leads to nothing but itself: no text can follow it."
        )


def _may_be_empty(rules: Rules) -> set[str]:
    """The rules that may match nothing."""
    return _grown(rules, lambda sequence, empty: all(s.is_empty or s.name in empty for s in sequence))


def _may_begin(rules: Rules, empty: set[str]) -> set[str]:
    """The rules that may begin with something to match. llama.cpp ends the process at one that neither does nor may be
    empty, such as `a ::= b a`, `b ::= ""`: it has nowhere to go on."""

    def begins(sequence: list[Symbol], known: set[str]) -> bool:
        first = next((s for s in sequence if not s.is_empty and (s.name not in empty or s.name in known)), None)
        return first is not None and (not first.name or first.name in known)

    return _grown(rules, begins)


def _grown(rules: Rules, holds: Callable[[list[Symbol], set[str]], bool]) -> set[str]:
    """The fewest rules such that `holds` of an alternative, given them, only for those of them."""
    users: dict[str, set[str]] = defaultdict(set)
    for name, alternatives in rules.items():
        for symbol in (symbol for sequence in alternatives for symbol in sequence):
            users[symbol.name].add(name)
    found: set[str] = set()
    todo = list(rules)
    while todo:
        name = todo.pop()
        if name not in found and any(holds(sequence, found) for sequence in rules[name]):
            found.add(name)
            todo += users[name]
    return found


def _beginnings(alternatives: list[list[Symbol]], empty: set[str]) -> list[tuple[str, bool]]:
    """The rules that a rule may begin with, and whether its sequence goes on after each."""
    found = []
    for sequence in alternatives:
        for i, symbol in enumerate(sequence):
            if symbol.name:
                found.append((symbol.name, i + 1 < len(sequence)))
            if not symbol.is_empty and symbol.name not in empty:
                break
    return found


def _components(edges: dict[str, list[tuple[str, bool]]]) -> list[list[str]]:
    """Rules that can reach one another, the reached before those that reach them (Tarjan's algorithm)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    waiting: list[str] = []
    unfinished: set[str] = set()
    found: list[list[str]] = []
    for start in edges:
        work = [] if start in number else [(start, iter(edges[start]))]
        while work:
            name, targets = work[-1]
            if name not in number:
                number[name] = low[name] = len(number)
                waiting.append(name)
                unfinished.add(name)
            for target, _ in targets:
                if target not in number:
                    work.append((target, iter(edges[target])))
                    break
                if target in unfinished:
                    low[name] = min(low[name], number[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[name])
                if low[name] == number[name]:
                    at = waiting.index(name)
                    found.append(waiting[at:])
                    unfinished.difference_update(waiting[at:])
                    del waiting[at:]
    return found
