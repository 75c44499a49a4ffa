"""Rules of ops whose elements are those of one tensor, moved: views, slices, repeats, gathers."""

from typing import Any

import torch
from torch import fx

from attngraph.ir.graph.call import argument
from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import M, ranges, size_expression
from attngraph.meaning.algebra.digits import divides
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Category, Indices, Unliftable, UnliftableBecause, axis, part_rule, rule

MOVEMENT = Category.MOVEMENT
END = (1 << 63) - 1


@rule(
    MOVEMENT, "clone.default", "contiguous.default", "alias.default",
    "lift_fresh.default", "lift_fresh_copy.default",
)  # fmt: skip
def same(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """`detach` is not among these: where gradients flow it is not the identity, and where they do
    not, canonicalisation has removed it."""
    return context.read(node.args[0], at)


@rule(MOVEMENT, "_to_copy.default", "to.dtype", "to.dtype_layout", "to.device", "to.other", "type_as.default")
def cast(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """A change of dtype: between floating types the real number stays the same, unless it is a mask's
    large number that the new type does not have."""
    value = context.narrowed(context.read(node.args[0], at), node.meta["val"].dtype)
    target = context.kind(node)
    if target == "bool":
        return value if value.kind == "bool" else M.ne(value, E.ZERO)
    if target == "int" and value.kind not in ("int", "bool"):
        return M.function("int", context.exactly(node.args[0], at))
    return M.number(value)


@rule(
    MOVEMENT, "view.default", "reshape.default", "_unsafe_view.default", "flatten.using_ints",
    "unflatten.int", "view_as.default", "reshape_as.default", "squeeze.default", "squeeze.dim",
    "squeeze.dims", "unsqueeze.default",
)  # fmt: skip
def view(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    viewed: Any = node.args[0]
    try:
        return context.read(viewed, reindex(context.shape(node), context.shape(viewed), at))
    except Unliftable:
        # Sizes as traced: if conditions make one of them a number, the others are still formulas of it.
        traced = (*viewed.meta["val"].shape, *node.meta["val"].shape)
        sizes = (n for extent in traced for n in E.walk(size_expression(extent)))
        divided = {n.value for d in sizes if d.op in ("floordiv", "mod") for n in E.walk(d) if n.op == "size"}
        context.obstacles |= divided
        raise


def reindex(shape: Indices, source: Indices, at: Indices) -> Indices:
    """Where element `at` of a tensor of `shape` lies in the same elements of shape `source`. Both
    shapes are cut into the shortest groups of equal product, so that only digits of one group mix."""
    found: list[Expr] = []
    i = j = 0
    while i < len(shape) or j < len(source):
        start_i, start_j = i, j
        new: Expr = E.ONE
        old: Expr = E.ONE
        while new is not old or (i == start_i and j == start_j):
            grow_new = _divides(new, old) and i < len(shape)
            if new is old:
                grow_new = i < len(shape)
            if grow_new or j >= len(source):
                if i >= len(shape):
                    raise Unliftable("a view between shapes whose sizes are not known to match")
                new, i = M.mul(new, shape[i]), i + 1
            else:
                old, j = M.mul(old, source[j]), j + 1
            if new is old:
                break
        found += _digits(_flat(shape[start_i:i], at[start_i:i]), source[start_j:j])
    return tuple(found)


def _divides(a: Expr, b: Expr) -> bool:
    """Whether a divides b, or is the smaller number where both are numbers."""
    return bool(a.value <= b.value) if a.op == b.op == "const" else divides(a, b)


def _flat(shape: Indices, at: Indices) -> Expr:
    flat: Expr = E.ZERO
    for extent, place in zip(shape, at, strict=True):
        flat = M.add(M.mul(flat, extent), place)
    return flat


def _digits(flat: Expr, shape: Indices) -> list[Expr]:
    """The index `flat` (in range) of a tensor's elements in order, as one index per dimension."""
    digits: list[Expr] = []
    leading = next((d for d, extent in enumerate(shape) if not E.is_const(extent, 1)), len(shape))
    for d in range(len(shape) - 1, -1, -1):
        if E.is_const(shape[d], 1):
            digits.append(E.ZERO)
        elif d == leading:
            digits.append(flat)  # in range, so it needs no remainder
        else:
            digits.append(M.mod(flat, shape[d]))
            flat = M.floordiv(flat, shape[d])
    return digits[::-1]


@rule(
    MOVEMENT, "transpose.int", "permute.default", "t.default", "numpy_T.default", "mT.default",
    "swapaxes.default", "swapdims.default", "movedim.int", "movedim.intlist", "moveaxis.int",
    "adjoint.default",
)  # fmt: skip
def permute(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    rank = len(at)
    name = str(node.target).split(".")[1]
    order = list(range(rank))
    if name in ("transpose", "swapaxes", "swapdims"):
        a, b = (axis(int(d), rank) for d in node.args[1:3])  # type: ignore[arg-type]
        order[a], order[b] = b, a
    elif name == "permute":
        order = [axis(int(d), rank) for d in node.args[1]]  # type: ignore[union-attr, arg-type]
    elif name in ("movedim", "moveaxis"):
        dims: list[Any] = [a if isinstance(a, (list, tuple)) else [a] for a in node.args[1:3]]
        source, target = ([axis(d, rank) for d in group] for group in dims)
        rest = [d for d in range(rank) if d not in source]
        for place, dim in sorted(zip(target, source, strict=True)):
            rest.insert(place, dim)
        order = rest
    elif name == "numpy_T":
        order = order[::-1]
    else:
        order[-2:] = order[-2:][::-1]
    places = {dim: at[i] for i, dim in enumerate(order)}
    return context.read(node.args[0], tuple(places[d] for d in range(rank)))


@rule(MOVEMENT, "expand.default", "expand_as.default", "broadcast_to.default")
def expand(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    return context.read_broadcast(node.args[0], at)


def slice_start(context: Meaning, node: fx.Node, extent: Expr) -> Expr:
    start = argument(node, "start")
    first = context.integer(0 if start is None else start)
    if first.op == "const" and first.value < 0:
        first = M.add(first, extent)
        if extent.op == "const":
            first = E.const(max(first.value, 0))
        elif not ranges.is_never_negative(ranges.polynomial(first)):
            raise Unliftable("a slice from the end that may start before the beginning")
    elif first.op != "const" and not all(
        ranges.is_never_negative(ranges.polynomial(n)) for n in (M.sub(extent, first), first)
    ):
        raise Unliftable("a slice whose start may be out of range")
    return first


@rule(MOVEMENT, "slice.Tensor", "narrow.default")
def slice_(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    dim = axis(argument(node, "dim"), len(at))
    extent = context.shape(node.args[0])[dim]
    if "narrow" in str(node.target):
        place = M.add(at[dim], slice_start(context, node, extent))
        return context.read(node.args[0], (*at[:dim], place, *at[dim + 1 :]))
    end, step = argument(node, "end"), argument(node, "step")
    if step == 1 and (end is None or end == END):
        first = M.sub(extent, context.shape(node)[dim])  # wherever it starts, it goes on to the end
    else:
        first = slice_start(context, node, extent)
    place = M.add(M.mul(at[dim], context.integer(step)), first)
    return context.read(node.args[0], (*at[:dim], place, *at[dim + 1 :]))


def diagonal_of(node: fx.Node, rank: int) -> tuple[int, int, int]:
    """The two dimensions of a diagonal, and its offset."""
    offset, rows, columns = (argument(node, name) for name in ("offset", "dim1", "dim2"))
    return axis(rows, rank), axis(columns, rank), int(offset)


@rule(MOVEMENT, "diagonal.default")
def diagonal(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    rows, columns, offset = diagonal_of(node, len(at) + 1)
    places = list(at[:-1])
    for dim, start in sorted(((rows, max(0, -offset)), (columns, max(0, offset)))):
        places.insert(dim, M.add(at[-1], E.const(start)))
    return context.read(node.args[0], tuple(places))


@rule(MOVEMENT, "select.int")
def select(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    shape = context.shape(node.args[0])
    dim = axis(argument(node, "dim"), len(shape))
    place = context.integer(argument(node, "index"))
    if place.op == "const" and place.value < 0:
        place = M.add(place, shape[dim])
    return context.read(node.args[0], (*at[:dim], place, *at[dim:]))


@part_rule(
    MOVEMENT, "split.Tensor", "split.sizes", "split_with_sizes.default", "chunk.default",
    "unbind.int", "unsafe_split.Tensor", "tensor_split.sections", "unsafe_chunk.default",
)  # fmt: skip
def split(context: Meaning, node: fx.Node, part: int, at: Indices) -> Expr:
    name = str(node.target).split(".")[1]
    dim = axis(argument(node, "dim"), len(context.shape(node.args[0])))
    if name == "unbind":
        return context.read(node.args[0], (*at[:dim], E.const(part), *at[dim:]))
    first: Expr = E.ZERO
    for before in range(part):
        first = M.add(first, context.part_shape(node, before)[dim])
    return context.read(node.args[0], (*at[:dim], M.add(at[dim], first), *at[dim + 1 :]))


@rule(MOVEMENT, "repeat.default", "tile.default")
def repeat(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    source = context.shape(node.args[0])
    new = len(at) - len(source)
    times: Any = [1] * (len(at) - len(node.args[1])) + list(node.args[1])  # type: ignore[arg-type]
    places = [
        E.ZERO if E.is_const(extent, 1) else place if count == 1 else M.mod(place, extent)
        for extent, place, count in zip(source, at[new:], times[new:], strict=True)
    ]
    return context.read(node.args[0], tuple(places))


@rule(MOVEMENT, "repeat_interleave.self_int")
def repeat_interleave(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    dim = argument(node, "dim")
    times = context.integer(node.args[1])
    source = context.shape(node.args[0])
    if dim is None:
        flat = M.floordiv(at[0], times)
        return context.read(node.args[0], tuple(_digits(flat, source)))
    dim = axis(dim, len(at))
    return context.read(node.args[0], (*at[:dim], M.floordiv(at[dim], times), *at[dim + 1 :]))


@rule(MOVEMENT, "flip.default")
def flip(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    shape = context.shape(node.args[0])
    dims = {axis(d, len(at)) for d in node.args[1]}  # type: ignore[union-attr, arg-type]
    places = tuple(M.sub(M.sub(shape[d], E.ONE), place) if d in dims else place for d, place in enumerate(at))
    return context.read(node.args[0], places)


@rule(MOVEMENT, "roll.default")
def roll(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    shape, dims = context.shape(node), argument(node, "dims")
    if len(dims) != len(node.args[1]):  # type: ignore[arg-type]
        raise Unliftable("a roll of all dimensions as one")
    places = [(at, E.TRUE)]
    for shift, dim in zip(node.args[1], dims, strict=True):  # type: ignore[arg-type]
        by, d, rolled = context.integer(shift), axis(dim, len(at)), []
        if by.op != "const" or not ranges.is_at_most(E.const(abs(int(by.value))), shape[d]):
            raise Unliftable("a roll by more than there may be places")
        for there, condition in places:
            inside = M.sub(there[d], by)
            wraps = M.lt(inside, E.ZERO) if by.value >= 0 else M.le(shape[d], inside)
            around = M.add(inside, shape[d] if by.value >= 0 else M.neg(shape[d]))
            rolled += [((*there[:d], index, *there[d + 1 :]), M.and_(condition, when))
                       for index, when in ((inside, M.not_(wraps)), (around, wraps))]  # fmt: skip
        places = rolled
    value = context.read(node.args[0], places[0][0])
    for there, condition in places[1:]:
        value = M.where(condition, context.read(node.args[0], there), value)
    return value


@rule(MOVEMENT, "index.Tensor")
def index(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """Reads at computed places. The index tensors broadcast together and stand where the first one
    stood (in front if they are not adjacent)."""
    source = context.shape(node.args[0])
    picks: list[Any] = list(node.args[1])  # type: ignore[arg-type]
    picks += [None] * (len(source) - len(picks))
    used = [d for d, p in enumerate(picks) if p is not None]
    if any(is_mask(picks[d]) for d in used):
        raise UnliftableBecause("indexing with a boolean mask has a data-dependent size")
    rank, start = max(len(context.shape(picks[d])) for d in used), first_picked(used)
    picked, others = at[start : start + rank], iter((*at[:start], *at[start + rank :]))
    places = []
    for d, pick in enumerate(picks):
        if pick is None:
            places.append(next(others))
        else:
            own = picked[rank - len(context.shape(pick)) :]
            places.append(wrapped(listed_place(context, pick, own), source[d]))
    return context.read(node.args[0], tuple(places))


def listed_place(context: Meaning, places: fx.Node, at: Indices) -> Expr:
    """An element of a list of places: as a formula of where it stands in the list, if no data decide it."""
    known = context.index_expression(places, at)
    return context.read(places, at) if known is None else known


def first_picked(dims: list[int]) -> int:
    """The dimension at which what index tensors of these dimensions pick begins."""
    return dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0


def is_mask(pick: fx.Node) -> bool:
    """Whether an index tensor is a boolean mask rather than a list of positions."""
    return pick.meta["val"].dtype in (torch.bool, torch.uint8)


def wrapped(place: Expr, extent: Expr) -> Expr:
    """A computed index; negative ones count from the end. An index that is read from data may be either."""
    if place.kind != "int":
        raise Unliftable("an index that is no integer")
    if ranges.is_never_negative(ranges.polynomial(place)):
        return place
    return M.where(M.lt(place, E.ZERO), M.add(place, extent), place)


@rule(MOVEMENT, "index_select.default")
def index_select(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    dim = axis(argument(node, "dim"), len(at))
    places: Any = node.args[2]
    place = listed_place(context, places, at[dim : dim + 1] if context.shape(places) else ())
    return context.read(node.args[0], (*at[:dim], place, *at[dim + 1 :]))


@rule(MOVEMENT, "embedding.default")
def embedding(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    return context.read(node.args[0], (context.read(node.args[1], at[:-1]), at[-1]))


@rule(MOVEMENT, "gather.default")
def gather(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    dim = axis(argument(node, "dim"), len(at))
    place = listed_place(context, node.args[2], at)  # type: ignore[arg-type]
    return context.read(node.args[0], (*at[:dim], place, *at[dim + 1 :]))


@rule(MOVEMENT, "diff.default")
def diff(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """Neighbouring differences, with one element put in front if asked."""
    dim = axis(argument(node, "dim"), len(at))
    before, after = argument(node, "prepend"), argument(node, "append")
    if argument(node, "n") != 1 or after is not None:
        raise Unliftable("differences of higher order")

    def element(place: Expr) -> Expr:
        if before is None:
            return context.read(node.args[0], (*at[:dim], place, *at[dim + 1 :]))
        width = context.shape(before)[dim]
        inner = context.read(node.args[0], (*at[:dim], M.sub(place, width), *at[dim + 1 :]))
        outer = context.read(before, (*at[:dim], place, *at[dim + 1 :]))
        return M.where(M.lt(place, width), outer, inner)

    after_this, this = element(M.add(at[dim], E.ONE)), element(at[dim])
    if context.kind(node) == "bool":
        return M.where(after_this, M.not_(this), this)
    return M.sub(after_this, this)
