"""What one element of an operation's result is, where each row is computed by itself.

By the element rules (`meaning/rules`), and for norms and activations that PyTorch has as one operation by the
formulas in `named.py`. Formulas are kept as they are written: rearranging them would change how they round.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import sympy
from torch import Tensor, fx

from attngraph.ir import budgets
from attngraph.ir.graph.program_graph import ProgramGraph, is_empty
from attngraph.ir.language import E, Expr, Packed, operation, operation_of
from attngraph.ir.language.token_derivative import is_own
from attngraph.ir.language.token_program import DTYPES, FLOATS, GROUP, TOKEN, extent, weight_of
from attngraph.ir.ops.quantised import unpack
from attngraph.ir.ops.token_program import RUNNERS
from attngraph.meaning import Category, M, Meaning, Unliftable, tried
from attngraph.meaning.rules.composed import COMPOSED
from attngraph.passes.fuse_token_wise.rows import Place, Rows, Windows
from attngraph.passes.named import COMPENSATED, NAMED

SMALL_FOLD = 1 << 14
"""A sum of products that is no product with a weight is computed where a token has at most so many terms."""

LONGEST = budgets.STATEMENT_WORDS // 4
"""Words of an operation's formula: several of them together are a definition."""


class Formula(NamedTuple):
    """`value` is the element at `at`, with one index for each dimension: 0 where its extent is 1, `TOKEN` for
    the rows."""

    at: tuple[Expr, ...]
    value: Expr


class Formulas:
    """The formulas of a decoder's graph, which computes all tokens as one sequence, or of a graph of whole
    sequences, of which each token is a row. `everything`: also of operations of torch's that round less than
    what they are composed of, and where there is another number of rows than of tokens."""

    def __init__(self, graph: ProgramGraph, everything: bool = False) -> None:
        self.windows, self.gradients, self.everything = Windows(graph), graph.gradients, everything
        conditions = list(graph.conditions)
        if graph.state is not None:
            conditions += [sympy.Eq(s, 1) for s in _batch_sizes(graph, graph.state.step_tokens)]
        self.meaning = Meaning({}, conditions, along_tokens=bool(self.windows))
        self._shapes: dict[fx.Node, tuple[Expr, ...] | None] = {}
        named, multiplies = self.meaning.renamed, lambda n: self.meaning.category(n) is Category.CONTRACTION
        self.rows = Rows(graph, self.shape, named, multiplies, everything)

    def shape(self, node: fx.Node) -> tuple[Expr, ...] | None:
        """The extents of a floating tensor of 32 or 16 bits on the CPU that has elements; None for another
        value."""
        if node not in self._shapes:
            of_floats = self._is_here(node) and name_of(node) in FLOATS and not is_empty(node)
            self._shapes[node] = tried(self.meaning.shape, node) if of_floats else None
        return self._shapes[node]

    def weight_shape(self, node: fx.Node) -> tuple[Expr, ...] | None:
        """The extents of a tensor of numbers that all tokens share, of integers perhaps."""
        known = self._is_here(node) and name_of(node) in DTYPES
        shape = tried(self.meaning.shape, node) if known else None
        return shape if shape is not None and all(n.op == "const" for n in shape) else None

    def _is_here(self, node: fx.Node) -> bool:
        """Whether a value lies on a device whose tokens are computed by programs: the CPU, or where sums get
        one order any that has a runner."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return False
        device = value.device.type
        return device == "cpu" or (self.everything and any(r.device == device for r in RUNNERS))

    def is_shared(self, node: fx.Node) -> bool:
        """Whether all rows share this tensor, and its extents are numbers."""
        shape = self.shape(node)
        return shape is not None and all(n.op == "const" for n in shape)

    def of(self, node: fx.Node) -> Formula | None:
        """The formula of a node's element; None if it is not computed from the same row alone, or not by
        operations of the score language."""
        place = self.rows.of(node)
        if node.op != "call_function" or place is None:
            return None
        shape = self.shape(node)
        assert shape is not None
        own = {d: E.var(f"t{d}", shape[d]) for d in place.dims}
        rows = tuple(own.values())
        at = tuple(own.get(d, index) for d, index in enumerate(self.meaning.places(node)[1]))
        try:
            by_name = NAMED.get(str(node.target))
            composed = not self.everything and str(node.target).removeprefix("aten.") in COMPOSED
            if by_name is None and composed:
                return None  # torch's own operation keeps more digits than its composition
            value = by_name(self.meaning, node, at) if by_name else self.meaning.element(node, at)
            value = self.windows.rewritten(self.meaning, value, rows[0], self.rows.is_longer)
            value = E.rebuild(value, lambda n, args: self._of_own_row(n, args, place, rows))
        except (Unliftable, KeyError):
            return None
        if value.words > LONGEST or set(rows) & value.free or not self._is_supported(value):
            return None
        found = Formula(place.flat(at), value)
        return found if not self.gradients or self._is_differentiable(node, found) else None

    def _is_differentiable(self, node: fx.Node, formula: Formula) -> bool:
        """Whether the derivative follows from the formula: where both operands are equal, operations with the
        same maximum have different ones. Products have theirs from PyTorch."""
        nodes = list(E.walk(formula.value))
        if self.meaning.category(node) is Category.CONTRACTION or str(node.target) in COMPENSATED:
            return False
        if any(n.op in ("max", "min", "amax") for n in nodes):
            return False
        variables = [v for v in (*formula.at, *(n.args[0] for n in nodes if n.op == "sum")) if v.op == "var"]
        for read in (n for n in nodes if n.op == "read"):
            place, shape = self.rows.of(read.value), self.shape(read.value)
            assert shape is not None
            extents = shape if place is None else place.flat(shape)
            if not is_own(read.args, [None if n is TOKEN else int(n.value) for n in extents], variables):
                return False
        return True

    def _of_own_row(self, found: Expr, args: tuple[Expr, ...], place: Place, rows: tuple[Expr, ...]) -> Expr:
        """A part of a formula, with `TOKEN` in what is read of the same row. Raises `Unliftable`: it reads
        another row."""
        if found.op != "read":
            return E.with_args(found, args)
        other, own = self.rows.of(found.value), set(rows)
        if other is None:
            if not any(own & a.free for a in found.args):
                return E.with_args(found, args)
            spread = self.rows.spread(found.value, found.args, place, rows)
            return E.read(spread, (TOKEN, *(a for a in args if a not in own)), found.kind)
        rest = [a for d, a in enumerate(found.args) if d not in other.dims]
        same = other.same_row(place, rows)
        at = [(found.args[d], n) for d, n in zip(other.dims, other.extents, strict=True)]
        if not same or any(a is not r and not E.is_const(n, 1) for (a, n), r in zip(at, same, strict=True)):
            raise Unliftable("of another row")
        if any(own & a.free for a in rest):
            raise Unliftable("at a place that depends on the row")
        return E.read(found.value, other.flat(args), found.kind)

    def _is_supported(self, value: Expr) -> bool:
        converted = {n.args[0] for n in E.walk(value) if n.op == "float" and n.args[0].op == "read"}
        for node in E.walk(value):
            if node.op == "read":
                weight = node in converted and self.weight_shape(node.value) is not None
                if TOKEN not in node.args and not (weight or self.is_shared(node.value)):
                    return False
            elif node.op in ("sum", "amax"):
                if node.args[0].args[0].op != "const" or not self._is_computed(node):
                    return False
            elif node.op not in ("const", "var"):
                op = node.value if node.op == "raw" else node.op
                if op != "recip" and (op == "random" or operation_of(op) is None):
                    return False  # the score language has no such operation
        return True

    def _is_computed(self, fold: Expr) -> bool:
        """Whether a fold is a product with a weight, or so short that it is computed term by term."""
        variable, body = fold.args
        terms = math.prod(extent(v) for v in body.free if v.args and v.args[0].op == "const")
        if terms <= SMALL_FOLD or not any(n.op == "mul" and n.kind == "float" for n in E.walk(body)):
            return True
        return split_product(body, variable, self.is_weight) is not None

    def is_weight(self, source: Any) -> bool:
        """Whether what a formula reads is a tensor that all tokens share."""
        is_node = isinstance(source, fx.Node)
        return is_node and self.rows.of(source) is None and self.weight_shape(source) is not None


def split_product(body: Expr, over: Expr, is_weight: Callable[[Any], bool]) -> tuple[Expr, Expr] | None:
    """The factors of a product with a weight, `(value of the token, weight)`: the weight is a matrix, read at
    the index that is summed over and at another, or one of integers with their scales."""
    if body.op != "mul" or len(body.args) != 2:
        return None
    for left, factor in (body.args, body.args[::-1]):
        weight = weight_of(factor)
        if weight is None or len(weight.matrix.args) != 2:
            continue
        if not all(is_weight(r.value) for r in E.reads(factor)):
            continue
        others = [a for a in weight.matrix.args if a is not over]
        if any(v is not over and v.args and v.args[0].op == "const" for v in left.free):
            continue  # a value of its own for each head, say: not one vector of the token
        if len(others) == 1 and others[0].op == "var" and others[0] not in left.free and over in left.free:
            return left, factor
    return None


def name_of(node: fx.Node) -> str:
    """The dtype of a tensor; "" for another value."""
    value = node.meta.get("val")
    return str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else ""


def _batch_sizes(graph: ProgramGraph, tokens: str) -> set[Any]:
    """The symbols that count sequences: the first dimension of arguments whose second counts the tokens."""
    arguments = [node for node, given in graph.given().items() if given.kind == "argument"]
    shapes: list[Any] = [getattr(node.meta.get("val"), "shape", ()) for node in arguments]
    of_tokens = [shape for shape in shapes if len(shape) >= 2 and str(shape[1]) == tokens]
    return {shape[0].node.expr for shape in of_tokens if not isinstance(shape[0], int)}


def _linear_q(context: Meaning, node: fx.Node, at: tuple[Expr, ...]) -> Expr:
    """`attngraph::linear_q`. Where each output has one scale and no zero, the sum is multiplied by it."""
    x, weight, scales, zeros, bias = node.args
    depth = context.shape(weight)[1]
    over, out = context.fresh(depth), at[-1]
    one = scales is not None and zeros is None and E.is_const(context.shape(scales)[1], 1)
    element = operation("float", _where_it_lies(context, weight, (out, over), scales is None or one))
    groups = E.ONE if scales is None else context.shape(scales)[1]
    size, packed = M.floordiv(depth, groups), packing(weight)
    if groups is not E.ONE and (size.op != "const" or size.value % GROUP):
        raise Unliftable("groups that are no whole vectors")
    if packed is not None and not packed.splits(int(depth.value), int(size.value), GROUP):
        raise Unliftable("digits that are no whole vectors")
    if scales is not None and not one:
        group = E.ZERO if groups is E.ONE else M.floordiv(over, size)
        if zeros is not None:
            zero = _where_it_lies(context, zeros, (out, group))
            element = operation("sub", element, zero if zero.kind == "float" else operation("float", zero))
        element = operation("mul", element, _where_it_lies(context, scales, (out, group)))
    product = operation("mul", context.read(x, (*at[:-1], over)), element)
    value = E.make("sum", (over, product), None, "float")
    if one:
        scale = context.lift(context.read(scales, (out, E.ZERO)), lambda r: _only_moves(context, r))
        value = operation("mul", value, scale)
    return value if bias is None else operation("add", value, context.read(bias, at[-1:]))


def packing(node: Any) -> Packed | None:
    """How the elements of a matrix lie in the integers that it is unpacked from; None if it is another."""
    return Packed.of(str(node.args[2])) if node.target is unpack else None


def _where_it_lies(context: Meaning, tensor: Any, at: tuple[Expr, ...], turned: bool = False) -> Expr:
    """An element of a matrix, or of that of which it is a view: nothing is copied to another layout."""
    read = context.read(tensor, at)
    base = context.lift(read, lambda r: _only_moves(context, r))
    return base if base.op == "read" and base.args in (at, at[::-1] if turned else at) else read


def _only_moves(context: Meaning, read: Expr) -> bool:
    return context.category(read.value) is Category.MOVEMENT


NAMED["attngraph.linear_q.default"] = _linear_q


def placed(value: Expr, places: dict[Expr, Expr]) -> Expr:
    """A formula with its indices replaced. Index arithmetic and conditions on indices are simplified; what is
    computed from elements stays as it is written."""

    def leaf(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if node in places:
            return places[node]
        if node.op == "var" or not node.args:
            return node
        if node.op == "where" and args[0].op == "const":
            return args[1] if args[0].value else args[2]
        whole = node.kind in ("int", "bool") and not any(n.op == "read" for n in E.walk(node))
        return M.construct(node, args) if whole else E.with_args(node, args)

    return E.rebuild(value, leaf)


def spelled(node: Expr) -> Expr:
    """A formula in the words of the score language: sums and products of two, differences, quotients."""

    def leaf(node: Expr, args: tuple[Expr, ...]) -> Expr:
        match node.op:
            case "add":
                first, *terms = sorted(args, key=lambda a: (a.op == "const", _sign(a)[0] < 0))
                return functools.reduce(_added, terms, first)
            case "mul":
                inverse = {a: a.op == "div" and E.is_const(a.args[0], 1) for a in args}
                factors = [a for a in args if not inverse[a]] or [E.ONE]
                over = [a.args[1] for a in args if inverse[a]]
                product = functools.reduce(lambda a, b: operation("mul", a, b), factors)
                return functools.reduce(lambda a, b: operation("div", a, b), over, product)
            case "and" | "or":
                return functools.reduce(lambda a, b: operation(node.op, a, b), args)
            case "recip":
                if args[0].op == "sqrt":
                    return operation("rsqrt", args[0].args[0])
                return operation("div", E.const(1.0), args[0])
            case "not" if args[0].op == "eq":
                return operation("ne", *args[0].args)
            case "raw":
                return operation(node.value, *args)
        return E.with_args(node, args)

    return E.rebuild(node, leaf)


def _sign(node: Expr) -> tuple[float, Expr]:
    """The number that a term is multiplied by, or is, and the term with the opposite sign where it is
    negative."""
    factor = node.args[0] if node.op == "mul" else node
    if factor.op != "const" or factor is E.NAN or isinstance(factor.value, bool) or factor.value >= 0:
        return 1, node
    positive, rest = E.const(-factor.value), node.args[1:]
    if node.op == "mul":
        positive = rest[0] if factor.value == -1 else E.make("mul", (positive, *rest), None, node.kind)
    return factor.value, positive


def _added(whole: Expr, term: Expr) -> Expr:
    factor, positive = _sign(term)
    return operation("sub" if factor < 0 else "add", whole, positive)
