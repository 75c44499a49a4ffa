"""Part of a value, computed from the parts of its operands that it needs: how a large claim is checked.

A box lists, for each dimension of a value, the indices that are wanted. Which elements of an operand that
takes follows from the op's element rule, so some queries of a fixed 4,096 need no score of the others. The op
itself is run on these parts, as PyTorch defines it; where it cannot be, it is computed whole and the box is
taken from the result. So a part has the values of the whole: only memory and time differ.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir import budgets
from attngraph.ir.graph.program_graph import is_size
from attngraph.ir.kept import kept
from attngraph.ir.language import E, Expr, S
from attngraph.ir.ops import nodes
from attngraph.ir.walk import computed, operands_first
from attngraph.meaning.algebra.digits import numbers
from attngraph.meaning.check.oracle import Oracle, drop
from attngraph.meaning.check.region import bytes_in_float64, scores_of, shape_at
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Category, Unliftable, is_part, tried

Box = tuple[tuple[int, ...] | None, ...]
"""For each dimension the wanted indices in increasing order; None: all of them."""
Piece = tuple[fx.Node, Box]
PLACES = 4
"""How many indices of a dimension are sampled: its first, its last, and others at random."""


@dataclasses.dataclass(frozen=True)
class Step:
    """How a piece is computed: `run` gets the oracle and the values of `operands`. On the way it computes
    some `scores`, which are no value of the graph."""

    operands: tuple[Piece, ...]
    run: Callable[[Oracle, Sequence[Any]], Any]
    scores: int = 0


class Parts:
    """Parts of the values of one region.

    Args:
        given: nodes whose values are not computed here.
        sizes: a number for every symbolic size.
    """

    def __init__(self, given: Collection[fx.Node], sizes: Mapping[str, int]) -> None:
        self.given, self.sizes = given, sizes
        self._meaning = Meaning(numbers=sizes)

    def order(self, wanted: Sequence[Piece]) -> list[Piece]:
        """The pieces from which those that are wanted are computed, operands first."""
        return operands_first(wanted, lambda piece: self.step(piece).operands)

    def bytes(self, wanted: Sequence[Piece]) -> int:
        """The bytes, in float64, of all these pieces together."""
        order = self.order(wanted)
        shapes = [self.shape(node, box) for node, box in order if isinstance(node.meta.get("val"), Tensor)]
        return 8 * (sum(map(math.prod, shapes)) + sum(self.step(piece).scores for piece in order))

    def evaluate(self, oracle: Oracle, known: Mapping[fx.Node, Any], wanted: Sequence[Piece]) -> list[Any]:
        """The values of the wanted pieces, from those of the given nodes, each freed after its last use."""

        def compute(piece: Piece, found: Mapping[Piece, Any]) -> Any:
            node, box = piece
            if node in known and not any(box):
                return known[node]
            return self.step(piece).run(oracle, [found[operand] for operand in self.step(piece).operands])

        return computed(self.order(wanted), lambda piece: self.step(piece).operands, compute, wanted)

    def shape(self, node: fx.Node, box: Box = ()) -> list[int]:
        """The shape of a node, or of a part of it."""
        whole = shape_at(node.meta["val"], self.sizes)
        return [n if b is None else len(b) for n, b in itertools.zip_longest(whole, box)]

    @kept
    def step(self, piece: Piece) -> Step:
        node, box = piece
        if not any(box):
            given = node in self.given
            operands = () if given else tuple(map(self.whole, node.all_input_nodes))
            scores = 0 if given else scores_of(node, self.sizes)
            return Step(operands, lambda oracle, values: self._run(oracle, node, operands, values), scores)
        if node not in self.given and node.op == "call_function":
            for way in (self._of_attention, self._of_dropout, self._moved, self._by_rule):
                found = way(node, box)
                if found is not None:
                    return found
        return Step((self.whole(node),), lambda _, values: _taken(values[0], box))

    def whole(self, node: fx.Node) -> Piece:
        value = node.meta.get("val")
        return node, (None,) * value.ndim if isinstance(value, Tensor) else ()

    def _run(self, oracle: Oracle, node: fx.Node, operands: Sequence[Piece], values: Sequence[Any]) -> Any:
        """The op of a node, on such parts of its operands."""
        given = dict(zip((operand for operand, _ in operands), values, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), given.__getitem__)
        return oracle.compute(node, args, kwargs)

    def _by_rule(self, node: fx.Node, box: Box) -> Step | None:
        """Where the wanted indices are those of the operands too, the op is run on parts of them."""
        try:
            variables, place = self._meaning.places(node)
            element = self._meaning.element(node, place)
        except Unliftable:
            return None
        wanted = {v: b for v, b in zip(variables, box, strict=True) if b is not None}
        if _occur(element, wanted):
            return None
        boxes: dict[fx.Node, Box] = {}
        for read in E.reads(element):
            if any(index not in wanted and _occur(index, wanted) for index in read.args):
                return None
            found = tuple(wanted.get(index) for index in read.args)
            same = all(
                index not in wanted or index.args[0].value == extent
                for index, extent in zip(read.args, self.shape(read.value), strict=True)
            )
            if not same or boxes.setdefault(read.value, found) != found:
                return None
        made_by: Any = node.args[0] if is_part(node) else node
        needed = made_by.all_input_nodes
        if not boxes or any(n not in boxes for n in needed if isinstance(n.meta.get("val"), Tensor)):
            return None
        operands = tuple((n, boxes[n]) if n in boxes else self.whole(n) for n in needed)
        if made_by is node:
            return Step(operands, lambda oracle, values: self._run(oracle, node, operands, values))
        number: Any = node.args[1]
        return Step(operands, lambda oracle, values: self._run(oracle, made_by, operands, values)[number])

    def _moved(self, node: fx.Node, box: Box) -> Step | None:
        """Where an op moves elements, and changes none: the operand at the indices that are wanted of each
        dimension, each once, and where in this the wanted elements lie."""
        variables, place = self._meaning.places(node)
        element = tried(self._meaning.element, node, place)
        if element is None or element.op != "read" or self._meaning.category(node) is not Category.MOVEMENT:
            return None
        source, indices = element.value, element.args
        casts = source.meta["val"].dtype != node.meta["val"].dtype
        if casts or any(n.op == "read" for index in indices for n in E.walk(index)):
            return None
        boxed = {v for v, wanted in zip(variables, box, strict=True) if wanted is not None}
        axes: dict[Expr, Tensor] = {}
        for dim, (extent, wanted) in enumerate(zip(self.shape(node), box, strict=True)):
            axis = torch.arange(extent) if wanted is None else torch.tensor(wanted)
            axes[variables[dim]] = axis.view(-1, *[1] * (len(box) - dim - 1))
        needed: list[Tensor | None] = []
        for index, extent in zip(indices, self.shape(source), strict=True):
            is_whole = index.free and boxed.isdisjoint(index.free)
            chosen = None if is_whole else torch.unique(numbers(index, axes))
            needed.append(None if chosen is None or len(chosen) == extent else chosen)

        def run(oracle: Oracle, values: Sequence[Any]) -> Any:
            places = (
                number if of is None else torch.searchsorted(of, number.contiguous())
                for number, of in zip((numbers(index, axes) for index in indices), needed, strict=True)
            )
            moved = values[0][tuple(where.to(values[0].device) for where in places)]
            return moved.expand(self.shape(node, box))

        return Step(((source, tuple(None if of is None else tuple(of.tolist()) for of in needed)),), run)

    def _of_attention(self, node: fx.Node, box: Box) -> Step | None:
        """Some queries of an attention, with all keys: the program reads their places from a list."""
        made_by: Any = node.args[0]
        found = nodes.view(made_by) if is_part(node) and node.args[1] == 0 else None
        if not isinstance(found, nodes.Attention):
            return None
        batch, heads, queries, columns = box
        group = self.shape(found.q)[1] // self.shape(found.k)[1]
        theirs = None if heads is None else tuple(head // group for head in heads)
        q, k, v = (
            (found.q, (batch, heads, queries, None)),
            (found.k, (batch, theirs, None, None)),
            (found.v, (batch, theirs, None, columns)),
        )
        reads = [self.whole(read) for read in found.reads]
        sizes = [self.whole(size) for size in found.sizes if isinstance(size, fx.Node)]
        lists = [torch.tensor(indices) for indices in box[:3] if indices is not None]
        named = [name for name, indices in zip(S.INDICES, box[:3], strict=False) if indices is not None]
        listed = {E.var(name): E.read(len(reads) + n, (E.var(name),), "int") for n, name in enumerate(named)}
        program = found.program.mapped(lambda formula: E.replaced(formula, listed))

        def run(oracle: Oracle, values: Sequence[Any]) -> Any:
            given = list(values)
            q, k, v, *rest = given
            read, counts = rest[: len(reads)], iter(rest[len(reads) :])
            part = found.replace(
                q=q, k=k, v=v, reads=(*read, *(places.to(q.device) for places in lists)), program=program,
                sizes=tuple(next(counts) if isinstance(size, fx.Node) else size for size in found.sizes),
            )  # fmt: skip
            return oracle.by_reference(part)[0]

        scores = math.prod(self.shape(*q)[:3]) * self.shape(*k)[2]
        return Step((q, k, v, *reads, *sizes), run, scores)

    def _of_dropout(self, node: fx.Node, box: Box) -> Step | None:
        """Some elements of what is left by a dropout: its random numbers depend on their places."""
        made_by: Any = node.args[0] if is_part(node) else node
        if not str(made_by.target).startswith(("aten.dropout.", "aten.native_dropout.")):
            return None
        shape = self.shape(made_by.args[0])
        number: Any = node.args[1] if is_part(node) else slice(None)

        def run(oracle: Oracle, values: Sequence[Any]) -> Any:
            return drop(made_by, values[0], shape, box)[number]

        return Step(((made_by.args[0], box),), run)


def choose_box(
    order: Sequence[fx.Node], targets: Sequence[fx.Node], leaves: Collection[fx.Node],
    sizes: Mapping[str, int], generator: torch.Generator,
) -> tuple[Box, int]:  # fmt: skip
    """Indices of some dimensions of a value, chosen so that computing the targets there takes at most
    `budgets.SAMPLE_BYTES` in float64, or as little as can be; and the bytes that it takes."""
    best = bytes_in_float64(order, sizes)
    box: Box = (None,) * len(targets[0].meta["val"].shape)
    if best <= budgets.SAMPLE_BYTES:
        return box, best
    parts = Parts({n for n in order if n in leaves or is_size(n)}, sizes)
    shape = parts.shape(targets[0])

    def needed(box: Box) -> int:
        return parts.bytes([(target, box) for target in targets])

    while best > budgets.SAMPLE_BYTES:
        tries = [
            (*box[:dim], _places(extent, generator), *box[dim + 1 :])
            for dim, extent in enumerate(shape)
            if box[dim] is None and extent > PLACES
        ]
        found = min(tries, key=needed, default=box)
        if needed(found) >= best:
            break
        box, best = found, needed(found)
    return box, best


def _places(extent: int, generator: torch.Generator) -> tuple[int, ...]:
    others = torch.randperm(extent - 2, generator=generator)[: PLACES - 2] + 1
    return (0, *sorted(others.tolist()), extent - 1)


def _taken(value: Tensor, box: Box) -> Tensor:
    for dim, indices in enumerate(box):
        if indices is not None:
            value = value.index_select(dim, torch.tensor(indices, device=value.device))
    return value


def _occur(node: Expr, variables: Mapping[Expr, Any]) -> bool:
    """Whether variables occur in an expression outside of the elements that it reads."""
    if node.op == "read":
        return False
    return node in variables or any(_occur(arg, variables) for arg in node.args)
