"""Rewrites a JSON schema so that xgrammar enforces all of it, or says which keyword it would ignore.

What the result accepts, the given schema accepts too, never the other way round: properties that are not named are not produced,
required ones get an entry, oneOf becomes anyOf only where its branches exclude each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from .repeats import MAX_REPEATS
from .schema_rules import (
    ANNOTATIONS,
    CHARACTER,
    FORMAT_PATTERNS,
    FORMATS,
    INTEGER_BOUND,
    KEYWORDS,
    MAX_MULTIPLE,
    NUMBER_FORMATS,
    NUMBER_RANGE,
    TYPES,
    integer_bounds,
    is_of_type,
    json_type,
    pattern_fault,
    plain_optionals,
)

Schema = dict[str, Any]
MAX_REF_CHAIN = 64
MAX_COUNT = 1 << 20


class NotEnforced(Exception):
    """A keyword that would not be enforced. pointer: JSON pointer of the schema that holds it."""

    def __init__(self, keyword: str, pointer: str, why: str = "") -> None:
        super().__init__(f"`{keyword}` at {pointer or '#'}" + (f" {why}" if why else ""))


class Unsatisfiable(Exception):
    """Nothing satisfies this schema."""


class Narrowing:
    """One schema. ``result`` is what xgrammar gets.

    Raises NotEnforced, Unsatisfiable, or TypeError, KeyError and the like for what is no schema.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[str, str] = {}  # pointer of a $ref -> name of its definition in the result
        self._todo: list[str] = []
        self._by_type: dict[str, Callable[[Schema, str], Schema]] = {
            "string": self._string,
            "number": self._number,
            "integer": self._number,
            "array": self._array,
            "object": self._object,
        }

    def result(self) -> Schema:
        root = self.narrow(self._root, "#")
        definitions: dict[str, Schema] = {}
        while self._todo:
            pointer = self._todo.pop()
            definitions[self._names[pointer]] = self.narrow(self._resolve(pointer), pointer)
        if definitions:
            root = {**root, "$defs": definitions} if "$ref" not in root else {"anyOf": [root], "$defs": definitions}
        return root

    def narrow(self, node: Any, at: str) -> Schema:
        """A schema at the pointer ``at``."""
        if node is True:
            return {}
        if node is False:
            raise Unsatisfiable(at)
        if not isinstance(node, dict):
            raise TypeError(f"{at}: a schema is an object or a boolean")
        ignored = ANNOTATIONS | ({"$id", "id"} if at == "#" else set())
        node = {key: value for key, value in node.items() if key not in ignored and not key.startswith("x-")}
        for keyword, method in (
            ("$ref", self._ref),
            ("enum", self._enum),
            ("const", self._enum),
            ("anyOf", self._any_of),
            ("oneOf", self._one_of),
            ("allOf", self._all_of),
        ):
            if keyword in node:
                return method(node, at)
        return self._typed(node, at)

    # --- references and combinations

    def _ref(self, node: Schema, at: str) -> Schema:
        _alone(node, at, "$ref")
        pointer = node["$ref"]
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise NotEnforced("$ref", at, "to anything but a place in the same schema")
        target, seen = self._resolve(pointer), {pointer}
        while isinstance(target, dict) and "$ref" in target:
            following = target["$ref"]
            if following in seen or len(seen) > MAX_REF_CHAIN:
                raise NotEnforced("$ref", at, "which leads back to itself")
            seen.add(following)
            target = self._resolve(following)
        if pointer not in self._names:
            self._names[pointer] = f"d{len(self._names)}"
            self._todo.append(pointer)
        return {"$ref": f"#/$defs/{self._names[pointer]}"}

    def _resolve(self, pointer: str) -> Any:
        node = self._root
        for part in unquote(pointer)[1:].split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            try:
                node = node[int(part)] if isinstance(node, list) else node[part]
            except (LookupError, ValueError, TypeError):
                raise KeyError(f"$ref: there is nothing at {pointer}") from None
            if isinstance(node, dict) and ("$id" in node or ("id" in node and isinstance(node["id"], str))):
                raise NotEnforced("$id", pointer)
        return node

    def _deref(self, node: Any) -> Any:
        """The node behind a chain of references (checked before)."""
        for _ in range(MAX_REF_CHAIN):
            if not (isinstance(node, dict) and isinstance(node.get("$ref"), str) and node["$ref"].startswith("#")):
                return node
            node = self._resolve(node["$ref"])
        return node

    def _enum(self, node: Schema, at: str) -> Schema:
        values = node["enum"] if "enum" in node else [node["const"]]
        if not isinstance(values, list):
            raise TypeError(f"{at}/enum: must be an array")
        if "enum" in node and "const" in node:
            values = [value for value in values if value == node["const"] and json_type(value) == json_type(node["const"])]
        for keyword in node:
            if keyword not in ("enum", "const", "type"):
                raise NotEnforced(keyword, at, "beside enum or const")
        types = _types(node, at)
        values = [value for value in values if is_of_type(value, types)]
        if not values:
            raise Unsatisfiable(at)
        return {"enum": values}

    def _any_of(self, node: Schema, at: str, keyword: str = "anyOf") -> Schema:
        _alone(node, at, keyword)
        if not isinstance(node[keyword], list):
            raise TypeError(f"{at}/{keyword}: must be an array")
        branches = []
        for index, branch in enumerate(node[keyword]):
            try:
                branches.append(self.narrow(branch, f"{at}/{keyword}/{index}"))
            except Unsatisfiable:
                continue
        if not branches:
            raise Unsatisfiable(at)
        return {"anyOf": branches}

    def _one_of(self, node: Schema, at: str) -> Schema:
        branches = [self._deref(branch) for branch in node["oneOf"]]
        for index, branch in enumerate(branches):
            if not all(self._exclude_each_other(branch, other) for other in branches[:index]):
                raise NotEnforced("oneOf", at, "whose branches may overlap")
        return self._any_of(node, at, "oneOf")

    def _exclude_each_other(self, one: Any, other: Any) -> bool:
        if not (isinstance(one, dict) and isinstance(other, dict)):
            return False
        values, more = _values(one), _values(other)
        if values is not None and more is not None:
            return not any(value == another for value in values for another in more)
        types, others = _known_types(one), _known_types(other)
        if types and others and not types & others and not {"integer", "number"} <= types | others:
            return True
        if types == others == {"object"}:
            shared = set(one.get("required", [])) & set(other.get("required", []))
            pairs = [(self._deref(each.get("properties", {}).get(name)) for each in (one, other)) for name in sorted(shared)]
            return any(self._exclude_each_other(*pair) for pair in pairs)
        return False

    def _all_of(self, node: Schema, at: str) -> Schema:
        _alone(node, at, "allOf")
        if not isinstance(node["allOf"], list) or len(node["allOf"]) != 1:
            raise NotEnforced("allOf", at, "of more than one schema")
        return self.narrow(node["allOf"][0], f"{at}/allOf/0")

    # --- types

    def _typed(self, node: Schema, at: str) -> Schema:
        known = {keyword for keywords in KEYWORDS.values() for keyword in keywords} | {"type"}
        for keyword in node:
            if keyword not in known:
                raise NotEnforced(keyword, at)
        if "type" not in node:
            wanted = [name for name in ("string", "number", "array", "object") if set(KEYWORDS[name]) & set(node)]
            if not wanted:
                return {}
            if len(wanted) > 1:
                raise NotEnforced(next(iter(node)), at, "without a type")
            return self._of_type(wanted[0], node, at)
        types = sorted(_types(node, at))
        branches = []
        for name in types:
            try:
                branches.append(self._of_type(name, node, at))
            except Unsatisfiable:
                if len(types) == 1:
                    raise
        if not branches:
            raise Unsatisfiable(at)
        return branches[0] if len(branches) == 1 else {"anyOf": branches}

    def _of_type(self, name: str, node: Schema, at: str) -> Schema:
        own = {keyword: node[keyword] for keyword in KEYWORDS.get(name, ()) if keyword in node}
        if "format" in node and (name in ("number", "integer") or (name == "string" and node["format"] in NUMBER_FORMATS)):
            own = {key: value for key, value in own.items() if key != "format"}
            if node["format"] in NUMBER_FORMATS and name != "string":
                own["format"] = node["format"]
        if name not in self._by_type:
            return {"type": name}
        return self._by_type[name]({"type": name, **own}, at)

    def _string(self, node: Schema, at: str) -> Schema:
        _, lengths = _bounds(node, "minLength", "maxLength", at)
        if "pattern" in node and "format" in node:
            raise NotEnforced("format", at, "beside a pattern")
        pattern = node.get("pattern")
        if "format" in node:
            pattern = FORMAT_PATTERNS.get(node["format"])
            if pattern is None and node["format"] not in FORMATS:
                raise NotEnforced("format", at, f"{node['format']!r}")
        if lengths and ("pattern" in node or "format" in node):
            raise NotEnforced(next(iter(lengths)), at, "beside a pattern or a format")
        if pattern is not None:
            if not isinstance(pattern, str):
                raise TypeError(f"{at}/pattern: must be a string")
            fault = pattern_fault(pattern, in_json=True)
            if fault:
                raise NotEnforced("pattern", at, f"that {fault}")
            return {"type": "string", "pattern": plain_optionals(pattern)}
        if "format" in node:
            return {"type": "string", "format": node["format"]}
        if lengths:  # as a pattern: of its own, xgrammar lets control characters through where only the length is given
            high = lengths.get("maxLength", "")
            return {"type": "string", "pattern": f"^{CHARACTER}{{{lengths.get('minLength', 0)},{high}}}$"}
        return {"type": "string"}

    def _number(self, node: Schema, at: str) -> Schema:
        for keyword in KEYWORDS["number"]:
            if keyword in node and (isinstance(node[keyword], bool) or not isinstance(node[keyword], int | float)):
                raise TypeError(f"{at}/{keyword}: must be a number")
        step = node.get("multipleOf")
        if step is not None and not (1 <= step <= MAX_MULTIPLE and float(step).is_integer()):
            raise NotEnforced("multipleOf", at, f"{step}")
        if step is not None or node["type"] == "integer":
            return _integer(node, int(step or 1), at)
        for low, high in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if low in node and high in node:
                raise NotEnforced(high, at, f"beside {low}")
        bounds = {keyword: node[keyword] for keyword in KEYWORDS["number"] if keyword in node}
        for keyword, bound in bounds.items():
            if bound and not NUMBER_RANGE[0] <= abs(bound) <= NUMBER_RANGE[1]:
                raise NotEnforced(keyword, at, f"{bound}")
        return {"type": "number", **bounds}

    def _array(self, node: Schema, at: str) -> Schema:
        if node.get("uniqueItems"):
            raise NotEnforced("uniqueItems", at)
        low, counts = _bounds(node, "minItems", "maxItems", at)
        if low and low > MAX_REPEATS:
            raise NotEnforced("minItems", at, f"above {MAX_REPEATS}")
        items, prefix = node.get("items", True), node.get("prefixItems")
        if isinstance(items, list):  # as in drafts before 2020-12
            if prefix is not None:
                raise TypeError(f"{at}/items: must be a schema beside prefixItems")
            prefix, items = items, node.get("additionalItems", True)
        result: Schema = {"type": "array", **counts}
        if prefix:
            result["prefixItems"] = [self.narrow(each, f"{at}/prefixItems/{index}") for index, each in enumerate(prefix)]
        try:
            result["items"] = self.narrow(items, f"{at}/items")
        except Unsatisfiable:
            if low > len(prefix or []):
                raise
            if prefix:
                result["items"] = False
            else:
                result["maxItems"] = 0
        return result

    # --- objects

    def _object(self, node: Schema, at: str) -> Schema:
        low, counts = _bounds(node, "minProperties", "maxProperties", at)
        result: Schema = {"type": "object", **counts}
        named, required = self._properties(node, at)
        others = next((name for name in ("patternProperties", "propertyNames") if node.get(name) not in (None, {}, True)), None)
        if others and (named or required):
            raise NotEnforced(others, at, "beside properties")
        rest = node.get("additionalProperties", True)
        if named or required:
            if rest not in (True, {}, False):
                raise NotEnforced("additionalProperties", at, "with a schema, beside properties")
            return {**result, "properties": named, "required": required, "additionalProperties": False}
        if low > 1 and not (others is None and rest is False):
            raise NotEnforced("minProperties", at, "above 1, where names are free: one may come twice")
        if others:
            return {**result, **self._names_by_pattern(node, others, at)}
        try:
            return {**result, "additionalProperties": self.narrow(rest, f"{at}/additionalProperties")}
        except Unsatisfiable:
            if low:
                raise
            return {"type": "object", "properties": {}, "additionalProperties": False}

    def _properties(self, node: Schema, at: str) -> tuple[Schema, list[str]]:
        """Every property that may appear, each required one among them."""
        given, required = node.get("properties", {}), node.get("required", [])
        if not (isinstance(given, dict) and isinstance(required, list) and all(isinstance(name, str) for name in required)):
            raise TypeError(f"{at}: properties must be an object and required an array of strings")
        required = list(dict.fromkeys(required))
        rest = node.get("additionalProperties", True)
        named: Schema = {}
        for name, schema in given.items():
            try:
                named[name] = self.narrow(schema, f"{at}/properties/{_escaped(name)}")
            except Unsatisfiable:
                if name in required:
                    raise
        for name in required:
            if name not in given:
                if node.get("patternProperties"):
                    raise NotEnforced("patternProperties", at, "beside required")
                named[name] = self.narrow(rest, f"{at}/additionalProperties")
        return named, required

    def _names_by_pattern(self, node: Schema, keyword: str, at: str) -> Schema:
        """Objects whose names are given by patternProperties (one pattern) or propertyNames, not by properties."""
        if keyword == "patternProperties":
            if (
                len(node[keyword]) != 1
                or "propertyNames" in node
                or node.get("additionalProperties", True) not in (True, False, {})
            ):
                raise NotEnforced(keyword, at, "with more than one pattern, or beside other rules")
            ((pattern, schema),) = node[keyword].items()
            fault = pattern_fault(pattern, in_json=True)
            if fault:
                raise NotEnforced(keyword, at, f"with a pattern that {fault}")
            return {
                "patternProperties": {plain_optionals(pattern): self.narrow(schema, f"{at}/{keyword}/{_escaped(pattern)}")},
                "additionalProperties": False,
            }
        names = node[keyword]
        if not isinstance(names, dict) or set(names) - ANNOTATIONS - {"type", "pattern", "minLength", "maxLength"}:
            raise NotEnforced(keyword, at)
        if node.get("additionalProperties", True) not in (True, {}):
            raise NotEnforced(keyword, at, "beside additionalProperties")
        return {keyword: self.narrow({**names, "type": "string"}, f"{at}/{keyword}")}


def _alone(node: Schema, at: str, keyword: str) -> None:
    for other in node:
        if other != keyword:
            raise NotEnforced(other, at, f"beside {keyword}")


def _types(node: Schema, at: str) -> frozenset[str]:
    given = node.get("type", list(TYPES))
    types = frozenset([given] if isinstance(given, str) else given)
    if not types <= TYPES:
        raise TypeError(f"{at}/type: {', '.join(sorted(map(str, types - TYPES)))} is no type")
    return types - {"integer"} if "number" in types else types


def _known_types(node: Schema) -> frozenset[str]:
    """The types that a schema allows, empty if that is not obvious."""
    values = _values(node)
    if values is not None:
        return frozenset(json_type(value) for value in values)
    return _types(node, "#") if "type" in node else frozenset()


def _values(node: Schema) -> list[Any] | None:
    if "const" in node:
        return [node["const"]]
    values = node.get("enum")
    return values if isinstance(values, list) else None


def _integer(node: Schema, step: int, at: str) -> Schema:
    low, high = integer_bounds(node)
    if step > 1:
        if low is not None or high is not None:
            raise NotEnforced("multipleOf", at, "beside bounds")
        return {"type": "integer", "multipleOf": step}
    for keyword, bound in (("minimum", low), ("maximum", high)):
        if bound is not None and abs(bound) > INTEGER_BOUND:
            raise NotEnforced(keyword, at, f"{bound}")
    if low is not None and high is not None and low > high:
        raise Unsatisfiable(at)
    return {"type": "integer", **({} if low is None else {"minimum": low}), **({} if high is None else {"maximum": high})}


def _count(node: Schema, keyword: str, at: str) -> int | None:
    """A count, which may be written as 2.0."""
    value = node.get(keyword)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or not float(value).is_integer():
        raise TypeError(f"{at}/{keyword}: must be a whole number that is not negative")
    if value > MAX_COUNT:
        raise NotEnforced(keyword, at, f"above {MAX_COUNT}")
    return int(value)


def _bounds(node: Schema, low_name: str, high_name: str, at: str) -> tuple[int, Schema]:
    """The lower bound, 0 if none is given, and both as keywords."""
    low, high = _count(node, low_name, at) or 0, _count(node, high_name, at)
    if high is not None and low > high:
        raise Unsatisfiable(at)
    return low, {**({low_name: low} if low else {}), **({} if high is None else {high_name: high})}


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
