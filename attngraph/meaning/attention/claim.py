"""What the recogniser claims: an attention, written down as views of tensors that the graph has.

`attention.py` and `joined.py` find out what an attention is made of; here that becomes operands in the op's
layout (`Views`) and indices of a score program. Nothing here looks at a graph's operations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from torch import fx

from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.parser import LONGEST
from attngraph.ir.language.score import ScoreProgram, Sink
from attngraph.meaning.algebra import simplify as M
from attngraph.meaning.algebra.digits import Digits, extent
from attngraph.meaning.attention import layout, program
from attngraph.meaning.attention.layout import Step
from attngraph.meaning.attention.program import Source
from attngraph.meaning.attention.roles import Roles
from attngraph.meaning.attention.weighted_sums import Refusal
from attngraph.meaning.element import Meaning, has_data


@dataclasses.dataclass(frozen=True)
class View:
    """A tensor of the graph, the views that present it as `[B, H, S, D]`, and a number to multiply it by."""

    base: fx.Node
    steps: tuple[Step, ...]
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Operand:
    """Views of tensors of the graph, joined along a dimension: their width, or their keys."""

    views: tuple[View, ...]
    along: int = -1

    @property
    def bases(self) -> tuple[fx.Node, ...]:
        return tuple(view.base for view in self.views)


@dataclasses.dataclass(frozen=True)
class Attention:
    """A claim: `node` equals attention(q, k, v, reads, sizes, program), seen through `output`.

    `scores` are the nodes that compute the dot, if the model has some: several, if it adds up products that
    are the dot of joined vectors. `heads`, `kv_heads`, `head_dim` and `value_dim` are size expressions.
    """

    node: fx.Node
    scores: tuple[fx.Node, ...]
    q: Operand
    k: Operand
    v: Operand
    program: ScoreProgram
    reads: tuple[Source, ...]
    sizes: tuple[Expr, ...]
    output: tuple[Step, ...]
    heads: Expr
    kv_heads: Expr
    head_dim: Expr
    value_dim: Expr

    @property
    def sinks(self) -> frozenset[Source]:
        """What the program's sinks read."""
        sinks = [s.value for s in self.program.statements if isinstance(s, Sink)]
        return frozenset(self.reads[n.value] for x in sinks for n in E.walk(x) if n.op == "read")


def side_by_side(
    q: Sequence[View], k: Sequence[View], factors: Sequence[float]
) -> tuple[Operand, Operand, float]:
    """One dot of joined vectors for a sum of products: what differs in their factors is put on the queries,
    and the first one's factor is returned for all."""
    whole = [a.factor * b.factor * c for a, b, c in zip(q, k, factors, strict=True)]
    scaled = (dataclasses.replace(v, factor=f / whole[0]) for v, f in zip(q, whole, strict=True))
    plain = (dataclasses.replace(v, factor=1.0) for v in k)
    return Operand(tuple(scaled)), Operand(tuple(plain)), whole[0]


def divisors(reads: Iterable[Expr]) -> frozenset[str]:
    """The sizes by which indices of the reads are divided: as numbers they could be made digits of."""
    divided = [n.args[1] for r in reads for n in E.walk(r) if n.op in ("floordiv", "mod")]
    return frozenset(n.value for divisor in divided for n in E.walk(divisor) if n.op == "size")


def in_order(keys: tuple[Expr, ...], read: Expr) -> tuple[Expr, ...]:
    """The keys as the dimensions of a tensor have them: the order in which they need not be moved."""
    place = {k: next((i for i, a in enumerate(read.args) if k in a.free), len(read.args)) for k in keys}
    return tuple(sorted(keys, key=place.__getitem__))


def beside_keys(score: Expr, keys: tuple[Expr, ...], digits: dict[Expr, Digits]) -> frozenset[Expr]:
    """Variables that stand in one index formula with a key: `k <= q`, `k - q`."""
    places = {d for key in keys for d in digits.get(key, (key,))}
    found: set[Expr] = set()
    for node in E.walk(score):
        is_formula = node.op in ("le", "lt", "eq", "add", "abs") and node.args[0].kind == "int"
        if is_formula and not has_data(node) and not node.free.isdisjoint(places):
            found |= node.free - places
    return frozenset(found)


def is_closed(node: Expr) -> bool:
    return all(v.value in ("b", "h", "q", "k") for v in node.free) and not any(
        n.op in E.BINDERS for n in E.walk(node)
    )


def program_indices(assigned: Roles, cut: dict[Expr, Expr]) -> dict[Expr, Expr]:
    """Each digit as a formula of the program's b, h, q, k; each cut variable through its digits."""
    mapping: dict[Expr, Expr] = {}
    for name, digits in (
        ("b", assigned.batch), ("h", assigned.heads), ("q", assigned.queries), ("k", assigned.keys),
    ):  # fmt: skip
        whole = E.var(name, extent(digits))
        below: Expr = E.ONE
        for place, digit in enumerate(reversed(digits)):
            value = M.floordiv(whole, below)
            leading = place == len(digits) - 1
            mapping[digit] = value if leading else M.mod(value, digit.args[0])
            below = M.mul(below, digit.args[0])
    for variable, spelled in cut.items():
        mapping[variable] = M.substitute(spelled, mapping)
    return mapping


def write(
    node: fx.Node,
    scores: tuple[fx.Node, ...],
    operands: tuple[Operand, Operand, Operand],
    assigned: Roles,
    rename: dict[Expr, Expr],
    formulas: tuple[Expr, Expr, Expr | None],
    output: tuple[Step, ...],
    head_dim: Expr,
) -> Attention | Refusal:
    """The claim, its formulas (score, weight, sink) as a score program."""
    score, weight, sink = (None if x is None else M.substitute(x, rename) for x in formulas)
    assert score is not None and weight is not None
    written = [x for x in (score, weight, sink) if x is not None]
    if any(n.op == "sum" for x in (weight, sink) if x is not None for n in E.walk(x)):
        return Refusal("its weights depend on a sum over the keys otherwise than those of a softmax do")
    if not all(map(is_closed, written)):
        return Refusal("the scores depend on something that is no batch, head, query or key")
    # Written out, which takes long where parts are used many times; four nodes make a word or more.
    if any(x.words > 4 * LONGEST for x in written):
        return Refusal(f"its scores are a formula of more than {LONGEST} words")
    built = program.build(score, weight, sink)
    q, k, v = operands
    return Attention(
        node, scores, q, k, v, built.program, built.reads, built.sizes, output, heads=extent(assigned.heads),
        kv_heads=extent(assigned.kv_heads), head_dim=head_dim, value_dim=extent(assigned.values),
    )  # fmt: skip


class Views:
    """Presents operands and the result in the op's layout."""

    def __init__(self, meaning: Meaning, assigned: Roles, cut: dict[Expr, Expr]) -> None:
        self.meaning, self.assigned, self.cut = meaning, assigned, cut

    def operand(
        self, chain: tuple[tuple[Expr, float], ...], heads: Digits, rows: Digits, columns: Digits
    ) -> View:
        """The operand as `[batch, heads, rows, columns]`, from the deepest tensor that allows it."""
        wanted = (self.assigned.batch, heads, rows, columns)
        for read, factor in reversed(chain):
            index = tuple(M.substitute(i, self.cut) for i in read.args)
            whole, index = merge_digits(wanted, index)
            try:
                steps = layout.solve(self.meaning.shape(read.value), index, whole, whole)
            except layout.NoView:
                continue
            return View(read.value, tuple(steps), factor)
        raise layout.NoView

    def output(self, dimensions: tuple[Digits, ...], output: tuple[Expr, ...]) -> list[Step]:
        """Steps from `[B, Hq, Sq, Dv]` to the shape of the node."""
        assigned = self.assigned
        have = (*assigned.batch, *assigned.heads, *assigned.queries, *assigned.values)
        want = [d for dimension in dimensions for d in dimension]
        steps = [Step("reshape", (), tuple(v.args[0] for v in have))]
        order = tuple(have.index(d) for d in want)
        if order != tuple(range(len(order))):
            steps.append(Step("permute", order))
        if any(len(dimension) != 1 for dimension in dimensions):
            steps.append(Step("reshape", (), tuple(v.args[0] for v in output)))
        packed = (assigned.batch, assigned.heads, assigned.queries, assigned.values)
        return steps if any(len(p) != 1 for p in packed) else steps[1:]


def merge_digits(wanted: layout.Roles, index: tuple[Expr, ...]) -> tuple[layout.Roles, tuple[Expr, ...]]:
    """Join neighbouring digits of a role that the index only ever uses together."""
    merged: list[Digits] = []
    for role in wanted:
        kept = list(role)
        place = 0
        while place + 1 < len(kept):
            slow, fast = kept[place], kept[place + 1]
            both = E.var(f"{slow.value}&{fast.value}", M.mul(slow.args[0], fast.args[0]))
            pair = M.add(M.mul(slow, fast.args[0]), fast)
            tried = tuple(_replace_pair(i, slow, fast, both) for i in index)
            if any(t is None for t in tried):
                place += 1
                continue
            del pair
            index = tuple(t for t in tried if t is not None)
            kept[place : place + 2] = [both]
        merged.append(tuple(kept))
    return tuple(merged), index


def _replace_pair(index: Expr, slow: Expr, fast: Expr, both: Expr) -> Expr | None:
    """`index` with slow * extent(fast) + fast written as `both`; None where they occur otherwise."""
    if slow not in index.free and fast not in index.free:
        return index
    if slow not in index.free or fast not in index.free:
        return None
    replaced = M.substitute(index, {slow: E.ZERO, fast: both})
    spelled = M.substitute(replaced, {both: M.add(M.mul(slow, fast.args[0]), fast)})
    return replaced if spelled is index else None
