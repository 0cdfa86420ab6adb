"""How often a grammar makes something repeat. What it forces is looked for as a whole, by native code that nothing can interrupt,
so that grammars which force millions of characters, like a{1000000} or (a{1000}){1000}, must not come that far."""

from __future__ import annotations

import re

MAX_REPEATS = 10_000  # of one thing, repetitions around it multiplied
_PARTS = re.compile(r'\\.|\[(?:\\.|[^\]\\])*\]|"(?:\\.|[^"\\])*"|\{(\d+)(?:,\d*)?\}|[()]|.', re.DOTALL)
_RULE = re.compile(r"^[ \t]*[\w.-]+[ \t]*::=", re.MULTILINE)


def least_repeats(pattern: str, *, quotes: bool = False) -> int:
    """The most repetitions that a pattern demands of anything in it. quotes: texts stand between quotes, as in EBNF."""
    open_groups = [1]  # the most within each group that is open
    last = 1  # within the item that was read last
    for match in _PARTS.finditer(pattern):
        part, count = match.group(), match.group(1)
        if count is not None:
            last *= max(int(count[:12]), 1)
        elif part == "(":
            open_groups.append(1)
            last = 1
        elif part == ")" and len(open_groups) > 1:
            last = open_groups.pop()
        elif len(part) > 1 and part[0] == '"' and not quotes:
            last = least_repeats(part[1:-1])
        else:
            last = 1
        open_groups[-1] = max(open_groups[-1], last)
    return max(open_groups)


def repeats_of_rules(ebnf: str) -> int:
    """At most so many repetitions does a grammar demand, if each rule stands within each other's."""
    product = 1
    for rule in _RULE.split(ebnf):
        product *= least_repeats(rule, quotes=True)
    return product
