"""How long a text an xgrammar grammar may force.

What a grammar forces is found by native code that nothing can interrupt, a byte after the other. What it finds is never longer
than the shortest way to an end, so a grammar is safe if every sequence in it has a short one. The lengths are a least fixpoint: a
rule is as short as its shortest alternative, a sequence as long as its parts together (Knuth, "A generalization of Dijkstra's
algorithm", 1977). References that double from rule to rule, and rules that never end, are found by this and by no look at the text
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import msgspec

MAX_FORCED = 32_768  # bytes
ENDLESS = 1 << 62


class Kind(IntEnum):
    """Expressions of xgrammar's serialised grammars that have a length; each other kind may be empty."""

    BYTES = 0
    CLASS = 1
    RULE = 4
    SEQUENCE = 5
    CHOICES = 6
    REPEAT = 8
    REGEX = 12


class Grammar(msgspec.Struct):
    """The part of a serialised grammar that tells lengths. Rules are [name, expression, ...], expressions [kind, size, data]."""

    rules: list[tuple[object, ...]]
    grammar_expr_data: list[int]
    grammar_expr_indptr: list[int]

    def expression(self, index: int) -> tuple[int, list[int]]:
        """(kind, data)."""
        begin = self.grammar_expr_indptr[index]
        return self.grammar_expr_data[begin], self.grammar_expr_data[begin + 2 : begin + 2 + self.grammar_expr_data[begin + 1]]


class _Lengths:
    """The shortest text of each rule, ENDLESS while none is known."""

    def __init__(self, grammar: Grammar, regex: Callable[[str], str]) -> None:
        self._grammar, self._regex = grammar, regex
        self.bodies = [int(str(rule[1])) for rule in grammar.rules]
        self.of_rule = [ENDLESS] * len(self.bodies)
        self._patterns: dict[str, int] = {}

    def settle(self) -> None:
        """Until nothing gets shorter: whoever refers to a rule that did is looked at again."""
        users: list[set[int]] = [set() for _ in self.bodies]
        for rule, body in enumerate(self.bodies):
            for used in self._rules_in(body):
                users[used].add(rule)
        waiting = dict.fromkeys(range(len(self.bodies)))
        while waiting:
            rule = next(iter(waiting))
            del waiting[rule]
            length = self.of(self.bodies[rule])
            if length < self.of_rule[rule]:
                self.of_rule[rule] = length
                waiting.update(dict.fromkeys(users[rule]))

    def longest(self) -> int:
        """Of all sequences' shortest texts."""
        kinds = [self._grammar.expression(index) for index in range(len(self._grammar.grammar_expr_indptr) - 1)]
        lengths = (self.of(index) for index, (kind, _) in enumerate(kinds) if kind in (Kind.SEQUENCE, Kind.CHOICES))
        return max(lengths, default=0)  # a grammar of the empty text has neither

    def of(self, index: int) -> int:
        """The shortest text of an expression."""
        kind, data = self._grammar.expression(index)
        length = 0
        if kind == Kind.BYTES:
            length = len(data)
        elif kind == Kind.CLASS:
            length = 1
        elif kind == Kind.RULE:
            length = self.of_rule[data[0]]
        elif kind == Kind.SEQUENCE:
            length = sum(self.of(part) for part in data)
        elif kind == Kind.CHOICES:
            length = min((self.of(part) for part in data), default=0)
        elif kind == Kind.REPEAT:
            length = self.of_rule[data[0]] * data[1]
        elif kind == Kind.REGEX:
            length = self._of_pattern("".join(map(chr, data[1:])))
        return min(length, ENDLESS)

    def _of_pattern(self, pattern: str) -> int:
        if pattern not in self._patterns:
            self._patterns[pattern] = longest_forced(self._regex(pattern), self._regex)
        return self._patterns[pattern]

    def _rules_in(self, index: int) -> set[int]:
        kind, data = self._grammar.expression(index)
        if kind in (Kind.RULE, Kind.REPEAT):
            return {data[0]}
        return {rule for part in data for rule in self._rules_in(part)} if kind in (Kind.SEQUENCE, Kind.CHOICES) else set()


def longest_forced(serialized: str, regex: Callable[[str], str]) -> int:
    """No text that the grammar forces is longer, in bytes; ENDLESS if a way through it never ends.

    serialized: JSON of a grammar; regex: a pattern to the same.
    """
    lengths = _Lengths(msgspec.json.decode(serialized, type=Grammar), regex)
    lengths.settle()
    return lengths.longest()
