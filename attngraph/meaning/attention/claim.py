"""What the recogniser claims: an attention whose operands are views of tensors of the graph.

`recogniser.py` finds the pieces of an attention: values weighted by one softmax over the keys, which come in
one part or several, each with its dot product. Here index variables get their roles (`roles.py`), tensors
become operands in the op's layout (`layout.py`), and the rest of the scores becomes a score program
(`program.py`). Nothing here looks at a graph's operations.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from torch import fx

from attngraph.ir import budgets
from attngraph.ir.language import DOT, INDICES, E, Expr, ScoreProgram, Sink
from attngraph.meaning.algebra import Digits, M, extent, recombined, split_digits, taken_apart
from attngraph.meaning.attention import dot as dots
from attngraph.meaning.attention import layout, program, roles
from attngraph.meaning.attention.dot import Chain
from attngraph.meaning.attention.layout import ViewOp
from attngraph.meaning.attention.normaliser import Refusal
from attngraph.meaning.attention.program import Source
from attngraph.meaning.attention.roles import Roles, other_axes
from attngraph.meaning.attention.weighted_sums import KeyPart, WeightedSum
from attngraph.meaning.element import Meaning

SECOND_SUM = "its weights depend on a second sum over the keys, besides that of the softmax"


@dataclasses.dataclass(frozen=True)
class View:
    """A tensor of the graph, the views that present it as `[B, H, S, D]`, a number to multiply it by, and how
    many columns of zeros stand before and after it."""

    base: fx.Node
    steps: tuple[ViewOp, ...]
    factor: float = 1.0
    zeros: tuple[Expr, Expr] = (E.ZERO, E.ZERO)

    @property
    def repeats(self) -> bool:
        """Whether it copies its tensor: a dimension is expanded and then joined with others."""
        steps = [step.op for step in self.steps]
        return "expand" in steps and "reshape" in steps[steps.index("expand") :]


@dataclasses.dataclass(frozen=True)
class Operand:
    """Views of tensors of the graph: for each part of the keys, those that are joined along the width."""

    parts: tuple[tuple[View, ...], ...]

    @property
    def bases(self) -> tuple[fx.Node, ...]:
        return tuple(view.base for part in self.parts for view in part)


@dataclasses.dataclass(frozen=True)
class Attention:
    """A claim: `node` equals attention(q, k, v, reads, sizes, program), seen through `output`.

    `scores` are the nodes that compute the dot, if there are any: several, if the model adds up products or
    multiplies parts of the keys separately. `head_dim` and `value_dim` are size expressions, and so are
    `axes`: factors of the number of heads that are other axes of what the model was given, first those that
    keys have too and then those that queries alone have.
    """

    node: fx.Node
    scores: tuple[fx.Node, ...]
    q: Operand
    k: Operand
    v: Operand
    program: ScoreProgram
    reads: tuple[Source, ...]
    sizes: tuple[Expr, ...]
    output: tuple[ViewOp, ...]
    head_dim: Expr
    value_dim: Expr
    axes: tuple[tuple[Expr, ...], tuple[Expr, ...]] = ((), ())

    @property
    def sinks(self) -> frozenset[Source]:
        """What the program's sinks read."""
        sinks = [s.value for s in self.program.statements if isinstance(s, Sink)]
        return frozenset(self.reads[n.value] for x in sinks for n in E.reads(x))


NO_VIEW = "its queries, keys or values are no view of a tensor of the model"
COPIED = (
    "its keys and its values vary with different dimensions of the result, as where each pair of tokens has "
    "a value of its own or where scores are mixed between heads: as an attention, both would be copied for "
    "each query"
)
COPIED_PARTS = (
    "its keys come in parts that vary with different dimensions of the result, as where a row and a column "
    "of keys share one softmax: as one attention, each query would need a copy of its keys"
)


def write_claim(
    meaning: Meaning, node: fx.Node, output: tuple[Expr, ...], found: WeightedSum
) -> Attention | Refusal:
    """The claim for a weighted sum in which the products of all parts are known.

    Args:
        output: the index variables of `node`'s dimensions; `found` is the element there.
    """
    values = [dots.chain(meaning, part.value) for part in found.parts]
    writer = _Writer(meaning, output, found, values)
    refused = Refusal(NO_VIEW, writer.divisors())
    while True:
        assigned = writer.assign_roles()
        if isinstance(assigned, Refusal):
            return assigned
        try:
            return writer.write(node, assigned)
        except _NotSeen as operand:
            # Roles followed from a tensor that the operand is no view of: try the one before it.
            if len(operand.chain) == 1:
                return refused
            writer = _Writer(meaning, output, *_without_deepest(found, values, operand.chain))
            found, values = writer.found, writer.values


class _NotSeen(layout.NoView):
    """An operand is a view of no tensor in its chain."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain


def _without_deepest(
    found: WeightedSum, values: Sequence[Chain], chain: Chain
) -> tuple[WeightedSum, list[Chain]]:
    """The same sum, where an operand's chain ends one tensor earlier."""

    def shorter(other: Chain) -> Chain:
        return other[:-1] if other is chain else other

    def of(part: KeyPart) -> KeyPart:
        products = (dataclasses.replace(p, q=shorter(p.q), k=shorter(p.k)) for p in part.products)
        return dataclasses.replace(part, products=tuple(products))

    return dataclasses.replace(found, parts=tuple(map(of, found.parts))), [shorter(v) for v in values]


class _Writer:
    """Builds one claim: holds its parts, and the digits into which index variables are cut."""

    def __init__(
        self, meaning: Meaning, output: tuple[Expr, ...], found: WeightedSum, values: Sequence[Chain]
    ) -> None:
        self.meaning, self.output, self.sink = meaning, output, found.sink
        self.found, self.values = found, list(values)
        self.parts = [
            dataclasses.replace(p, keys=_in_order(p.keys, p.products[0].k[0][0] if p.products else p.value))
            for p in found.parts
        ]
        self.products = [product for part in self.parts for product in part.products]
        chains = [p.q for p in self.products], [p.k for p in self.products], self.values
        self.q, self.k, self.v = ([chain[-1][0] for chain in side] for side in chains)
        keys, inner = (p.keys for p in self.parts), (p.inner for p in self.products)
        self.summed = tuple(v for variables in (*keys, *inner) for v in variables)
        # In the index of the deepest tensor that an operand is a view of, variables may be divided: cut them.
        places = [place for read in (*self.q, *self.k, *self.v) for place in read.args]
        self.digits = split_digits((*output, *self.summed), places) or {}
        self.spelled = {variable: recombined(digits) for variable, digits in self.digits.items()}

    def cut(self, *variables: Expr) -> Digits:
        """The digits of several variables, one after the other."""
        varied = (v for v in variables if not E.is_const(v.args[0], 1))
        return tuple(d for v in varied for d in self.digits.get(v, (v,)))

    def free(self, expressions: Iterable[Expr]) -> frozenset[Expr]:
        """The digits that some of the expressions depend on."""
        return frozenset().union(*(M.substitute(x, self.spelled).free for x in expressions))

    def divisors(self) -> frozenset[str]:
        """Sizes that divide indices of operands: if they were numbers, the indices could become digits."""
        reads = (*self.q, *self.k, *self.v)
        divided = [n.args[1] for r in reads for n in E.walk(r) if n.op in ("floordiv", "mod")]
        return frozenset(n.value for divisor in divided for n in E.walk(divisor) if n.op == "size")

    def assign_roles(self) -> Roles | Refusal:
        scores = ((M.substitute(p.score, self.spelled), self.cut(*p.keys)) for p in self.parts)
        # Where there is no product, only the last dimension of the result counts as the width of values: the
        # batch stays one.
        alone = [v for v, part in zip(self.v, self.parts, strict=True) if not part.products]
        of_keys = self.free(alone) - frozenset(self.cut(self.output[-1]))
        return roles.assign(
            tuple(self.cut(o) for o in self.output), frozenset(self.cut(*self.summed)),
            q=self.free(self.q), k=self.free(self.k) | of_keys, v=self.free(self.v),
            scores=self.free(x for part in self.parts for x in (part.score, part.weight)),
            beside_keys=frozenset().union(*itertools.starmap(roles.beside_keys, scores)),
        )  # fmt: skip

    def write(self, node: fx.Node, assigned: Roles) -> Attention | Refusal:
        values = [
            self._view(chain, assigned, assigned.kv_heads, self.cut(*part.keys), assigned.values)
            for part, chain in zip(self.parts, self.values, strict=True)
        ]
        sides = [
            self._sides(part, assigned) if part.products else self._no_sides(value, assigned)
            for part, value in zip(self.parts, values, strict=True)
        ]
        queries, keys, scales = zip(*sides, strict=True)
        copied = all(any(view.repeats for view in views) for views in (*keys, values))
        if self.products and not assigned.queries and copied:
            return Refusal(COPIED_PARTS if len(self.parts) > 1 else COPIED)
        widths = [M.add(*(extent(self.cut(*p.inner)) for p in part.products)) for part in self.parts]
        query, keys, width = _one_query(queries, keys, widths)
        starts = [E.ZERO, *itertools.accumulate((extent(self.cut(*p.keys)) for p in self.parts), M.add)]
        key = E.var("k", starts.pop())
        names = [
            self._names(assigned, self.cut(*part.keys), M.sub(key, start))
            for part, start in zip(self.parts, starts, strict=True)
        ]
        sink = None if self.sink is None else M.substitute(self.sink, names[0])
        for own, scale in zip(names, scales, strict=True):
            own[DOT] = M.scale(scale, DOT)
        scores = [M.substitute(part.score, own) for part, own in zip(self.parts, names, strict=True)]
        weights = [
            M.substitute(M.scale(value.factor, part.weight), own)
            for part, own, value in zip(self.parts, names, values, strict=True)
        ]
        score, weight = _by_part(key, starts, scores), _by_part(key, starts, weights)
        refused = _refuse_as_program(score, weight, sink)
        if refused is not None:
            return refused
        return Attention(
            node, tuple(p.node for p in self.products if p.node is not None),
            Operand((query,)), Operand(keys), Operand(tuple((_plain(v),) for v in values)),
            *program.build(score, weight, sink), self._output(assigned),
            head_dim=width, value_dim=extent(assigned.values),
            axes=(self._axes(assigned, assigned.kv_heads), self._axes(assigned, assigned.groups)),
        )  # fmt: skip

    def _axes(self, assigned: Roles, heads: Digits) -> tuple[Expr, ...]:
        """How many places each axis has that is counted among the heads."""
        keys = self.cut(*(v for part in self.parts for v in part.keys))
        tokens = (*assigned.batch, *assigned.queries, *keys)
        operands = (M.substitute(x, self.spelled) for x in (*self.q, *self.k, *self.v))
        return tuple(d.args[0] for d in other_axes(self.meaning, heads, tokens, operands))

    def _sides(self, part: KeyPart, assigned: Roles) -> tuple[tuple[View, ...], tuple[View, ...], float]:
        """The queries and keys of a part's products side by side, and the factor of their dot: a.b + c.d is
        one dot of [a, c] and [b, d]. Where the products' factors differ, the queries are scaled."""
        queries, keys, factors = [], [], []
        for product in part.products:
            inner = self.cut(*product.inner)
            queries.append(self._view(product.q, assigned, assigned.heads, assigned.queries, inner))
            keys.append(self._view(product.k, assigned, assigned.kv_heads, self.cut(*part.keys), inner))
            factors.append(queries[-1].factor * keys[-1].factor * product.factor)
        pairs = zip(queries, factors, strict=True)
        scaled = tuple(dataclasses.replace(q, factor=f / factors[0]) for q, f in pairs)
        return scaled, tuple(map(_plain, keys)), factors[0]

    def _no_sides(self, value: View, assigned: Roles) -> tuple[tuple[View, ...], tuple[View, ...], float]:
        """Queries and keys of no width, for scores without a product."""
        rows = (assigned.batch, assigned.heads, assigned.queries)
        query = ViewOp("zeros", (), (*map(extent, rows), E.ZERO))
        key = ViewOp("narrow", (3,), (E.ZERO, E.ZERO))
        return (View(value.base, (query,)),), (View(value.base, (*value.steps, key)),), 1.0

    def _view(self, chain: Chain, assigned: Roles, heads: Digits, rows: Digits, columns: Digits) -> View:
        """An operand as `[batch, heads, rows, columns]`, from the deepest tensor that allows it."""
        wanted = (assigned.batch, heads, rows, columns)
        for read, factor in reversed(chain):
            index = tuple(M.substitute(i, self.spelled) for i in read.args)
            with contextlib.suppress(layout.NoView):
                return View(read.value, layout.solve(self.meaning.shape(read.value), index, wanted), factor)
        raise _NotSeen(chain)

    def _output(self, assigned: Roles) -> tuple[ViewOp, ...]:
        """The views from `[B, Hq, Sq, Dv]` to the shape of the node."""
        roles = (assigned.batch, assigned.heads, assigned.queries, assigned.values)
        packed, dimensions = layout.paired(roles, tuple(self.cut(o) for o in self.output))
        have = [d for role in packed for d in role]
        order = tuple(have.index(d) for dimension in dimensions for d in dimension)
        steps = []
        if any(len(role) != 1 for role in packed):
            steps.append(ViewOp("reshape", (), tuple(d.args[0] for d in have)))
        if order != tuple(range(len(order))):
            steps.append(ViewOp("permute", order))
        if any(len(dimension) != 1 for dimension in dimensions):
            steps.append(ViewOp("reshape", (), tuple(o.args[0] for o in self.output)))
        return tuple(steps)

    def _names(self, assigned: Roles, keys: Digits, key: Expr) -> dict[Expr, Expr]:
        """Each digit, and each variable that was cut, as a formula of the program's b, h, q and of a key."""
        mapping = taken_apart(key, keys)
        for name, digits in ("b", assigned.batch), ("h", assigned.heads), ("q", assigned.queries):
            mapping |= taken_apart(E.var(name, extent(digits)), digits)
        return mapping | {v: M.substitute(spelled, mapping) for v, spelled in self.spelled.items()}


def _one_query(
    queries: Sequence[tuple[View, ...]], keys: Sequence[tuple[View, ...]], widths: Sequence[Expr]
) -> tuple[tuple[View, ...], tuple[tuple[View, ...], ...], Expr]:
    """The queries of all parts, the keys of each, and their width. Where parts have different queries, these
    stand side by side, and the keys of a part have zeros where the queries of another part are."""
    own = dict(zip(queries, widths, strict=True))
    starts = dict(zip(own, itertools.accumulate(own.values(), M.add, initial=E.ZERO), strict=False))
    width = M.add(*own.values())
    padded = []
    for query, (first, *rest) in zip(queries, keys, strict=True):
        after = M.sub(width, M.add(starts[query], own[query]))
        *wide, last = dataclasses.replace(first, zeros=(starts[query], E.ZERO)), *rest
        padded.append((*wide, dataclasses.replace(last, zeros=(last.zeros[0], after))))
    return tuple(view for query in own for view in query), tuple(padded), width


def _by_part(key: Expr, starts: Sequence[Expr], formulas: Sequence[Expr]) -> Expr:
    """The formula of the part that the key lies in: one mask for all parts, and a selection of the terms."""
    masked = [f for f in formulas if f.op == "where" and E.NEG_INF in f.args[1:]]
    if masked and starts[1:]:
        kept, inside = zip(*map(_without_mask, formulas), strict=True)
        return M.where(_selected(key, starts, kept), _by_part(key, starts, inside), E.NEG_INF)
    terms = [E.parts(f, "add") for f in formulas]
    common = [t for t in terms[0] if all(t in others for others in terms)]
    own = [M.add(*(t for t in found if t not in common)) for found in terms]
    return M.add(*common, _selected(key, starts, own))


def _selected(key: Expr, starts: Sequence[Expr], formulas: Sequence[Expr]) -> Expr:
    found = formulas[-1]
    for start, formula in zip(reversed(starts[1:]), reversed(formulas[:-1]), strict=True):
        found = M.where(M.lt(key, start), formula, found)
    return found


def _without_mask(formula: Expr) -> tuple[Expr, Expr]:
    """What a mask keeps, and the score there."""
    if formula.op != "where" or E.NEG_INF not in formula.args[1:]:
        return E.TRUE, formula
    condition, yes, no = formula.args
    return (condition, yes) if no is E.NEG_INF else (M.not_(condition), no)


def _refuse_as_program(score: Expr, weight: Expr, sink: Expr | None) -> Refusal | None:
    """Why these formulas cannot be a score program, or None if they can."""
    beside = (weight,) if sink is None else (weight, sink)
    if any(n.op == "sum" for x in beside for n in E.walk(x)):
        return Refusal(SECOND_SUM)
    for x in (score, *beside):
        if any(v.value not in INDICES for v in x.free) or any(n.op in E.BINDERS for n in E.walk(x)):
            return Refusal("the scores vary with something other than batch, head, query and key")
    # An early estimate, as writing out shared parts takes long: four nodes make at least one word.
    if any(x.words > 4 * budgets.STATEMENT_WORDS for x in (score, *beside)):
        return Refusal(f"its scores are a formula of more than {budgets.STATEMENT_WORDS} words")
    return None


def _in_order(keys: tuple[Expr, ...], read: Expr) -> tuple[Expr, ...]:
    """The keys in the order of a tensor's dimensions, so that no permutation is needed."""
    place = {k: next((i for i, a in enumerate(read.args) if k in a.free), len(read.args)) for k in keys}
    return tuple(sorted(keys, key=place.__getitem__))


def _plain(view: View) -> View:
    """The view without its factor, which is accounted for elsewhere."""
    return dataclasses.replace(view, factor=1.0)
