"""Rules of ops that put tensors into or beside others: joins, padding, writes to a slice or a diagonal.

Which tensor an element comes from is a condition on its place.

What is written where an index says: an element is written to if an entry of the index names its place. Where
the index is a range, the only entry that can do so is computed from the place; the entries of a short list
are compared with it one by one. The places of a triangle are those for which an inequality holds.
"""

import itertools
import math
from typing import Any, cast

import torch
from torch import fx

from attngraph.ir import budgets
from attngraph.ir.graph.call import argument
from attngraph.ir.language import E, Expr
from attngraph.meaning import constants
from attngraph.meaning.algebra import M
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Category, Indices, Unliftable, axis, is_part, rule
from attngraph.meaning.rules.movement import END, diagonal_of, first_picked, is_mask, slice_start

MOVEMENT = Category.MOVEMENT


@rule(MOVEMENT, "copy.default")
def copy(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """The second operand, broadcast, in the first one's shape and dtype."""
    read = context.read_broadcast(node.args[1], at)
    if read.op != "read":
        raise Unliftable("a number copied into a tensor")
    converts = read.value.meta["val"].dtype != node.meta["val"].dtype
    if converts and context.kind(node) != read.kind:
        raise Unliftable("a copy that converts to another kind of number")
    return context.narrowed(read, node.meta["val"].dtype) if converts else read


@rule(MOVEMENT, "slice_scatter.default")
def slice_scatter(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """The second operand where the slice is, the first elsewhere."""
    whole, part = node.args[:2]
    dim = axis(argument(node, "dim"), len(at))
    extent, count = context.shape(whole)[dim], context.shape(part)[dim]
    end, step = argument(node, "end"), context.integer(argument(node, "step"))
    to_the_end = step is E.ONE and (end is None or end == END)
    first = M.sub(extent, count) if to_the_end else slice_start(context, node, extent)
    place = M.sub(at[dim], first)
    inside = M.and_(M.le(E.ZERO, place), M.lt(place, M.mul(count, step)))
    if step is not E.ONE:
        inside = M.and_(inside, M.eq(M.mod(place, step), E.ZERO))
    inner = context.read(part, (*at[:dim], M.floordiv(place, step), *at[dim + 1 :]))
    return M.where(inside, inner, context.read(whole, at))


@rule(MOVEMENT, "select_scatter.default")
def select_scatter(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """The second operand at one place of a dimension, the first elsewhere."""
    whole, part = node.args[:2]
    dim = axis(argument(node, "dim"), len(at))
    place = context.integer(argument(node, "index"))
    if place.op == "const" and place.value < 0:
        place = M.add(place, context.shape(whole)[dim])
    inner = context.read(part, (*at[:dim], *at[dim + 1 :]))
    return M.where(M.eq(at[dim], place), inner, context.read(whole, at))


@rule(MOVEMENT, "diagonal_scatter.default")
def diagonal_scatter(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """The second operand on a diagonal of two dimensions, the first elsewhere."""
    on_it, element = _on_diagonal(context, node, node.args[1], at)
    return M.where(on_it, element, context.read(node.args[0], at))


@rule(MOVEMENT, "diag_embed.default")
def diag_embed(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """A vector on a diagonal of two dimensions, zero elsewhere."""
    on_it, element = _on_diagonal(context, node, node.args[0], at)
    return M.where(on_it, element, E.FALSE if element.kind == "bool" else E.ZERO)


def _on_diagonal(context: Meaning, node: fx.Node, vector: Any, at: Indices) -> tuple[Expr, Expr]:
    """Whether a place is on the diagonal, and the element of the vector there."""
    rows, columns, offset = diagonal_of(node, len(at))
    others = tuple(place for dim, place in enumerate(at) if dim not in (rows, columns))
    place = M.sub(at[rows], E.const(max(0, -offset)))
    on_it = M.eq(at[columns], M.add(at[rows], E.const(offset)))
    return on_it, context.read(vector, (*others, place))


@rule(MOVEMENT, "cat.default", "concat.default")
def cat(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    tensors: Any = node.args[0]
    dim = axis(argument(node, "dim"), len(at))
    pieces: list[tuple[Expr, Expr]] = []
    first: Expr = E.ZERO
    for tensor in tensors:
        shape = context.shape(tensor)
        if len(shape) == 1 and E.is_const(shape[0], 0):
            continue
        place = M.sub(at[dim], first)
        first = M.add(first, shape[dim])
        pieces.append((M.lt(at[dim], first), context.read(tensor, (*at[:dim], place, *at[dim + 1 :]))))
    value = pieces[-1][1]
    for condition, piece in reversed(pieces[:-1]):
        value = M.where(condition, piece, value)
    return value


@rule(MOVEMENT, "stack.default")
def stack(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    tensors: Any = node.args[0]
    dim = axis(argument(node, "dim"), len(at))
    rest = (*at[:dim], *at[dim + 1 :])
    value = context.read(tensors[-1], rest)
    for place in range(len(tensors) - 2, -1, -1):
        value = M.where(M.eq(at[dim], E.const(place)), context.read(tensors[place], rest), value)
    return value


@rule(MOVEMENT, "constant_pad_nd.default", "pad.default")
def pad(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    if str(node.target) == "aten.pad.default" and argument(node, "mode") != "constant":
        raise Unliftable("padding other than by a constant")
    value = argument(node, "value") or 0
    widths: Any = node.args[1]
    shape = context.shape(node.args[0])
    places, inside = list(at), E.TRUE
    for pair in range(len(widths) // 2):
        dim = len(at) - 1 - pair
        places[dim] = M.sub(at[dim], context.integer(widths[2 * pair]))
        inside = M.and_(inside, M.le(E.ZERO, places[dim]), M.lt(places[dim], shape[dim]))
    return M.where(inside, context.read(node.args[0], tuple(places)), E.const(value))


Entry = tuple[Expr, Indices]
"""The condition that an entry of an index names the wanted place, and where in the index it stands."""


@rule(Category.MOVEMENT, "index_fill.int_Scalar", "index_fill.int_Tensor")
def index_fill(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """A number at listed places of a dimension, the operand elsewhere."""
    dim = axis(argument(node, "dim"), len(at))
    value, number = context.read(node.args[0], at), context.scalar(argument(node, "value"))
    if number.op == "const":
        number = E.const({"bool": bool, "int": int, "float": float}[value.kind](number.value))
    elif number.kind != value.kind:
        raise Unliftable("a fill of another kind than the result")
    conditions = [condition for condition, _ in _entries(context, node, {dim: node.args[2]}, at)]
    return M.where(M.or_(*conditions), number, value)


@rule(Category.MOVEMENT, "index_put.default")
def index_put(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """Values written or added at computed places. Of several written at one place, the last one stays."""
    listed: Any = node.args[1]
    picks = {d: pick for d, pick in enumerate(listed) if pick is not None}
    first, covered = first_picked(list(picks)), set(picks)
    triangle, entries = _triangle(context, picks, at), list[Entry]()
    if triangle is not None and not argument(node, "accumulate"):
        entries = [(triangle, (E.var("listed"),))]
    elif not any(is_mask(pick) for pick in picks.values()):
        try:
            entries = _entries(context, node, picks, at)
        except Unliftable:
            entries = [(_listed(context, node, picks, at), (E.var("listed"),))]
    elif len(picks) > 1:
        raise Unliftable("a mask beside another index")
    else:
        covered = set(range(first, first + len(context.shape(picks[first]))))
        mask = context.read(picks[first], tuple(at[d] for d in sorted(covered)))
        entries = [(mask, (E.var("marked"),))]
    others = tuple(place for d, place in enumerate(at) if d not in covered)
    adds, result = argument(node, "accumulate"), context.read(node.args[0], at)
    if adds and result.kind == "bool":
        raise Unliftable("truth values that are added up")
    for condition, entry in entries:
        value = context.read_broadcast(node.args[2], (*others[:first], *entry, *others[first:]))
        if not value.free <= result.free.union(condition.free):
            raise Unliftable("a value for each place that a mask or a list of indices marks")
        if adds:
            result = M.add(result, M.where(condition, value, E.ZERO))
        else:
            result = M.where(condition, value, result)
    return result


def _triangle(context: Meaning, picks: dict[int, Any], at: Indices) -> Expr | None:
    """The condition that a place is in a triangle, where two indices are its rows and its columns."""
    parts = {part[1]: (at[d], part[0]) for d, pick in picks.items() if (part := _part(pick)) is not None}
    if len(picks) != 2 or parts.keys() != {0, 1} or parts[0][1] is not parts[1][1]:
        return None
    (row, source), (column, _) = parts[0], parts[1]
    kind = str(source.target)
    if kind not in ("aten.triu_indices.default", "aten.tril_indices.default"):
        return None
    rows, columns = (context.scalar(argument(source, name)) for name in ("row", "col"))
    first = M.add(row, context.scalar(argument(source, "offset")))
    ordered = M.le(first, column) if kind.startswith("aten.triu") else M.le(column, first)
    return M.and_(ordered, M.lt(row, rows), M.lt(column, columns))


def _part(pick: Any) -> tuple[fx.Node, int] | None:
    """The tensor that an index is a part of along its first dimension, and which part."""
    if isinstance(pick, fx.Node) and str(pick.target) == "aten.select.int" and not pick.args[1]:
        return cast(fx.Node, pick.args[0]), cast(int, pick.args[2])
    if isinstance(pick, fx.Node) and is_part(pick):
        unbound = cast(fx.Node, pick.args[0])
        if str(unbound.target) == "aten.unbind.int" and not argument(unbound, "dim"):
            return cast(fx.Node, unbound.args[0]), cast(int, pick.args[1])
    return None


def _listed(context: Meaning, node: fx.Node, picks: dict[int, Any], at: Indices) -> Expr:
    """The condition that known index tensors name the place `at`; Unliftable without one pattern."""
    many = Unliftable("an index of many places that is no range")
    known = [context.known(pick) for pick in picks.values()]
    lists = [x.cpu() for x in known if x is not None and x.numel() and int(x.min()) >= 0]
    if len(lists) < len(picks) or argument(node, "accumulate"):
        raise many
    extents = [
        extent.value if extent.op == "const" else int(x.max()) + 1
        for extent, x in zip((context.shape(node)[d] for d in picks), lists, strict=True)
    ]
    named = torch.zeros(extents, dtype=torch.bool)
    named[tuple(lists)] = True
    condition = constants.describe(named, tuple(at[d] for d in picks))
    if condition is None:
        raise many
    return M.and_(condition, *(M.lt(at[d], E.const(x)) for d, x in zip(picks, extents, strict=True)))


def _entries(context: Meaning, node: fx.Node, picks: dict[int, Any], at: Indices) -> list[Entry]:
    """The entries of index tensors, by dimension, that may name `at`; Unliftable where they are many."""
    shapes = [context.shape(pick) for pick in picks.values()]
    extents = [E.ONE] * max(map(len, shapes))
    for shape in shapes:  # they broadcast together
        for d, extent in enumerate(shape, len(extents) - len(shape)):
            extents[d] = extents[d] if E.is_const(extent, 1) else extent
    entry = tuple(E.ZERO if E.is_const(extent, 1) else context.fresh(extent) for extent in extents)
    unknown, compared, found = [v for v in entry if v is not E.ZERO], list(picks), E.TRUE

    def places(d: int, entry: Indices) -> Indices:
        place = context.elementwise(context.read_broadcast(picks[d], entry))
        return _counted_from_the_end(place, context.shape(node)[d])

    for d in list(picks) * len(picks):  # what one index determines another may need
        solved = _solve(places(d, entry), unknown, at[d]) if d in compared else None
        if solved is not None:
            variable, value, exists = solved
            entry = tuple(value if place is variable else place for place in entry)
            found = M.and_(found, exists)
            unknown.remove(variable)
            compared.remove(d)
    lengths = [v.args[0].value for v in unknown if v.args[0].op == "const"]
    if len(lengths) < len(unknown) or math.prod(lengths) > budgets.LISTED_PLACES:
        raise Unliftable("an index of many places that is no range")
    entries = []
    for numbers in itertools.product(*map(range, lengths)):
        values = dict(zip(unknown, map(E.const, numbers), strict=True))
        one = tuple(values.get(place, place) for place in entry)
        named = [M.or_(*(M.eq(at[d], place) for place in places(d, one))) for d in compared]
        entries.append((M.and_(found, *named), one))
    return entries


def _counted_from_the_end(place: Expr, extent: Expr) -> Indices:
    """What a computed index may mean: negative ones count from the end."""
    if place.kind != "int":
        raise Unliftable("an index that is no integer")
    negative = M.lt(place, E.ZERO)
    if negative.op == "const":
        return (M.add(place, extent) if negative.value else place,)
    return place, M.add(place, extent)


def _solve(places: Indices, unknown: list[Expr], at: Expr) -> tuple[Expr, Expr, Expr] | None:
    """The one variable in which the index is linear, its value where the index is `at`, and when it is."""
    place, *others = places
    variables = [v for v in unknown if v in place.free]
    if others or len(variables) != 1:
        return None
    (variable,) = variables
    start, second = (M.substitute(place, {variable: E.const(n)}) for n in (0, 1))
    step = M.sub(second, start)
    if step.op != "const" or step is E.ZERO or place is not M.add(start, M.mul(step, variable)):
        return None
    size, distance = E.const(abs(step.value)), M.sub(at, start)
    distance = distance if step.value > 0 else M.neg(distance)
    value = M.floordiv(distance, size)
    inside = M.and_(M.le(E.ZERO, distance), M.lt(value, variable.args[0]))
    return variable, value, M.and_(inside, M.eq(M.mod(distance, size), E.ZERO))
