"""The recogniser: is this node an attention, and if so which?

There is one, and it knows no spellings. It asks for the meaning of one element of a node that sums
products (`meaning/element.py`), takes that apart into weights and values (`normalised.py`), finds
the dot inside the scores (`dot.py`), gives every index variable its role (`roles.py`), and writes
what is left as a score program (`program.py`). What it returns is a claim; the pass that uses it
checks the claim in float64 before anything is replaced (`meaning/check.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from torch import fx

from attngraph.ir import expr as E
from attngraph.ir.expr import Expr
from attngraph.ir.parser import LONGEST
from attngraph.ir.score import DOT, WEIGHT, ScoreProgram
from attngraph.meaning import dot as dots
from attngraph.meaning import layout, normalised, program, roles
from attngraph.meaning import simplify as M
from attngraph.meaning.digits import Digits, extent, split_digits
from attngraph.meaning.digits import joined as digits_joined
from attngraph.meaning.element import Meaning, has_data, is_part
from attngraph.meaning.layout import Step
from attngraph.meaning.normalised import Refusal, Unnormalised
from attngraph.meaning.program import Source
from attngraph.meaning.roles import Roles
from attngraph.meaning.rules import Category, Unliftable
from attngraph.meaning.rules.reduction import LOG_SOFTMAX, SOFTMAX

SOFTMAX_LIKE = frozenset(f"aten.{n}" for n in (*SOFTMAX, "scaled_dot_product_attention.default"))
_EXPONENTIALS = SOFTMAX_LIKE | {
    f"aten.{n}" for n in (*LOG_SOFTMAX, "exp.default", "exp2.default", "logsumexp.default", "pow.Scalar")
}
_ROOTS = ("aten.mul.", "aten.div.", "aten.true_divide.", "aten.einsum.")


@dataclasses.dataclass(frozen=True)
class View:
    """A tensor of the graph, the views that present it as `[B, H, S, D]`, and a number to multiply it by."""

    base: fx.Node
    steps: tuple[Step, ...]
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Operand:
    """Views of tensors of the graph, one beside the other along the last dimension."""

    views: tuple[View, ...]

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


class Recogniser:
    """Recognition over one graph. Nodes must be asked about in the graph's order."""

    def __init__(self, meaning: Meaning, gradients: bool) -> None:
        self.meaning = meaning
        self.gradients = gradients
        self._indices: dict[fx.Node, bool] = {}
        self._roots: dict[fx.Node, frozenset[fx.Node]] = {}
        self._near: dict[fx.Node, frozenset[fx.Node]] = {}
        self._unnormalised: set[fx.Node] = set()

    def near(self, node: fx.Node) -> frozenset[fx.Node]:
        """The exponentials that this node's elements are computed from, without a contraction or
        an opaque op in between."""
        if node not in self._near:
            self._near[node] = self._find_near(node)
        return self._near[node]

    def _find_near(self, node: fx.Node) -> frozenset[fx.Node]:
        if node.op != "call_function":
            return frozenset()
        if str(node.target) in _EXPONENTIALS:
            return frozenset(() if self.is_index(node) else (node,))
        category = self.meaning.category(node)
        if category is None and not is_part(node):
            return frozenset()
        if category is Category.CONTRACTION and node not in self._unnormalised:
            return frozenset()
        if category is Category.REDUCTION and "sum" not in str(node.target):
            return frozenset()
        return frozenset().union(*(self.near(n) for n in node.all_input_nodes))

    def is_index(self, node: fx.Node) -> bool:
        """Whether a node is computed from indices alone, as ALiBi's slopes are."""
        if node not in self._indices:
            category = self.meaning.category(node)
            elementwise = (Category.MOVEMENT, Category.POINTWISE, Category.INDEX)
            self._indices[node] = category in elementwise and all(
                self.is_index(n) for n in node.all_input_nodes if self.meaning.is_tensor(n)
            )
        return self._indices[node]

    def examine(self, node: fx.Node) -> Attention | Refusal | None:
        """What this node is; None where nothing about it looks like attention."""
        if not self._is_root(node):
            return None
        try:
            found = self._examine(node)
        except Unliftable as problem:
            found = Refusal(str(problem))
        if isinstance(found, Refusal) and self.meaning.obstacles:
            return dataclasses.replace(found, sizes=found.sizes | self.meaning.obstacles)
        if isinstance(found, Unnormalised):
            self._unnormalised.add(node)
            self._near.pop(node, None)
            return None
        return found

    def _is_root(self, node: fx.Node) -> bool:
        if node.op != "call_function" or not self.meaning.is_tensor(node):
            return False
        if str(node.target) == "aten.scaled_dot_product_attention.default":
            return True
        category = self.meaning.category(node)
        may_be = category is Category.CONTRACTION or str(node.target).startswith(("aten.sum.", *_ROOTS))
        return may_be and any(self.near(n) for n in node.all_input_nodes)

    def _examine(self, node: fx.Node) -> Attention | Refusal | Unnormalised | None:
        meaning = self.meaning
        shape = meaning.shape(node)
        output = tuple(E.var(f"o{d}", length) for d, length in enumerate(shape))
        at = tuple(E.ZERO if E.is_const(v.args[0], 1) else v for v in output)
        lifted = meaning.lift(meaning.element(node, at), lambda r: bool(self.near(r.value)))
        parts = normalised.weighted_sum(lifted, meaning.elementwise)
        if not isinstance(parts, normalised.WeightedSum):
            return parts
        score = dots.look_into(meaning, parts.score, parts.keys, parts.value.free, node.meta["val"].dtype)
        # What is the same for all keys (a subtracted maximum) changes no weight; a sink feels it.
        score, shift = normalised.split_by(score, parts.keys)
        if self.gradients and not self._sources(shift) <= self._sources(M.mul(M.number(score), parts.value)):
            score = M.add(score, shift)  # its gradient is zero, but somebody may ask for it
        elif parts.sink is not None:
            parts = dataclasses.replace(parts, sink=M.sub(parts.sink, shift))
        found = dots.find_dot(meaning, score, parts.keys, parts.value.free)
        found = found or dots.dot_of_width_one(
            score, parts.keys, parts.value.free, parts.value.value.meta["val"].dtype
        )
        if found is None:
            return Refusal("the scores are no product of a query side and a key side over a shared dimension")
        dot, score = found
        # What a contraction adds by itself (baddbmm's bias) has not been looked into yet.
        score = dots.look_into(meaning, score, parts.keys, parts.value.free, node.meta["val"].dtype)
        claim = self.claim(node, output, parts, dot, score)
        joined: tuple[tuple[dots.Dot, float], ...] = ()
        while True:
            for other, factor, rest in dots.other_dots(meaning, score, parts.keys):
                if not self._may_join(other, dot, parts):
                    continue
                wider = self.claim(node, output, parts, dot, rest, (*joined, (other, factor)))
                if isinstance(wider, Attention):
                    claim, score, joined = wider, rest, (*joined, (other, factor))
                    break
            else:
                return claim

    def _may_join(self, other: dots.Dot, dot: dots.Dot, parts: normalised.WeightedSum) -> bool:
        """Whether a second product can be a part of the dot: its key side is one of keys, no table of
        distances."""
        of_keys = dot.k[0][0].free | parts.value.free | set(parts.keys)
        return other.k[0][0].free <= of_keys | set(other.inner)

    def _sources(self, node: Expr) -> frozenset[fx.Node]:
        """The floating inputs of the graph that an expression is computed from."""
        reads = [n.value for n in E.walk(node) if n.op == "read"]
        return frozenset().union(*map(self._sources_of, reads))

    def _sources_of(self, node: fx.Node) -> frozenset[fx.Node]:
        if node.op == "placeholder":
            return frozenset((node,) if node.meta["val"].is_floating_point() else ())
        if node not in self._roots:
            self._roots[node] = frozenset().union(*map(self._sources_of, node.all_input_nodes))
        return self._roots[node]

    def claim(
        self,
        node: fx.Node,
        output: tuple[Expr, ...],
        parts: normalised.WeightedSum,
        dot: dots.Dot,
        score: Expr,
        joined: tuple[tuple[dots.Dot, float], ...] = (),
    ) -> Attention | Refusal:
        """The claim that is left to write down once the dot is known. `joined`: products that are added to
        it, each with the factor that makes it a part of the dot."""
        meaning = self.meaning
        of_value = parts.value.free
        dtype = node.meta["val"].dtype
        weight = dots.look_into(meaning, parts.weight, parts.keys, of_value, dtype)
        sink = parts.sink and dots.look_into(meaning, parts.sink, parts.keys, of_value, dtype)
        values = dots.chain(meaning, parts.value)
        parts = dataclasses.replace(parts, keys=_in_order(parts.keys, dot.k[0][0]))
        # Where an operand is deepest a view of something, variables may appear divided: cut them.
        products = (dot, *(other for other, _ in joined))
        qs, ks, v = [d.q[-1][0] for d in products], [d.k[-1][0] for d in products], values[-1][0]
        variables = [*output, *parts.keys, *(i for d in products for i in d.inner)]
        digits = split_digits(variables, [a for read in (*qs, *ks, v) for a in read.args])
        if digits is None:
            digits = {}
        cut = {variable: digits_joined(found) for variable, found in digits.items()}

        def digits_of(variable: Expr) -> Digits:
            if E.is_const(variable.args[0], 1):
                return ()
            return digits.get(variable, (variable,))

        assigned = roles.assign(
            tuple(digits_of(o) for o in output),
            tuple(d for key in parts.keys for d in digits_of(key)),
            tuple(d for product in products for i in product.inner for d in digits_of(i)),
            q=frozenset().union(*(M.substitute(q, cut).free for q in qs)),
            k=frozenset().union(*(M.substitute(k, cut).free for k in ks)),
            v=M.substitute(v, cut).free,
            scores=M.substitute(M.mul(M.number(score), weight), cut).free,
            beside_keys=_beside_keys(M.substitute(score, cut), parts.keys, digits),
        )
        if isinstance(assigned, Refusal):
            return assigned
        views = _Views(meaning, assigned, cut)
        inners = [tuple(d for i in product.inner for d in digits_of(i)) for product in products]
        try:
            sides_q = [
                views.operand(p.q, assigned.heads, assigned.queries, i)
                for p, i in zip(products, inners, strict=True)
            ]
            sides_k = [
                views.operand(p.k, assigned.kv_heads, assigned.keys, i)
                for p, i in zip(products, inners, strict=True)
            ]
            side_v = views.operand(values, assigned.kv_heads, assigned.keys, assigned.values)
        except layout.NoView:
            return Refusal("an operand is no view of a tensor of the model", _divisors((*qs, *ks, v)))
        rename = _program_indices(assigned, cut)
        operand_q, operand_k, factor = _side_by_side(sides_q, sides_k, [1.0, *(f for _, f in joined)])
        scaled = M.mul(E.const(factor), DOT) if factor != 1 else DOT
        score = M.substitute(score, {DOT: scaled, **rename})
        weight = M.substitute(weight, rename)
        if side_v.factor != 1:
            weight = M.mul(E.const(side_v.factor), weight)
        sink = None if sink is None else M.substitute(sink, rename)
        stray = [x for x in (score, weight, sink) if x is not None and not _is_closed(x)]
        if stray:
            return Refusal("the scores depend on something that is no batch, head, query or key")
        # Written out, which takes long where parts are used many times; four nodes make a word or more.
        if any(x is not None and E.is_longer(x, 4 * LONGEST) for x in (score, weight, sink)):
            return Refusal(f"its scores are a formula of more than {LONGEST} words")
        built = program.build(score, weight, sink)
        return Attention(
            node, tuple(d.node for d in products if d.node is not None), operand_q, operand_k,
            Operand((dataclasses.replace(side_v, factor=1.0),)), built.program, built.reads, built.sizes,
            tuple(views.output(tuple(digits_of(o) for o in output), output)),
            heads=extent(assigned.heads), kv_heads=extent(assigned.kv_heads),
            head_dim=M.add(*map(extent, inners)), value_dim=extent(assigned.values),
        )  # fmt: skip


def _side_by_side(
    q: Sequence[View], k: Sequence[View], factors: Sequence[float]
) -> tuple[Operand, Operand, float]:
    """One dot of joined vectors for a sum of products: what differs in their factors is put on the queries,
    and the first one's factor is returned for all."""
    whole = [a.factor * b.factor * c for a, b, c in zip(q, k, factors, strict=True)]
    scaled = (dataclasses.replace(v, factor=f / whole[0]) for v, f in zip(q, whole, strict=True))
    plain = (dataclasses.replace(v, factor=1.0) for v in k)
    return Operand(tuple(scaled)), Operand(tuple(plain)), whole[0]


def _divisors(reads: Iterable[Expr]) -> frozenset[str]:
    """The sizes by which indices of the reads are divided: as numbers they could be made digits of."""
    divided = [n.args[1] for r in reads for n in E.walk(r) if n.op in ("floordiv", "mod")]
    return frozenset(n.value for divisor in divided for n in E.walk(divisor) if n.op == "size")


def _in_order(keys: tuple[Expr, ...], read: Expr) -> tuple[Expr, ...]:
    """The keys as the dimensions of a tensor have them: the order in which they need not be moved."""
    place = {k: next((i for i, a in enumerate(read.args) if k in a.free), len(read.args)) for k in keys}
    return tuple(sorted(keys, key=place.__getitem__))


def _beside_keys(score: Expr, keys: tuple[Expr, ...], digits: dict[Expr, Digits]) -> frozenset[Expr]:
    """Variables that stand in one index formula with a key: `k <= q`, `k - q`."""
    places = {d for key in keys for d in digits.get(key, (key,))}
    found: set[Expr] = set()
    for node in E.walk(score):
        is_formula = node.op in ("le", "lt", "eq", "add", "abs") and node.args[0].kind == "int"
        if is_formula and not has_data(node) and not node.free.isdisjoint(places):
            found |= node.free - places
    return frozenset(found)


def _is_closed(node: Expr) -> bool:
    return all(v.value in ("b", "h", "q", "k") for v in node.free) and not any(
        n.op in E.BINDERS for n in E.walk(node)
    )


def _program_indices(assigned: Roles, cut: dict[Expr, Expr]) -> dict[Expr, Expr]:
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


class _Views:
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


__all__ = ["SOFTMAX_LIKE", "WEIGHT", "Attention", "Operand", "Recogniser", "Refusal"]
