"""A call by the names of its operation's schema: no other code need know the position of an argument."""

import functools
from types import MappingProxyType
from typing import Any

from torch import fx


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """An argument, given by position or by name; else the schema's default, or `default` where the schema
    has no such argument."""
    place, otherwise = _parameters(node.target).get(name, (len(node.args), default))
    return node.args[place] if place < len(node.args) else node.kwargs.get(name, otherwise)


def arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments by name, in the order of the schema, with its defaults."""
    return {name: argument(node, name) for name in _parameters(node.target)}


@functools.cache
def _parameters(target: Any) -> MappingProxyType[str, tuple[int, Any]]:
    """For each argument of an operation its position and its default. (Arguments that are given by name
    alone come last, behind all that a call has.)"""
    schema = getattr(target, "_schema", None)
    arguments = () if schema is None else schema.arguments
    return MappingProxyType({a.name: (place, a.default_value) for place, a in enumerate(arguments)})
