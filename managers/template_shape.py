"""What a chat template expects of the messages that it is given, read from its syntax tree."""

from __future__ import annotations

from typing import NamedTuple

from jinja2 import nodes


class TemplateShape(NamedTuple):
    """wants_parts: it loops over a message's content. knows_developer: it has a word for that role. has_tools: it shows tools.

    wants_argument_text: it writes a call's arguments as they are, so they must be JSON text; else it formats an object itself.
    """

    wants_parts: bool
    wants_argument_text: bool
    knows_developer: bool
    has_tools: bool


def shape_of(tree: nodes.Template) -> TemplateShape:
    """Of a parsed template."""
    constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return TemplateShape(
        wants_parts=_loops_over_content(tree),
        wants_argument_text=_writes_arguments(tree),
        knows_developer="developer" in constants,
        has_tools=any(node.name == "tools" for node in tree.find_all(nodes.Name)),
    )


def _loops_over_content(tree: nodes.Template) -> bool:
    """True if the template loops over a message's content, itself or through a variable or a macro's parameter."""
    aliases = {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_attribute(node.node, "content")
    }
    aliases |= {arg.name for macro in tree.find_all(nodes.Macro) for arg in macro.args if arg.name == "content"}
    for loop in tree.find_all(nodes.For):
        iterated = _unfiltered(loop.iter)
        if _is_attribute(iterated, "content") or (isinstance(iterated, nodes.Name) and iterated.name in aliases):
            return True
    return False


def _writes_arguments(tree: nodes.Template) -> bool:
    """True if arguments are written or joined to other text directly, and nowhere filtered or looped over."""
    if any(_is_attribute(_unfiltered(node), "arguments") for node in tree.find_all(nodes.Filter)):
        return False
    written = [child for node in tree.find_all(nodes.Output) for child in node.nodes]
    for node in tree.find_all(nodes.Add):
        written += [node.left, node.right]
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.EnvironmentAttribute):  # what the operator ~ was compiled to
            written += call.args
    return any(_is_attribute(node, "arguments") for node in written)


def _unfiltered(node: nodes.Node) -> nodes.Node:
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    return node


def _is_attribute(node: nodes.Node, name: str) -> bool:
    """Is it ``x.name`` or ``x['name']``?"""
    if isinstance(node, nodes.Getattr):
        return node.attr == name
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == name
