"""The scalar form: a score expression as typed operations, which C and Triton only print.

An expression is lowered once. Each value then has a kind (boolean, integer of 32 or 64 bits, float), operands
of the kind that its operation takes, with explicit casts, and the place where it is computed. Integers have
32 bits where interval analysis proves that these suffice. Constants are folded.
"""

import dataclasses
import enum
import functools
import math
import operator
from collections.abc import Callable, Iterable

from attngraph.codegen.remarks import UnsupportedError
from attngraph.ir.language import E, Expr, evaluate, operation_of
from attngraph.meaning.algebra import intervals
from attngraph.meaning.algebra.intervals import Bounds, Box, Interval

KINDS = ("bool", "int", "long", "float", "double")
"""Kinds of values; operands are converted to the last of their kinds. "int" has 32 bits, "long" 64."""
SMALL = 1 << 28
"""Indices, sizes and expressions of sizes lie below this (checked at every call), so that sums and
differences of them fit 32 bits; kernels for larger ones use "long" integers."""
_LARGE = 1 << 40


class Place(enum.IntEnum):
    """Where a value is computed: once for a head, for each query, for each key, or for each pair."""

    GROUP = 0
    ROW = 1
    TILE = 2
    INNER = 3


def joined(places: Iterable[Place]) -> Place:
    """The place of a value computed from values of these places."""
    return Place(functools.reduce(operator.or_, places, Place.GROUP))


@dataclasses.dataclass(frozen=True, eq=False)
class Scalar:
    """One value. `op` is an operation of the language, or

        const             the number `source.value`
        name              an index, `dot`, `s`, `p`, or a size that the kernel is given
        number            an expression of sizes, whose value the call passes
        read              an element of a tensor; the operands are its indices
        cast              the operand converted to this kind
        quotient, remainder    integer division of a non-negative value by a positive one

    `source`: the expression that it is the value of, or is derived from.
    """

    op: str
    args: "tuple[Scalar, ...]"
    kind: str
    place: Place
    source: Expr

    @property
    def is_leaf(self) -> bool:
        return self.op in ("const", "name", "number")

    @property
    def is_whole(self) -> bool:
        return self.kind not in ("float", "double")


_ZERO = Scalar("const", (), "int", Place.GROUP, E.ZERO)


class Lowering:
    """Lowers the expressions of one function; equal expressions share one value.

    Args:
        kind_of_read: the kind of a read tensor's elements, by its number.
        index: the kind of indices and sizes.
        brings_numbers: whether a call passes the values of expressions of sizes.
        powers_by_exp2: whether a power of a positive constant is written as a power of two.
    """

    def __init__(
        self, kind_of_read: Callable[[int], str], index: str = "int", brings_numbers: bool = False,
        powers_by_exp2: bool = False,
    ) -> None:  # fmt: skip
        self.kind_of_read, self.index = kind_of_read, index
        self.brings_numbers, self.powers_by_exp2 = brings_numbers, powers_by_exp2
        self._found: dict[Expr, Scalar] = {}
        self._casts: dict[tuple[Scalar, str], Scalar] = {}
        self._bounds: dict[Expr, Bounds] = {}
        self._most = float((_LARGE if index == "long" else SMALL) - 1)

    def __call__(self, node: Expr) -> Scalar:
        """The value of an expression. Raises UnsupportedError: an integer too large for every kind, or an
        unknown operation."""
        if node not in self._found:
            self._found[node] = self._lower(node)
        return self._found[node]

    def real(self, node: Expr) -> Scalar:
        return self.cast(self(node), "float")

    def truth(self, value: Scalar) -> Scalar:
        return value if value.kind == "bool" else self._make("ne", (value, _ZERO), "bool", value.source)

    def cast(self, value: Scalar, kind: str) -> Scalar:
        if value.kind == kind:
            return value
        key = value, kind
        if key not in self._casts:
            self._casts[key] = self._make("cast", (value,), kind, value.source)
        return self._casts[key]

    def bounds(self, node: Expr) -> Interval:
        """Bounds of an expression, already lowered, wherever a kernel evaluates it."""
        span = 0.0, self._most
        found = intervals.bounds(node, Box(span, span, span, span), {}, self._bounds)
        return float(found.low), float(found.high)

    def _make(self, op: str, args: tuple[Scalar, ...], kind: str, source: Expr) -> Scalar:
        return Scalar(op, args, kind, joined(a.place for a in args), source)

    def _lower(self, node: Expr) -> Scalar:
        match node.op:
            case "const":
                return _constant(node)
            case "dot" | "s" | "p":
                return Scalar("name", (), "float", Place.INNER, node)
            case "var":
                place = {"q": Place.ROW, "k": Place.TILE}.get(node.value, Place.GROUP)
                return Scalar("name", (), self.index, place, node)
            case "read":
                kind, indices = self.kind_of_read(node.value), [self._whole(self(a)) for a in node.args]
                return self._make("read", tuple(indices), kind, node)
        below = {n.op for n in E.walk(node)} if not node.free else {"var"}
        if below.isdisjoint(("var", "read", "dot", "s", "p", "random")):
            if "size" not in below:
                return _constant(E.const(evaluate.number(node)))
            if self.brings_numbers or node.op == "size":
                low = 0.0 if node.op == "size" and not self.brings_numbers else -self._most
                limits = (0.0, 1.0) if node.kind == "bool" else (low, self._most)
                self._bounds[node] = intervals.of_interval(limits, node.kind)
                op = "number" if self.brings_numbers else "name"
                return Scalar(op, (), self.index if node.kind == "int" else node.kind, Place.GROUP, node)
        return self._operation(node, tuple(self(arg) for arg in node.args))

    def _operation(self, node: Expr, args: tuple[Scalar, ...]) -> Scalar:
        op, row = node.op, operation_of(node.op)
        if row is None:
            raise UnsupportedError(f"`{op}`")
        kind = _meet(*(args[1:] if op == "where" else args))
        match op:
            case "where":
                kind = "bool" if args[1].kind == args[2].kind == "bool" else kind
                condition, (yes, no) = self.truth(args[0]), (self.cast(a, kind) for a in args[1:])
                if condition.op == "const":
                    return yes if condition.source.value else no
                return self._make(op, (condition, yes, no), kind, node)
            case "float":
                return self._make("cast", args, "float", node) if args[0].kind != "float" else args[0]
            case "int":
                kind = "int" if self._fits(node) else "long"
                return self._make("cast", args, kind, node) if args[0].kind != kind else args[0]
            case "isnan":
                return self._make("ne", (args[0], args[0]), "bool", node)
            case "pow":
                return self._power(node, *args)
            case "add" | "sub" | "mul" | "neg" if kind == "int" and not self._fits(node):
                kind = "long"
            case "floordiv" | "mod" if kind in ("int", "long"):
                op = self._division(node, args[1])
        if row.takes == "truths":
            args = tuple(self.truth(a) for a in args)
        elif row.takes == "integers":
            args = tuple(self._whole(a) for a in args)
        else:
            kind = max(kind, "float", key=KINDS.index) if row.takes == "reals" else kind
            args = tuple(self.cast(a, kind) for a in args)
        if row.rounds and args[0].is_whole:
            return args[0]
        if op == "sign" and args[0].is_whole:
            kind = "int"
        return self._make(op, args, kind if row.gives == "alike" or row.takes == "reals" else row.gives, node)

    def _power(self, node: Expr, base: Scalar, exponent: Scalar) -> Scalar:
        kind = max(_meet(base, exponent), "float", key=KINDS.index)
        if exponent.op == "const" and exponent.source.value in (1, 2, 3, 4):
            x = product = self.cast(base, kind)
            for _ in range(int(exponent.source.value) - 1):
                product = self._make("mul", (product, x), kind, node)
            return product
        number = base.source.value if base.op == "const" and base.source is not E.NAN else 0
        if self.powers_by_exp2 and 0 < number < math.inf:
            rate = _constant(E.const(math.log2(number)))
            rated = (self.cast(exponent, kind), rate)
            power = rated[0] if number == 2 else self._make("mul", rated, kind, node)
            return self._make("exp2", (power,), kind, node)
        return self._make("pow", (self.cast(base, kind), self.cast(exponent, kind)), kind, node)

    def _division(self, node: Expr, divisor: Scalar) -> str:
        dividend, by = node.args
        is_positive = by.op == "size" or divisor.op == "number" or self.bounds(by)[0] >= 1
        if self.bounds(dividend)[0] < 0 or not is_positive:
            return node.op
        return "quotient" if node.op == "floordiv" else "remainder"

    def _whole(self, value: Scalar) -> Scalar:
        """The value as an integer: a float is truncated, a boolean is 0 or 1."""
        return self.cast(value, _meet(value) if value.is_whole else "long")

    def _fits(self, node: Expr) -> bool:
        low, high = self.bounds(node)
        return low >= -(1 << 31) and high < 1 << 31


def _constant(node: Expr) -> Scalar:
    if node.kind != "int":
        return Scalar("const", (), node.kind, Place.GROUP, node)
    if abs(node.value) >= 1 << 63:
        raise UnsupportedError("an integer of more than 64 bits")
    return Scalar("const", (), "int" if abs(node.value) < 1 << 31 else "long", Place.GROUP, node)


def _meet(*values: Scalar) -> str:
    """The common kind to which these are converted as numbers."""
    return max("int", *(v.kind for v in values), key=KINDS.index)
