"""Which backend may compile a grammar, and in what form: the check of everything a client sends as a grammar.

It runs in the process that compiles, under its limits, before any native code sees the text. Each backend gets a grammar only if it
enforces all of it; where none does, the request is refused with the keyword and its JSON pointer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ..errors import RequestError
from .grammar import BACKENDS, EBNF, JSON_SCHEMA, KINDS, REGEX, STRUCTURAL_TAG
from .repeats import MAX_REPEATS, repeats_of_rules
from .schema_narrow import Narrowing, NotEnforced, Unsatisfiable
from .schema_rules import FORMAT_PATTERNS, pattern_fault, plain_optionals

ANY_JSON = "$$ANY$$"  # a json_schema that stands for "any JSON"
JSON_OBJECT = '{"type":"object"}'
MAX_BYTES = {JSON_SCHEMA: 1 << 20, STRUCTURAL_TAG: 1 << 20, EBNF: 1 << 18, REGEX: 1 << 14}
MAX_DEPTH = 64
MAX_NODES = 50_000
STRUCTURAL_FORMATS = frozenset(
    [
        "const_string",
        "any_text",
        "sequence",
        "or",
        "tag",
        "triggered_tags",
        "tags_with_separator",
        "json_schema",
        "regex",
        "grammar",
    ]
)


class Candidate(msgspec.Struct, frozen=True):
    """A way to serve a grammar: a backend, the text that it is to compile, and why the backends before it cannot."""

    backend: str
    text: str
    refused: tuple[str, ...] = ()


def candidates(kind: str, text: str, *, preferred: str, installed: Sequence[str]) -> list[Candidate]:
    """What to compile, in the order to try it: at least one, each with a backend that enforces the grammar as far as is known here.

    Raises RequestError for a grammar that is too big, wrong, or enforced by none of the installed backends.
    """
    _check_size(kind, text)
    found: list[Candidate] = []
    refused: list[str] = []
    for backend in sorted(installed, key=lambda name: (name != preferred, list(BACKENDS).index(name))):
        try:
            form = _form(backend, kind, text)
        except NotEnforced as error:
            refused.append(f"{error} is not enforced by {backend}")
        except Unsatisfiable as error:
            raise RequestError(f"{kind}: nothing satisfies the schema at {error}.", param=kind) from None
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise RequestError(f"{kind}: {error.args[0] if error.args else error}", param=kind) from None
        else:
            found.append(Candidate(backend, form, tuple(refused)))
    if not found:
        raise RequestError(f"{kind}: {'; '.join(refused) or 'no grammar backend is installed'}.", param=kind)
    return found


def _check_size(kind: str, text: str) -> None:
    if kind not in KINDS:
        raise RequestError(f"{kind} is no kind of grammar; known are {', '.join(KINDS)}.")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise RequestError(f"{kind}: not valid Unicode text.", param=kind) from None
    if size > MAX_BYTES[kind]:
        raise RequestError(f"{kind}: {size} bytes; at most {MAX_BYTES[kind]} are allowed.", param=kind)


def _form(backend: str, kind: str, text: str) -> str:
    """The text that the backend compiles."""
    if kind == REGEX:
        return _regex(backend, text)
    if kind == EBNF:
        if backend == "outlines":
            raise NotEnforced(EBNF, "#")
        if repeats_of_rules(text) > MAX_REPEATS:
            raise NotEnforced(EBNF, "#", f"that repeats something more than {MAX_REPEATS} times")
        return text
    if kind == STRUCTURAL_TAG:
        if backend != "xgrammar":
            raise NotEnforced(STRUCTURAL_TAG, "#")
        return _dump(_structural_tag(_parse(kind, text)))
    if backend == "outlines":
        raise NotEnforced(JSON_SCHEMA, "#")
    schema = {} if text == ANY_JSON else _parse(kind, text)
    return _dump(Narrowing(schema).result() if backend == "xgrammar" else _for_llguidance(schema))


def _regex(backend: str, text: str) -> str:
    fault = pattern_fault(text, in_json=False)
    if fault:
        raise NotEnforced(REGEX, "#", f"that {fault}")
    if backend == "outlines":  # matches as a whole and knows no anchors
        if set(text[1:-1]) & set("^$") or "|" in text:
            raise NotEnforced(REGEX, "#", "with anchors or alternatives")
        return text.removeprefix("^").removesuffix("$")
    return plain_optionals(text)


def _dump(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _parse(kind: str, text: str) -> Any:
    """Decode JSON that is neither too deep nor too large."""
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise RequestError(f"{kind}: nested more than {MAX_DEPTH} levels deep.", param=kind) from None
    except msgspec.DecodeError as error:
        raise RequestError(f"{kind}: not valid JSON: {error}", param=kind) from None
    for num_nodes, depth in enumerate(_depths(value)):
        if depth > MAX_DEPTH:
            raise RequestError(f"{kind}: nested more than {MAX_DEPTH} levels deep.", param=kind)
        if num_nodes > MAX_NODES:
            raise RequestError(f"{kind}: more than {MAX_NODES} values.", param=kind)
    return value


def _strings(value: Any) -> Iterator[str]:
    """All strings inside, names included."""
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, str):
            yield node
        elif isinstance(node, dict):
            stack.extend([*node, *node.values()])
        elif isinstance(node, list):
            stack.extend(node)


def _depths(value: Any) -> Iterator[int]:
    """The depth of each value inside, without recursion."""
    stack = [(value, 0)]
    while stack:
        node, depth = stack.pop()
        yield depth
        if isinstance(node, dict):
            stack.extend((child, depth + 1) for child in node.values())
        elif isinstance(node, list):
            stack.extend((child, depth + 1) for child in node)


def _for_llguidance(schema: Any) -> Any:
    """llguidance refuses keywords that it does not know, but for what is checked here. Control characters it cannot write."""
    if any(char < " " and char not in "\b\f\n\r\t" for text in _strings(schema) for char in text):
        raise NotEnforced("enum", "#", "with control characters, or a name with such,")
    return _llguidance_node(schema, "#")


def _llguidance_node(node: Any, at: str) -> Any:
    """Rewrite formats that it takes too loosely. Whatever is called like a keyword counts as one, wherever it stands."""
    if isinstance(node, list):
        return [_llguidance_node(each, f"{at}/{index}") for index, each in enumerate(node)]
    if not isinstance(node, dict):
        return node
    _check_llguidance(node, at)
    result = {key: _llguidance_node(value, f"{at}/{key}") for key, value in node.items()}
    if isinstance(node.get("format"), str) and node["format"] in FORMAT_PATTERNS:
        if "pattern" in node:
            raise NotEnforced("format", at, "beside a pattern")
        del result["format"]
        result["pattern"] = FORMAT_PATTERNS[node["format"]]
    return result


def _check_llguidance(node: dict[str, Any], at: str) -> None:
    """What it would take without enforcing it. A client's x-guidance could make it lenient."""
    for keyword in ("x-guidance", "nullable", "contentEncoding", "contentMediaType"):
        if keyword in node:
            raise NotEnforced(keyword, at)
    if node.get("format") in ("int32", "int64"):
        raise NotEnforced("format", at, f"{node['format']!r}")
    for keyword in ("$id", "id"):
        if at != "#" and isinstance(node.get(keyword), str):
            raise NotEnforced(keyword, at)
    if isinstance(node.get("minProperties"), int) and node["minProperties"] > 1 and node.get("additionalProperties") is not False:
        raise NotEnforced("minProperties", at, "above 1, where names are free: one may come twice")


def _structural_tag(tag: Any) -> Any:
    """Narrow the schemas inside. The older form, {"structures": [...], "triggers": [...]}, becomes the newer one."""
    if not isinstance(tag, dict):
        raise TypeError("a structural tag is an object")
    if "structures" in tag:
        tags = [
            {
                "type": "tag",
                "begin": each["begin"],
                "end": each["end"],
                "content": {"type": "json_schema", "json_schema": each["schema"]},
            }
            for each in tag["structures"]
        ]
        tag = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}}
    return {"type": "structural_tag", "format": _structural_format(tag["format"], "#/format")}


def _structural_format(node: Any, at: str) -> Any:
    if isinstance(node, list):
        return [_structural_format(each, f"{at}/{index}") for index, each in enumerate(node)]
    if not isinstance(node, dict):
        return node
    kind = node.get("type", "tag")
    if kind not in STRUCTURAL_FORMATS:
        raise NotEnforced("type", at, f"{kind!r}")
    if kind == JSON_SCHEMA:
        style = {"style": node["style"]} if "style" in node else {}  # how it is written, where that is not as JSON
        return {"type": JSON_SCHEMA, "json_schema": Narrowing(node["json_schema"]).result(), **style}
    if kind == REGEX:
        if fault := pattern_fault(node["pattern"], in_json=False):
            raise NotEnforced("pattern", at, f"that {fault}")
        return {"type": REGEX, "pattern": plain_optionals(node["pattern"])}
    return {
        key: _structural_format(value, f"{at}/{key}") if isinstance(value, dict | list) else value for key, value in node.items()
    }
