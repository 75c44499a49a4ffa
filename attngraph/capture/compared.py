"""A graph for any number of sequences and tokens, from graphs that were each traced for one.

Code that asks for the number itself of a size (`int(x.shape[0])`, einx) leaves numbers in a graph. Graphs of
several sizes are compared: where they are of the same operations, a number that is not the same in all of
them is `a + b * rows + c * tokens + d * rows * tokens`, and one more graph must agree. What the model does at
other sizes has not been traced, so whoever uses the graph shows that it is right there
(`runtime/proof.py`).
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from attngraph.capture.captured import Captured
from attngraph.capture.program.exported import arguments_of, hints, shapes_of
from attngraph.errors import CaptureError
from attngraph.ir.graph import ProgramGraph, infer_once
from attngraph.ir.kept import kept

SIZES = ((2, 9), (3, 9), (2, 11), (3, 11), (4, 14))
"""How many sequences and tokens the compared graphs have: four to interpolate, one to check."""


class _Formula(NamedTuple):
    """A number of a graph: `constant + rows * R + tokens * T + both * R * T`."""

    constant: int
    rows: int = 0
    tokens: int = 0
    both: int = 0

    def at(self, rows: int, tokens: int) -> int:
        return self.constant + self.rows * rows + self.tokens * tokens + self.both * rows * tokens


def compared(graphs: Sequence[Captured], place: int) -> Captured:
    """The graph of which these are examples, at the sizes of `SIZES`; `place` is the number of the tokens
    among the tensors of the call.

    Raises:
        CaptureError: they are not of the same operations, or a number in them is of another form.
    """
    first, *others = graphs
    kinds = {(c.graph.inputs, c.graph.outputs, str(c.structure.tree)) for c in graphs}
    bodies = (c.graph.graph.nodes for c in graphs)
    operations = {tuple(n.target if n.op == "call_function" else n.op for n in body) for body in bodies}
    is_one = len(kinds) == len(operations) == 1
    if not is_one or not all(_same_constants(first.graph, other.graph) for other in others):
        raise _unlike("the model does something else")
    found = first.graph.copy()
    writer = _Writer(found, place, [c.graph for c in others])
    for node, *alike in zip(list(found.graph.nodes), *(c.graph.graph.nodes for c in others), strict=True):
        writer.write(node, alike)
    ids = writer.ids
    ((rows, tokens, *_),) = shapes_of([ids])
    found.conditions = (sympy.Ge(rows, 2), sympy.Ge(tokens, 2))
    found.hints = hints([ids])
    return dataclasses.replace(first, graph=found, shapes=shapes_of(arguments_of(found)), asked=())


class _Writer:
    """Gives the operations of a graph sizes that follow from those of the tokens."""

    def __init__(self, graph: ProgramGraph, place: int, others: Sequence[ProgramGraph]) -> None:
        self._order = {node: n for g in (graph, *others) for n, node in enumerate(g.graph.nodes)}
        self.graph, self.ids = graph, arguments_of(graph)[place]
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        self._first = next(n for n in graph.graph.nodes if n.op != "placeholder")
        self._sizes: list[fx.Node] = []

    def write(self, node: fx.Node, alike: Sequence[fx.Node]) -> None:
        if node.op == "placeholder":
            self._input(node, alike)
        elif node.op == "call_function":
            node.args, node.kwargs = self._merged([(n.args, n.kwargs) for n in (node, *alike)])
            node.meta["val"] = infer_once(node.target, node.args, dict(node.kwargs), self.mode)

    def _input(self, node: fx.Node, alike: Sequence[fx.Node]) -> None:
        value = node.meta["val"]
        about: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        shapes = [tuple(n.meta["val"].shape) for n in (node, *alike)]
        if node is not self.ids:
            if len(set(shapes)) > 1:
                raise _unlike("another input of the model is as long as the tokens")
            with self.mode:
                node.meta["val"] = torch.empty_strided(value.shape, value.stride(), **about)
            return
        dynamic = [DimDynamic.DYNAMIC] * 2 + [DimDynamic.STATIC] * (value.ndim - 2)
        example = torch.zeros(value.shape, **about)
        node.meta["val"] = self.mode.from_tensor(
            example, source=ConstantSource("tokens"),
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic),
        )  # fmt: skip
        with self.graph.graph.inserting_before(self._first):
            for dim in range(2):
                size = self.graph.graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                size.meta["val"] = node.meta["val"].shape[dim]
                self._sizes.append(size)

    def _merged(self, given: Sequence[Any]) -> Any:
        """What equal places of the graphs' arguments hold, as one."""
        first = given[0]
        if isinstance(first, (list, tuple)):
            if len({len(each) for each in given}) > 1:
                raise _unlike("an operation has another number of operands")
            parts = (self._merged(each) for each in zip(*given, strict=True))
            return type(first)(parts) if not hasattr(first, "_fields") else type(first)(*parts)
        if isinstance(first, dict):
            return {name: self._merged([each[name] for each in given]) for name in first}
        if isinstance(first, slice):
            ends = [self._merged([getattr(s, end) for s in given]) for end in ("start", "stop", "step")]
            return slice(*ends)
        if isinstance(first, fx.Node):
            if len({self._order.get(each) for each in given}) > 1:
                raise _unlike("an operation has other operands")
            return first
        if all(type(each) is type(first) and each == first for each in given):
            return first
        if any(type(each) is not int for each in given):
            raise _unlike(f"a number is {' or '.join(map(str, dict.fromkeys(given)))}")
        return self._written(interpolated(given))

    @kept
    def _written(self, formula: _Formula) -> Any:
        """The node that computes a number."""
        rows, tokens = self._sizes
        with self.graph.graph.inserting_before(self._first):
            terms: list[Any] = [
                self._call(operator.mul, number, what) if number != 1 else what
                for number, what in ((formula.rows, rows), (formula.tokens, tokens))
                if number
            ]
            if formula.both:
                both = self._call(operator.mul, rows, tokens)
                terms.append(self._call(operator.mul, formula.both, both))
            terms += [formula.constant] if formula.constant else []
            return functools.reduce(functools.partial(self._call, operator.add), terms)

    def _call(self, function: Callable[..., Any], *operands: Any) -> fx.Node:
        found = self.graph.graph.call_function(function, operands)
        found.meta["val"] = function(*(n.meta["val"] if isinstance(n, fx.Node) else n for n in operands))
        return found


def interpolated(numbers: Sequence[int]) -> _Formula:
    """The formula of a number at `SIZES`; raises CaptureError if there is none."""
    (rows, tokens), (more_rows, _), (_, more_tokens), *_ = SIZES
    here, below, right, corner, _ = numbers
    by_rows, by_tokens = more_rows - rows, more_tokens - tokens
    both, rest = divmod(corner - below - right + here, by_rows * by_tokens)
    a, rest_a = divmod(below - here, by_rows)
    b, rest_b = divmod(right - here, by_tokens)
    a, b = a - both * tokens, b - both * rows
    found = _Formula(here - a * rows - b * tokens - both * rows * tokens, a, b, both)
    if rest or rest_a or rest_b or any(found.at(*s) != n for s, n in zip(SIZES, numbers, strict=True)):
        raise _unlike(f"a number is {', '.join(map(str, numbers))}")
    return found


def _same_constants(one: ProgramGraph, other: ProgramGraph) -> bool:
    def equal(a: Tensor, b: Tensor) -> bool:
        return a is b or (a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b)))

    pairs = (one.constants, other.constants), (one.values, other.values)
    return all(a.keys() == b.keys() and all(equal(a[n], b[n]) for n in a) for a, b in pairs)


def _unlike(what: str) -> CaptureError:
    sizes = ", ".join(f"{rows} x {tokens}" for rows, tokens in SIZES)
    return CaptureError(f"{what} at other numbers of sequences and tokens (tried: {sizes}).", what)
