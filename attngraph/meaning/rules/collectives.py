"""Rules of collectives: what ranks exchange (`ir/ops/collectives.py`).

An element of the result is computed from the ranks' elements at one place and from no other, so tokens that
are apart before are apart afterwards. How it is computed is not looked into.
"""

from typing import Any

from torch import fx

from attngraph.ir.language.expr import Expr
from attngraph.ir.ops.collectives import ALL_GATHER, ALL_REDUCE, SUM_GRADIENTS
from attngraph.meaning.algebra import M
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import RULES, Category, Indices, Rule


def summed(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """A sum over ranks, or a value whose gradients are summed over ranks."""
    return M.raw("over ranks", context.read(node.args[0], at))


def gathered(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """The ranks' values side by side."""
    args: Any = node.args
    x, dim = args[0], args[1]
    extent = context.shape(x)[dim]
    own = tuple(M.mod(index, extent) if d == dim else index for d, index in enumerate(at))
    return M.raw("of a rank", context.read(x, own), M.floordiv(at[dim], extent))


for _op in (ALL_REDUCE, SUM_GRADIENTS):
    RULES[str(_op)] = Rule(Category.REDUCTION, summed)
RULES[str(ALL_GATHER)] = Rule(Category.REDUCTION, gathered)
