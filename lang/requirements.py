"""What a program needs of its backend, read from its source before anything is sent."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from . import api
from .backend.base import Backend, asks

STEPS = {"select": "select", "image": "image", "video": "video"}
RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
GRAMMARS = ("regex", "json_schema", "ebnf")


class Requirements:
    """Features that the calls of gen, select, image ... in the program's own text ask for, with their lines.

    What helper functions do is not seen here; a step that the backend cannot run is then refused when it is appended.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.features: dict[str, int] = {}
        try:
            source = textwrap.dedent(inspect.getsource(function))
            tree = ast.parse(source)
        except (OSError, TypeError, SyntaxError):  # typed at a prompt, or generated
            return
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            step = _resolve(call.func, function)
            for feature in _features(step, call):
                self.features.setdefault(feature, call.lineno)

    def check(self, backend: Backend) -> None:
        """Raises UnsupportedError for what the backend cannot do."""
        for feature in self.features:
            backend.check(feature)


def _resolve(node: ast.expr, function: Callable[..., Any]) -> Any:
    """The object that a called name means, if it is global or an attribute of a global module."""
    names = getattr(function, "__globals__", {})
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        owner = names.get(node.value.id)
        return vars(owner).get(node.attr, _lazy(owner, node.attr)) if inspect.ismodule(owner) else None
    return None


def _lazy(module: Any, name: str) -> Any:
    return getattr(api, name, None) if getattr(module, "__name__", "") == api.__name__.partition(".")[0] else None


def _features(step: Any, call: ast.Call) -> Iterator[str]:
    for name, feature in STEPS.items():
        if step is getattr(api, name):
            yield feature
    if step in (api.gen_int, api.gen_string) if callable(step) else False:
        yield "regex"
    if step is not api.gen:
        return
    for keyword in call.keywords:
        constant = keyword.value.value if isinstance(keyword.value, ast.Constant) else ...
        name = RENAMED.get(keyword.arg or "", keyword.arg or "")
        if constant is None or (constant is not ... and not asks(name, constant)):
            continue
        if name == "choices":
            yield "select"
        elif name == "dtype":
            yield "regex"
        elif name in GRAMMARS or constant is not ...:
            yield name
