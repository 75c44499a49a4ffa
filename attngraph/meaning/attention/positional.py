"""Weights without queries and keys: averages over what a mask keeps, and softmaxes of a table of biases.

    softmax of (0 where k <= q, else -inf)         the average of a token and all before it
    tril(ones) / its sum over each row             the same weights, written without an exponential

Both are attention whose dot product has no width. Nothing here is decided by names or shapes.
"""

import math

from torch import fx

from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import M
from attngraph.meaning.attention.weighted_sums import KeyPart
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import ELEMENTWISE, Category

_SUMS = ("aten.sum.dim_IntList", "aten.sum.default")
_QUOTIENTS = ("aten.div.Tensor", "aten.mul.Tensor", "aten.true_divide.Tensor")


def has_no_product(part: KeyPart) -> bool:
    """Whether scores vary over query and key by positions and by tables smaller than the weights: those of
    the model, without one of the dimensions that values have besides the keys and their own width."""
    score, keys, value = part.score, frozenset(part.keys), part.value.free
    queries = score.free - value
    if not queries or score.free.isdisjoint(keys):
        return False
    for read in E.reads(score):
        over_pairs = not read.free.isdisjoint(keys) and not read.free.isdisjoint(queries)
        is_table = isinstance(read.value, fx.Node) and read.value.op == "placeholder"
        shared = value - keys - read.free  # the width of values, and what the table is the same for
        if over_pairs and not (is_table and len(shared) > 1):
            return False
    return not any(n.op in E.BINDERS for n in E.walk(score))


class PositionWeights:
    """Finds, in one graph, weights that follow from positions alone and are divided by a sum of such."""

    def __init__(self, meaning: Meaning) -> None:
        self.meaning = meaning
        self._known: dict[fx.Node, tuple[bool, bool]] = {}

    def are_divided(self, node: fx.Node) -> bool:
        """Whether a node divides by a sum of what follows from positions alone, as it does itself."""
        return (
            node.op == "call_function" and str(node.target) in _QUOTIENTS and self.known(node) == (True, True)
        )

    def follow(self, node: fx.Node) -> bool:
        """Whether a node follows from positions alone."""
        return self.known(node)[0]

    def known(self, node: fx.Node) -> tuple[bool, bool]:
        """Whether a node follows from positions alone, and whether a sum is among what computes it."""
        if node not in self._known:
            operands = [n for n in node.all_input_nodes if self.meaning.is_tensor(n)]
            category = self.meaning.category(node)
            sums = category is Category.REDUCTION and str(node.target) in _SUMS
            follows = (category in ELEMENTWISE or sums) and all(self.known(n)[0] for n in operands)
            self._known[node] = (follows, follows and (sums or any(self.known(n)[1] for n in operands)))
        return self._known[node]


def as_exponentials(node: Expr) -> Expr:
    """The expression with choices between zero and something, and between positive multiples of one thing, as
    products with an exponential."""

    def replace(current: Expr, args: tuple[Expr, ...]) -> Expr:
        if current.op != "where" or current.kind == "bool":
            return M.construct(current, args)
        (one, of_one), (other, of_other) = (_multiple(a) for a in args[1:])
        rest = of_other if one == 0 else of_one
        same = of_one is of_other or 0 in (one, other)
        if not same or not all(0 <= n < math.inf for n in (one, other)) or one == other:
            return M.construct(current, args)
        return M.mul(rest, M.exp(M.where(args[0], _logarithm(one), _logarithm(other))))

    return E.rebuild(node, replace)


def _multiple(node: Expr) -> tuple[float, Expr]:
    """A number and what it multiplies."""
    if node.op != "const":
        return M.coefficient(node)
    return (math.nan if node is E.NAN else float(node.value)), E.ONE


def _logarithm(number: float) -> Expr:
    return E.NEG_INF if number == 0 else E.ZERO if number == 1 else E.const(math.log(number))
