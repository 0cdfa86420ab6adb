"""Stop patterns: finding matches of regular expressions in a text that arrives in pieces, in linear time.

Patterns become one nondeterministic automaton whose states are stepped together, so no pattern is exponential. Each active state
knows the earliest start from which it was reached; so what may still become (part of) a match, and must be held back, is known
exactly, and the result does not depend on how the text was cut into pieces.

Syntax: literals, ``.`` (no newline), classes, ``\\d \\w \\s`` and their opposites (ASCII), groups, ``|``, ``* + ?`` and ``{m,n}``.
Whether a repeat is lazy makes no difference, since a match ends as soon as it can. There are no anchors, look-arounds,
back-references and flags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

MAX_STATES = 2048  # of all patterns of a request
MAX_REPEAT = 1024
_DIGITS = frozenset("0123456789")
_WORD = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")
_SPACE = frozenset(" \t\n\r\f\v")
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
_HEX_LENS = {"x": 2, "u": 4, "U": 8}

Test = Callable[[str], bool]


class RegexError(ValueError):
    """A pattern that is broken, too big, or uses what is not supported."""


class _Node:
    """One state: leads to ``targets`` with a character that passes ``test``, or without one if that is None."""

    __slots__ = ("final", "targets", "test")

    def __init__(self, test: Test | None = None, final: str | None = None) -> None:
        self.test = test
        self.targets: list[_Node] = []
        self.final = final


# A piece of a pattern: given the node that comes after it, makes its nodes and returns the first.
Piece = Callable[["_Builder", _Node], _Node]


class _Builder:
    def __init__(self) -> None:
        self.num_nodes = 0

    def node(self, test: Test | None, *targets: _Node) -> _Node:
        self.num_nodes += 1
        if self.num_nodes > MAX_STATES:
            raise RegexError(f"a pattern has more than {MAX_STATES} states")
        node = _Node(test)
        node.targets = list(targets)
        return node


def num_states(pattern: str) -> int:
    """Size of a pattern's automaton. Raises RegexError."""
    builder = _Builder()
    _parse(pattern)(builder, _Node(final=pattern))
    return builder.num_nodes


class RegexMatcher:
    """Like StopMatcher, for patterns and plain strings together."""

    def __init__(self, patterns: Iterable[str], strings: Iterable[str] = ()) -> None:
        """Raises RegexError for a bad pattern."""
        roots = [_parse(pattern)(_Builder(), _Node(final=pattern)) for pattern in patterns]
        roots += [_concat([_literal(char) for char in text])(_Builder(), _Node(final=text)) for text in strings]
        self._roots = roots
        self._active: dict[_Node, int] = {}  # states that wait for a character -> earliest start, in characters of the whole text
        self._length = 0  # characters seen
        self._held = ""  # the last of them that are not shown yet
        self.matched: str | None = None
        self.matched_text = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text to show now, the pattern that is matched or None). After a match nothing more is shown."""
        if self.matched is not None:
            return "", self.matched
        self._held += text
        first = self._length + len(text) - len(self._held)
        for char in text:
            match = self._step(char)
            if match is not None:
                start, self.matched = match
                held, self._held = self._held, ""
                self.matched_text = held[start - first : self._length - first]
                return held[: start - first], self.matched
        cut = min(self._active.values(), default=self._length) - first
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, None

    def finish(self) -> str:
        """The held-back tail: no match will be completed any more."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> tuple[int, str] | None:
        """Take one character; (start, pattern) of the match that it completes, the one that starts first."""
        reached: dict[_Node, int] = {}
        for node, start in self._active.items():
            if node.test is not None and node.test(char):
                _close(node.targets, start, reached)
        fresh: dict[_Node, int] = {}
        _close(self._roots, self._length, fresh)
        for node in fresh:
            if node.test is not None and node.test(char):
                _close(node.targets, self._length, reached)
        self._length += 1
        matches = [(start, node.final) for node, start in reached.items() if node.final is not None]
        self._active = {node: start for node, start in reached.items() if node.test is not None}
        return min(matches) if matches else None


def _close(nodes: Iterable[_Node], start: int, reached: dict[_Node, int]) -> None:
    """Add nodes, and all that they lead to without a character, with a start, unless they have an earlier one."""
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if reached.get(node, start + 1) > start:
            reached[node] = start
            if node.test is None:
                stack.extend(node.targets)


# --- pieces -----------------------------------------------------------------------------------------------------------------------


def _char(test: Test) -> Piece:
    return lambda builder, after: builder.node(test, after)


def _literal(char: str) -> Piece:
    return _char(lambda other: other == char)


def _concat(pieces: list[Piece]) -> Piece:
    def build(builder: _Builder, after: _Node) -> _Node:
        for piece in reversed(pieces):
            after = piece(builder, after)
        return after

    return build


def _either(pieces: list[Piece]) -> Piece:
    return lambda builder, after: builder.node(None, *[piece(builder, after) for piece in pieces])


def _repeat(piece: Piece, least: int, most: int | None) -> Piece:
    def build(builder: _Builder, after: _Node) -> _Node:
        if most is None:
            loop = builder.node(None, after)
            loop.targets.append(piece(builder, loop))
            after = loop
        else:
            end = after
            for _ in range(most - least):
                after = builder.node(None, piece(builder, after), end)
        for _ in range(least):
            after = piece(builder, after)
        return after

    return build


# --- syntax -----------------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _parse(pattern: str) -> Piece:
    parser = _Parser(pattern)
    piece = parser.alternatives(0)
    if parser.rest:
        raise RegexError(f"{pattern!r}: unbalanced parenthesis")
    if _matches_nothing(piece):
        raise RegexError(f"{pattern!r} matches the empty text")
    return piece


def _matches_nothing(piece: Piece) -> bool:
    end = _Node(final="")
    reached: dict[_Node, int] = {}
    _close([piece(_Builder(), end)], 0, reached)
    return end in reached


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    @property
    def rest(self) -> str:
        return self._pattern[self._at :]

    def _fail(self, what: str) -> RegexError:
        return RegexError(f"{self._pattern!r}: {what} at position {self._at}")

    def _next(self) -> str:
        if self._at == len(self._pattern):
            raise self._fail("unexpected end")
        self._at += 1
        return self._pattern[self._at - 1]

    def _take(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def alternatives(self, depth: int) -> Piece:
        if depth > 20:
            raise self._fail("groups are nested too deeply")
        options = [self._sequence(depth)]
        while self._take("|"):
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else _either(options)

    def _sequence(self, depth: int) -> Piece:
        pieces: list[Piece] = []
        while self.rest and self.rest[0] not in "|)":
            pieces.append(self._repeats(self._atom(depth)))
        return _concat(pieces)

    def _atom(self, depth: int) -> Piece:
        char = self._next()
        if char == "(":
            if self._take("?") and not self._take(":"):
                raise self._fail("groups other than (...) and (?:...) are not supported")
            piece = self.alternatives(depth + 1)
            if not self._take(")"):
                raise self._fail("missing )")
            return piece
        if char == "[":
            return _char(self._class())
        if char == ".":
            return _char(lambda other: other != "\n")
        if char == "\\":
            return _char(_member(self._escape()))
        if char in "^$":
            raise self._fail("anchors are not supported")
        if char in "*+?{":
            raise self._fail("nothing to repeat")
        return _literal(char)

    def _repeats(self, piece: Piece) -> Piece:
        if self._take("*"):
            bounds: tuple[int, int | None] = (0, None)
        elif self._take("+"):
            bounds = (1, None)
        elif self._take("?"):
            bounds = (0, 1)
        elif self._take("{"):
            bounds = self._bounds()
        else:
            return piece
        self._take("?")
        if self.rest[:1] in ("*", "+", "?", "{") and self.rest:
            raise self._fail("multiple repeat")
        return _repeat(piece, *bounds)

    def _bounds(self) -> tuple[int, int | None]:
        body, closed, _ = self.rest.partition("}")
        least, comma, most = body.partition(",")
        good = closed and all(not part or (part.isascii() and part.isdecimal() and len(part) < 6) for part in (least, most))
        if not good or not (least or most):
            raise self._fail("a repeat must be {m}, {m,} , {,n} or {m,n}")
        self._at += len(body) + 1
        low = int(least or 0)
        high = low if not comma else int(most) if most else None
        if max(low, high or 0) > MAX_REPEAT or (high is not None and high < low):
            raise self._fail(f"a repeat must be in order and at most {MAX_REPEAT}")
        return low, high

    def _escape(self) -> frozenset[str] | tuple[frozenset[str]] | str:
        """A character, a set of them, or a set that is meant to be inverted (in a tuple)."""
        char = self._next()
        if char in _CLASSES:
            return _CLASSES[char]
        if char.lower() in _CLASSES:
            return (_CLASSES[char.lower()],)
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char in _HEX_LENS:
            digits = self.rest[: _HEX_LENS[char]]
            try:
                code = chr(int(digits, 16)) if len(digits) == _HEX_LENS[char] and digits.isalnum() else ""
            except (ValueError, OverflowError):
                code = ""
            if not code:
                raise self._fail("bad hexadecimal escape")
            self._at += len(digits)
            return code
        if char.isalnum():
            raise self._fail(f"the escape \\{char} is not supported")
        return char

    def _class(self) -> Test:
        negated = self._take("^")
        tests: list[Test] = []
        while not (tests and self._take("]")):
            low = self._class_member()
            if isinstance(low, str) and self.rest[:1] == "-" and self.rest[:2] != "-]" and len(self.rest) > 1:
                self._at += 1
                high = self._class_member()
                if not isinstance(high, str) or high < low:
                    raise self._fail("bad range")
                tests.append(_between(low, high))
            else:
                tests.append(_member(low))
        if negated:
            return lambda char: not any(test(char) for test in tests)
        return lambda char: any(test(char) for test in tests)

    def _class_member(self) -> frozenset[str] | tuple[frozenset[str]] | str:
        char = self._next()
        return self._escape() if char == "\\" else char


def _between(low: str, high: str) -> Test:
    return lambda char: low <= char <= high


def _member(what: frozenset[str] | tuple[frozenset[str]] | str) -> Test:
    if isinstance(what, tuple):
        (excluded,) = what
        return lambda char: char not in excluded
    if isinstance(what, str):
        return lambda char: char == what
    return lambda char: char in what
