"""Elements of operations without an element rule: what they are computed from.

A decoder need not know what such an operation computes, only what of its operands it reads: all places of the
dimensions that it mixes, its own place of the others. So an element is an unknown function of those.
Attention nodes are written as the formulas that they stand for, and a choice of the largest few as a count:
one is among the k largest if fewer than k are larger. So written, nothing is left of how many values there
are beside it: minus infinity is never larger. Which of equal values `topk` chooses is not said.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir.graph.call import argument
from attngraph.ir.language import DOT, SCORE, WEIGHT, E, Expr, Keep, Score, Sink
from attngraph.ir.ops import nodes
from attngraph.meaning.algebra import M, ranges, size_expression
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Indices, Unliftable, axis, is_part


def is_choice(node: Any, part: int) -> bool:
    """Whether a node is the largest values (part 0), or their places (part 1)."""
    if not is_part(node) or node.args[1] != part or str(node.args[0].target) != "aten.topk.default":
        return False
    return bool(argument(node.args[0], "largest"))


def chosen(meaning: Meaning, node: fx.Node, at: Indices) -> Expr | None:
    """An element of what a scatter makes that writes a number at the places of the largest few; None for any
    other node."""
    if str(node.target) != "aten.scatter.value":
        return None
    index: Any = node.args[2]
    choice, dim = meaning.fresh(meaning.shape(index)[-1]), len(at) - 1
    if axis(int(node.args[1]), len(at)) != dim or len(meaning.shape(index)) != len(at):  # type: ignore[arg-type]
        return None
    place = meaning.lift(meaning.read(index, (*at[:-1], choice)), lambda r: not is_choice(r.value, 1))
    read = next((r for r in E.reads(place) if is_choice(r.value, 1) and choice in r.free), None)
    if read is None or axis(int(argument(read.value.args[0], "dim")), len(read.args)) != len(read.args) - 1:
        return None
    topk: Any = read.value.args[0]
    own, source = at[-1], topk.args[0]
    there = M.substitute(place, {read: own})
    others = _others(place, read)
    if others is None or read.args[-1] is not choice or choice in there.free:
        return None
    last = (*read.args[:-1], own)
    value = meaning.scalar(node.args[3])
    value = M.ne(value, E.ZERO) if meaning.kind(node) == "bool" else value
    mine = meaning.read(source, last)
    count = _how_many(meaning, topk, len(last) - 1, last, lambda other: M.lt(mine, other))
    wanted = _without_all(meaning.integer(topk.args[1]), meaning.shape(source)[-1])
    among = M.and_(M.lt(count, wanted), M.eq(there, own))
    found = M.where(among, value, meaning.read(node.args[0], at))
    unknown = E.make("raw", (mine,), "some")
    return M.where(M.or_(*(M.eq(n, own) for n in others)), unknown, found) if others else found


def _others(place: Expr, read: Expr) -> list[Expr] | None:
    """The places that take the place of a chosen one, which is `read`, where it is not wanted, without those
    before the first; None if they follow from it."""
    if place is read or ranges.is_at_most(place, E.const(-1)):
        return []
    if place.op != "where":
        return None if read in set(E.walk(place)) else [place]
    found = [_others(branch, read) for branch in place.args[1:]]
    return None if None in found else [n for part in found if part is not None for n in part]


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
    count = _how_many(meaning, topk, dim, read.args, lambda x: M.lt(other, x) if strict else M.le(other, x))
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


_ALONG = frozenset({
    "argmax", "argmin", "argsort", "cummax", "cummin", "cumprod", "kthvalue", "logcumsumexp", "median",
    "mode", "nanmedian", "nansum", "prod", "quantile", "nanquantile", "softmax", "_softmax", "log_softmax",
    "_log_softmax", "sort", "std", "std_mean", "topk", "unique_consecutive", "var", "var_mean", "all", "any",
    "cumsum", "sum", "mean", "amax", "amin", "max", "min", "logsumexp", "linalg_vector_norm", "glu",
})  # fmt: skip
"""Operations that mix the dimensions of their argument `dim` alone. What they give has all others, and either
those too or not."""
_LAST = {
    "layer_norm": 1, "native_layer_norm": 1, "rms_norm": 1, "_fused_rms_norm": 1,
    "linalg_cholesky_ex": -2, "cholesky": -2, "linalg_inv_ex": -2, "linalg_matrix_exp": -2, "linalg_qr": -2,
    "linalg_solve_triangular": -2, "triangular_solve": -2, "_linalg_svd": -2, "_linalg_eigh": -2,
}  # fmt: skip
"""Operations that mix their last dimensions: so many (negative), or as many as their argument of this number
lists."""
_AFTER_THE_FIRST = frozenset({"group_norm", "native_group_norm", "conv1d", "conv2d", "conv3d", "convolution"})
"""Operations that mix all dimensions but the first."""


def element(meaning: Meaning, node: fx.Node, at: Indices) -> Expr:
    """An element of the node as a formula of elements of its operands. Raises `Unliftable`: what it reads is
    not known."""
    among_the_largest = chosen(meaning, node, at)
    if among_the_largest is not None:
        return among_the_largest
    source: Any = node.args[0] if is_part(node) else node
    view = nodes.view(source)
    if isinstance(view, (nodes.Attention, nodes.LatentAttention)) and (
        not is_part(node) or node.args[1] == 0
    ):
        return _attention(meaning, view, at)
    operands = [n for n in source.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    if torch.Tag.pointwise in getattr(source.target, "tags", ()):
        reads = [meaning.read_broadcast(n, at) for n in operands]
    else:
        mixed = _mixed(source)
        reads = [_read(meaning, n, at, mixed, n is source.args[0]) for n in operands]
    return E.make("raw", tuple(reads), "some")


def _mixed(node: fx.Node) -> set[int]:
    """The dimensions of the first operand that a node mixes."""
    name = str(node.target).removeprefix("aten.").partition(".")[0]
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node) or not isinstance(first.meta.get("val"), Tensor):
        raise Unliftable(f"what the operation {name} reads is not known")
    rank = first.meta["val"].ndim
    if name == "_native_batch_norm_legit_no_training":
        return set()
    if name in _ALONG:
        dims = argument(node, "dim")
        dims = range(rank) if dims in (None, []) else dims
        return {axis(d, rank) for d in ([dims] if isinstance(dims, int) else dims)}
    if name in _LAST:
        count = _LAST[name]
        count = -count if count < 0 else len(node.args[count])  # type: ignore[arg-type]
        return set(range(rank - count, rank))
    if name in _AFTER_THE_FIRST:
        return set(range(1, rank))
    raise Unliftable(f"what the operation {name} reads is not known")


def _read(meaning: Meaning, operand: fx.Node, at: Indices, mixed: set[int], is_first: bool) -> Expr:
    """What is read of an operand: of the first its own place where nothing mixes, of weights every place."""
    shape = meaning.shape(operand)
    own = [d for d in range(len(shape)) if d not in mixed] if is_first else []
    kept = dict(zip(own, at if len(at) == len(own) else [at[d] for d in own], strict=True))
    return meaning.read(operand, tuple(kept.get(d, meaning.fresh(n)) for d, n in enumerate(shape)))


def _attention(meaning: Meaning, view: nodes.Attention | nodes.LatentAttention, at: Indices) -> Expr:
    """What an attention node stands for (`ir/language/score.py`)."""
    batch, head, query, column = at
    if isinstance(view, nodes.LatentAttention):
        keys, values = view.latent, view.latent
        ups = [w for w in (view.key_up, view.value_up) if w is not None]
    else:
        keys, values, ups = view.k, view.v, []
    heads = meaning.shape(ups[0])[0] if ups else meaning.shape(keys)[1]
    group = M.floordiv(meaning.shape(view.q)[1], heads)
    of_keys = M.floordiv(head, group)
    sizes = [meaning.renamed(size_expression(getattr(s, "meta", {}).get("val", s))) for s in view.sizes]

    def made(value: fx.Node, *place: Expr) -> Expr:
        """An element of a key or a value: of a latent, it follows from all that its token has there."""
        if isinstance(view, nodes.Attention):
            return meaning.read(value, place)
        of_token = meaning.read(value, (batch, E.ZERO, place[2], meaning.fresh(meaning.shape(value)[3])))
        weights = [meaning.read(w, (of_keys, *map(meaning.fresh, meaning.shape(w)[1:]))) for w in ups]
        return E.make("raw", (of_token, *weights), "some")

    def at_key(key: Expr) -> tuple[Expr, dict[Expr, Expr]]:
        """The score of a key, and what the program's names mean there."""
        inner = meaning.fresh(meaning.shape(view.q)[3])
        q = meaning.read(view.q, (batch, head, query, inner))
        dot = M.total(inner, M.mul(q, made(keys, batch, of_keys, key, inner)))
        names = {E.var(n): place for n, place in zip("bhqk", (batch, head, query, key), strict=True)}
        names |= {E.size(f"n{n}"): size for n, size in enumerate(sizes)} | {DOT: dot, SCORE: dot}
        for statement in view.program.statements:
            if isinstance(statement, Score):
                names[SCORE] = meant(statement.value, names)
            elif isinstance(statement, Keep):
                fill = meant(statement.fill, names)
                names[SCORE] = M.where(meant(statement.predicate, names), names[SCORE], fill)
        return names[SCORE], names

    def meant(formula: Expr, names: dict[Expr, Expr]) -> Expr:
        def change(node: Expr, args: Indices) -> Expr:
            if node in names:
                return names[node]
            if node.op == "read":
                return meaning.read(view.reads[node.value], args)
            return node if args == node.args else M.canonical(E.with_args(node, args))

        return E.rebuild(formula, change)

    extent = meaning.shape(keys)[2]
    key, other = meaning.fresh(extent), meaning.fresh(extent)
    score, names = at_key(key)
    weight = M.total(other, M.exp(at_key(other)[0]))
    sinks = [s.value for s in view.program.statements if isinstance(s, Sink)]
    weight = M.mul(M.exp(score), M.recip(M.add(weight, *(M.exp(meant(s, names)) for s in sinks))))
    for statement in view.program.statements:
        if not isinstance(statement, (Score, Keep, Sink)):
            weight = meant(statement.value, {**names, WEIGHT: weight})
    return M.total(key, M.mul(weight, made(values, batch, of_keys, key, column)))
