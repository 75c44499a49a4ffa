"""Walks over what refers to others: nodes of a graph, expressions, sizes. None recurses."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import networkx as nx

_Value = TypeVar("_Value", bound=Hashable)
_Made = TypeVar("_Made")


def reached(starts: Iterable[_Value], after: Callable[[_Value], Iterable[_Value]]) -> Iterator[_Value]:
    """These and all that `after` leads to from them, each once and before what it leads to."""
    stack, seen = list(starts), set[_Value]()
    while stack:
        value = stack.pop()
        if value not in seen:
            seen.add(value)
            yield value
            stack += after(value)


def connected(values: Sequence[_Value], parts: Callable[[_Value], Iterable[Hashable]]) -> list[list[_Value]]:
    """The values in groups: those that share a part are in one."""
    view = nx.Graph()
    for place, value in enumerate(values):
        view.add_node(place)
        view.add_edges_from((place, ("part", part)) for part in parts(value))
    places = (sorted(p for p in group if isinstance(p, int)) for group in nx.connected_components(view))
    return [[values[place] for place in group] for group in places]


def operands_first(roots: Iterable[_Value], operands: Callable[[_Value], Sequence[_Value]]) -> list[_Value]:
    """The roots and all that `operands` leads to, each after its operands, else in the order of the roots."""
    order: dict[_Value, None] = {}
    stack = [(node, False) for node in reversed(list(roots))]
    while stack:
        node, visited = stack.pop()
        if visited:
            order[node] = None
        elif node not in order:
            stack.append((node, True))
            stack.extend((n, False) for n in reversed(operands(node)))
    return list(order)


def filled(
    table: dict[_Value, _Made], start: _Value, operands: Callable[[_Value], Sequence[_Value]],
    compute: Callable[[_Value], _Made],
) -> _Made:  # fmt: skip
    """What `compute` gives of a value, after it was asked of its operands; the table keeps it of each."""
    if start not in table:
        for value in operands_first([start], lambda v: [o for o in operands(v) if o not in table]):
            table[value] = compute(value)
    return table[start]


def computed(
    order: Sequence[_Value], operands: Callable[[_Value], Iterable[_Value]],
    compute: Callable[[_Value, dict[_Value, Any]], Any], wanted: Sequence[_Value],
    given: Mapping[_Value, Any] = MappingProxyType({}),
) -> list[Any]:  # fmt: skip
    """What `compute` gives of `wanted`: of each in this order, from what it gave of its operands. Each is let
    go after its last use."""
    found = dict(given)
    last = {operand: value for value in order for operand in operands(value)}
    for value in order:
        if value not in found:
            found[value] = compute(value, found)
        for operand in operands(value):
            if last[operand] is value and operand not in wanted:
                found.pop(operand, None)
    return [found[value] for value in wanted]


def minimum_cut(
    sizes: Mapping[_Value, float | None], operands: Callable[[_Value], Iterable[_Value]],
    wanted: Iterable[_Value],
) -> list[_Value]:  # fmt: skip
    """The values of least size together through which all leads that `wanted` are computed from, nearest to
    these. `sizes`: of every value; None: it cannot be among them.

    Raises:
        networkx.NetworkXUnbounded: there are none.
    """
    flow = nx.DiGraph()
    for value, size in sizes.items():
        flow.add_edge(("in", value), ("out", value), **({} if size is None else {"capacity": size}))
        before = list(operands(value))
        flow.add_edges_from((("out", operand), ("in", value)) for operand in before)
        if not before:
            flow.add_edge("begin", ("in", value))
    flow.add_edges_from((("out", value), "end") for value in wanted)
    if "end" not in flow:
        return []
    _, (reachable, _) = nx.minimum_cut(flow, "begin", "end")
    return [v for v in sizes if ("in", v) in reachable and ("out", v) not in reachable]
