"""Which dimensions of a value count rows, and what a row reads of the rows before: windows of tokens.

A row is computed by itself, with the same weights as the others. In a decoder's graph a row is a token, and
all tokens are one sequence: the one dimension whose extent is no number. In a graph of whole sequences a row
is what a product with a weight leaves apart: `[B, T, F] @ [F, G]` has `B * T` of them, whether sizes are
known or not, and `[B * T, F]` has the same. A program sees such values as `[B * T, F]`, which is a view, or a
copy where memory lies otherwise.

A decoder's step runs a causal convolution on all rows' tokens in order, with the few before them
(`attngraph::with_earlier`), and picks the new tokens' results. An element of such a result reads the longer
sequence at the token's place and a few places before. `attngraph::last_tokens` gives each token these as
values of its own, so with them the result is computed from each token alone.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from attngraph.ir.graph import ProgramGraph, argument
from attngraph.ir.language import E, Expr
from attngraph.ir.language.token_program import TOKEN
from attngraph.ir.ops.history import last_tokens, with_earlier
from attngraph.ir.walk import reached
from attngraph.meaning import M, Meaning, Unliftable
from attngraph.meaning.rule import UnliftableBecause
from attngraph.passes.build import Builder, NoSize

aten = torch.ops.aten
MOST_TERMS = 16
"""A sum over at most so many places of a window is written out."""
Shape = Callable[[fx.Node], tuple[Expr, ...] | None]


class Place(NamedTuple):
    """The dimensions that count rows, their extents, and how many rows there are."""

    dims: tuple[int, ...]
    extents: tuple[Expr, ...]
    total: Expr

    def flat(self, at: Sequence[Expr]) -> tuple[Expr, ...]:
        """The indices of an element as a program has them, with one for the row: where it is, or first."""
        if len(self.dims) == 1:
            return tuple(TOKEN if d in self.dims else a for d, a in enumerate(at))
        return TOKEN, *(a for d, a in enumerate(at) if d not in self.dims)

    def same_row(self, other: "Place", rows: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """The indices of a row in these dimensions, given those in the dimensions of another value; () if it
        has other rows."""
        if self.extents == other.extents:
            return rows
        if self.total is not other.total:
            return ()
        row = rows[0]
        for extent, index in zip(other.extents[1:], rows[1:], strict=True):
            row = M.add(M.mul(row, extent), index)
        found: list[Expr] = []
        for extent in self.extents[:0:-1]:
            found.insert(0, M.mod(row, extent))
            row = M.floordiv(row, extent)
        return row, *found


class Rows:
    """The rows of a graph's values.

    Args:
        graph: gets copies of values that several rows share, each as many rows as there are; those that stay
            unused are removed with the graph's other dead nodes.
        shape: the extents of a value that a program can have; None for another.
        named: the name that a size has in shapes.
        multiplies: whether a node is a sum of products itself.
        of_any_number: whether in a decoder's graph there may be another number of rows than of tokens, as
            experts have.
    """

    def __init__(
        self, graph: ProgramGraph, shape: Shape, named: Callable[[Expr], Expr],
        multiplies: Callable[[fx.Node], bool], of_any_number: bool = False,
    ) -> None:  # fmt: skip
        self.graph, self.shape, self.named, self._of_any_number = graph, shape, named, of_any_number
        self._decodes = graph.state is not None
        self._weights = {n for n, given in graph.given().items() if given.kind != "argument"}
        self._kinds = [] if self._decodes else list(self._of_products(multiplies))
        self._spread: dict[tuple[fx.Node, tuple[int | None, ...], Expr], fx.Node] = {}
        self._flat: dict[tuple[fx.Node, Place], fx.Node] = {}

    def of(self, node: fx.Node) -> Place | None:
        """The dimensions of a value that count rows; None unless all other extents are numbers."""
        shape = self.shape(node) or ()
        if self._decodes:
            open_dims = [(d, n) for d, n in enumerate(shape) if n.op != "const"]
            one = len(open_dims) == 1 and (self._of_any_number or open_dims[0][1].op == "size")
            return self._place((open_dims[0][0],), (open_dims[0][1],)) if one else None
        if node in self._weights:
            return None
        for extents in self._kinds:
            dims = _found(extents, shape)
            if dims and all(n.op == "const" for d, n in enumerate(shape) if d not in dims):
                return self._place(dims, extents)
        return None

    def is_longer(self, node: fx.Node) -> bool:
        """Whether a value has other dimensions than those of a step's tokens."""
        place = self.of(node)
        return place is None or place.total.op != "size"

    def _place(self, dims: tuple[int, ...], extents: tuple[Expr, ...]) -> Place:
        return Place(dims, extents, self.named(functools.reduce(M.mul, extents)))

    def _of_products(self, multiplies: Callable[[fx.Node], bool]) -> list[tuple[Expr, ...]]:
        """The extents of what products with matrices of weights leave apart: those in several dimensions
        first."""
        found: collections.Counter[tuple[Expr, ...]] = collections.Counter()
        known = set(self._weights)  # and what follows from them alone
        for node in self.graph.graph.nodes:
            given, shape = node.all_input_nodes, self.shape(node)
            ranks = [getattr(n.meta.get("val"), "ndim", 0) for n in known.intersection(given)]
            if given and known.issuperset(given):
                known.add(node)
            elif shape and multiplies(node) and 2 in ranks:
                found[tuple(n for n in shape[:-1] if not E.is_const(n, 1)) or shape[:1]] += 1
        kinds = sorted(filter(None, found), key=lambda extents: (-len(extents), -found[extents]))
        return list(dict.fromkeys(itertools.chain(kinds, ((self._place((), kind).total,) for kind in kinds))))

    def spread(self, node: fx.Node, at: tuple[Expr, ...], place: Place, rows: tuple[Expr, ...]) -> fx.Node:
        """A value that some rows share (the angles of a place, say), repeated for each, as `[rows, ...]`.
        Raises `Unliftable`: it is read at another place than the row's."""
        numbers = tuple(rows.index(a) if a in rows else None for a in at)
        used = [n for n in numbers if n is not None]
        shape = self.shape(node)
        if shape is None:
            raise Unliftable("of values that a program does not have")
        inner = [(a, n) for a, n, number in zip(at, shape, numbers, strict=True) if number is None]
        many = any(n is not place.extents[r] for r, n in zip(numbers, shape, strict=True) if r is not None)
        if many or len(set(used)) < len(used) or any(n.op != "const" or set(rows) & a.free for a, n in inner):
            raise Unliftable("of other rows")
        key = node, numbers, place.total
        if key not in self._spread:
            self._spread[key] = self._repeated(node, numbers, place)
        return self._spread[key]

    def _repeated(self, node: fx.Node, numbers: Sequence[int | None], place: Place) -> fx.Node:
        first = next(n for n in self.graph.graph.nodes if n.op != "placeholder")
        builder = Builder(self.graph, node.next if node.op != "placeholder" else first)
        inner = [d for d, number in enumerate(numbers) if number is None]
        used = dict(sorted((number, d) for d, number in enumerate(numbers) if number is not None))
        try:
            sizes = [builder.size(extent) for extent in place.extents]
        except NoSize as problem:
            raise Unliftable("of a number that is not known where it is computed") from problem
        extents = [int(node.meta["val"].shape[d]) for d in inner]

        def repeated(x: Any, sizes: Any) -> Any:
            x = x.permute([*used.values(), *inner])
            for number in range(len(sizes)):
                x = x if number in used else x.unsqueeze(number)
            return x.expand([*sizes, *extents]).reshape([-1, *extents])

        return builder.trace(repeated, node, sizes)  # type: ignore[no-any-return]

    # --- as a program has them ---

    def flattened(self, node: fx.Node, place: Place | None, builder: Builder) -> fx.Node:
        """A value with one dimension for its rows."""
        if place is None or len(place.dims) == 1:
            return node
        key = node, place
        if key not in self._flat:
            shape = node.meta["val"].shape
            inner = [d for d in range(len(shape)) if d not in place.dims]
            moved = builder.permuted(node, [*place.dims, *inner])
            self._flat[key] = builder.call(aten.reshape.default, moved, [-1, *(int(shape[d]) for d in inner)])
        return self._flat[key]

    def unflattened(self, made: fx.Node, node: fx.Node, builder: Builder) -> fx.Node:
        """What takes a node's place, of a result that has its rows in one dimension."""
        place = self.of(node)
        assert place is not None
        if len(place.dims) == 1:
            return made
        shape = node.meta["val"].shape
        inner = [d for d in range(len(shape)) if d not in place.dims]
        sizes = [builder.size(extent) for extent in place.extents]
        whole = builder.call(aten.reshape.default, made, [*sizes, *(int(shape[d]) for d in inner)])
        order = [*place.dims, *inner]
        whole = builder.permuted(whole, [order.index(d) for d in range(len(shape))])
        self._flat[whole, place] = made
        return whole


def _found(extents: Sequence[Expr], shape: Sequence[Expr]) -> tuple[int, ...]:
    """The first dimensions with these extents, in their order; () if there are none."""
    dims, start = [], 0
    for extent in extents:
        place = next((d for d in range(start, len(shape)) if shape[d] is extent), None)
        if place is None:
            return ()
        dims.append(place)
        start = place + 1
    return tuple(dims)


class Windows:
    """The windows of a graph.

    Args:
        graph: gets an `attngraph::last_tokens` beside each `attngraph::with_earlier`; those that stay unused
            are removed with the graph's other dead nodes.
    """

    def __init__(self, graph: ProgramGraph) -> None:
        self._own: dict[fx.Node, fx.Node] = {}
        for node in graph.graph.find_nodes(op="call_function", target=with_earlier):
            builder = Builder(graph, node.next)
            self._own[node] = builder.call(last_tokens, *node.args)
        self._after = _computed_from(self._own)
        places = _computed_from([argument(n, "place") for n in self._own])
        self._places = {n for n in places if getattr(n.meta.get("val"), "dtype", None) == torch.int64}

    def __bool__(self) -> bool:
        return bool(self._own)

    def rewritten(
        self, meaning: Meaning, value: Expr, token: Expr, is_longer: Callable[[fx.Node], bool]
    ) -> Expr:
        """A formula that reads what is computed from a longer sequence, in terms of the token's windows.

        Args:
            is_longer: whether a value has other dimensions than those of the step's tokens.

        Raises:
            Unliftable: it reads other places, or all of them.
        """

        def is_between(read: Expr) -> bool:
            return read.value in self._places or (read.value in self._after and is_longer(read.value))

        if not any(read.value in self._own or is_between(read) for read in E.reads(value)):
            return value
        value = meaning.lift(value, is_between)
        for node, own in self._own.items():
            if any(read.value is node for read in E.reads(value)):
                value = self._of_one(meaning, value, token, node, own)
        return value

    def _of_one(self, meaning: Meaning, value: Expr, token: Expr, node: fx.Node, own: fx.Node) -> Expr:
        back, dim, row_dim = (int(argument(node, name)) for name in ("back", "dim", "row_dim"))
        place = E.var("place", _with_extents(M.sub(meaning.shape(node)[dim], E.const(back))))
        at_token = E.read(argument(node, "place"), (token,), "int")

        def leaf(found: Expr, args: tuple[Expr, ...]) -> Expr:
            if found is at_token:
                return M.add(place, E.const(back))
            if found.op == "size":
                return _with_extents(found)
            extent = found.args[0].args[0] if found.op == "sum" else found
            if found.op == "sum" and extent.op == "const" and extent.value <= MOST_TERMS:
                variable, body = args
                if any(variable in r.args[dim].free for r in E.reads(body) if r.value is node):
                    # It counts the places of a window.
                    terms = [M.substitute(body, {variable: E.const(n)}) for n in range(int(extent.value))]
                    return E.make("add", tuple(terms), None, "float") if len(terms) > 1 else terms[0]
            return M.construct(found, args)

        def window(found: Expr, args: tuple[Expr, ...]) -> Expr:
            if found.op == "read" and found.value is node:
                steps = M.sub(args[dim], place)
                if steps.op != "const" or not 0 <= steps.value <= back or args[row_dim] is not E.ZERO:
                    raise UnliftableBecause("it reads places that are not in its window")
                inner = [a for d, a in enumerate(args) if d not in (row_dim, dim)]
                return E.read(own, (token, steps, *inner), "float")
            return M.construct(found, args)

        return E.rebuild(E.rebuild(value, leaf), window)


def _computed_from(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    return set(reached((user for node in nodes for user in node.users), lambda node: node.users))


def _with_extents(value: Expr) -> Expr:
    """A size under a name for extents. All sizes here are extents of a step's inputs, so they are at least 1,
    which is not known of sizes that torch counts as data (`meaning/algebra/ranges.py`)."""
    sizes = {n for n in E.walk(value) if n.op == "size"}
    return M.substitute(value, {n: E.size(f"extent of {n.value}") for n in sizes})
