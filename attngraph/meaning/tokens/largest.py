"""The largest few of some values as a count: one is among the k largest if fewer than k are larger.

So written, nothing is left of how many values there are beside it: minus infinity is never larger. Which of
equal values `topk` chooses is not said. Nothing here edits the graph.
"""

from collections.abc import Callable
from typing import Any

from torch import fx

from attngraph.ir.graph.call import argument
from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import simplify as M
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Indices, axis, is_part


def is_choice(node: Any, part: int) -> bool:
    """Whether a node is the largest values (part 0), or their places (part 1)."""
    if not is_part(node) or node.args[1] != part or str(node.args[0].target) != "aten.topk.default":
        return False
    return bool(argument(node.args[0], "largest"))


def chosen(meaning: Meaning, node: fx.Node, at: Indices) -> Expr | None:
    """An element of what a scatter makes that writes a number at the places of the largest few; None for any
    other node."""
    if str(node.target) != "aten.scatter.value" or not is_choice(node.args[2], 1):
        return None
    topk: Any = node.args[2].args[0]  # type: ignore[union-attr]
    source, dim = topk.args[0], axis(int(argument(topk, "dim")), len(at))
    same = all(a is b for a, b in zip(meaning.shape(source), meaning.shape(node), strict=True))
    if axis(int(node.args[1]), len(at)) != dim or not same:  # type: ignore[arg-type]
        return None
    value = meaning.scalar(node.args[3])
    value = M.ne(value, E.ZERO) if meaning.kind(node) == "bool" else value
    count = _how_many(meaning, topk, dim, at, lambda other: M.lt(meaning.read(source, at), other))
    wanted = _without_all(meaning.integer(topk.args[1]), meaning.shape(source)[dim])
    return M.where(M.lt(count, wanted), value, meaning.read(node.args[0], at))


def _without_all(count: Expr, extent: Expr) -> Expr:
    """`count`, or all that there are if fewer: fewer than all are compared with one of them."""
    others = [n for n in count.args if n is not extent] if count.op == "min" else []
    return others[0] if len(others) == 1 else count


def compared(meaning: Meaning, comparison: Expr, meant: Callable[[Expr], Expr]) -> Expr:
    """A comparison with one of the largest values, as a count; any other comparison as it is. `meant`: what
    an element is a formula of."""
    a, b = comparison.args
    place = 0 if a.op == "read" and is_choice(a.value, 0) else 1
    read, other = (a, b) if place == 0 else (b, a)
    if read.op != "read" or not is_choice(read.value, 0):
        return comparison
    topk = read.value.args[0]
    dim = axis(int(argument(topk, "dim")), len(read.args))
    # The r-th largest is at most y (below y) if fewer than r are larger than y (y or larger).
    strict = (comparison.op == "le") == (place == 0)
    count = _how_many(
        meaning, topk, dim, read.args, lambda x: M.lt(other, x) if strict else M.le(other, x)
    )  # fmt: skip
    source, rank = topk.args[0], M.add(read.args[dim], E.ONE)
    of_own = [meant(meaning.read(source, (*read.args[:dim], v, *read.args[dim + 1 :]))) for v in other.free]
    if any(M.canonical_binders(one) is M.canonical_binders(other) for one in of_own):
        rank = _without_all(rank, meaning.shape(source)[dim])
    fewer = M.lt(count, rank)
    return fewer if place == 0 else M.not_(fewer)


def _how_many(meaning: Meaning, topk: fx.Node, dim: int, at: Indices, counts: Callable[[Expr], Expr]) -> Expr:
    """How many of the values that a choice is made from are such."""
    source: Any = topk.args[0]
    place = meaning.fresh(meaning.shape(source)[dim])
    return M.total(place, M.number(counts(meaning.read(source, (*at[:dim], place, *at[dim + 1 :])))))
