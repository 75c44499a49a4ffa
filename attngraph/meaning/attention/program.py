"""From the meaning of scores to a score program: masks taken out as `keep`, tensors numbered,
canonical forms turned back into what a person would write."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from torch import fx

from attngraph.ir.language import E, Expr, Keep, S, Score, ScoreProgram, Sink, Statement, Weight, operation
from attngraph.ir.walk import reached
from attngraph.meaning.algebra import M, ranges, size_expression
from attngraph.meaning.masks.fold import UNDERFLOWS
from attngraph.meaning.masks.score_bounds import with_finite_dots

LOWERED = M.add(S.SCORE, E.NEG_INF)
"""A score to which a mask adds minus infinity."""
LOST = 2.0**100
"""Scores of ordinary size do not change a number beyond this one when they are added to it in float64."""


@dataclasses.dataclass(frozen=True)
class Seed:
    """A read of a tensor that the graph does not have yet: the seed of one dropout's random numbers."""

    dropout: fx.Node


Source = fx.Node | Seed


def build(
    score: Expr, weight: Expr, sink: Expr | None
) -> tuple[ScoreProgram, tuple[Source, ...], tuple[Expr, ...]]:
    """The program of a score (a formula of `dot`), a weight (a formula of `p`) and a sink, what it reads, and
    its sizes. All variables are the program's own `b h q k` (extents are allowed and dropped)."""
    statements: list[Statement] = []
    score, weight = with_finite_dots(score), with_finite_dots(weight)
    masks, narrowed = _peel_masks(score)
    writer = _Writer(guarded=narrowed)
    if _rows_are_numbers(masks):
        nan = E.make("isnan", (S.WEIGHT,), None, "bool")
        weight = M.substitute(weight, {nan: E.FALSE})
    for kind, value, fill in reversed(masks):
        if kind == "keep":
            filled = E.NEG_INF if fill is E.NEG_INF else writer.write(fill)
            statements.append(Keep(writer.write(value), filled))
        else:
            statements.append(Score(writer.write(value)))
    if sink is not None:
        statements.append(Sink(writer.write(sink)))
    if weight is not S.WEIGHT:
        statements.append(Weight(writer.write(weight)))
    return ScoreProgram(tuple(statements)), tuple(writer.reads), tuple(writer.sizes)


def rewritten(formula: Expr, program: ScoreProgram) -> Expr:
    """A canonical formula of a program's tensors and sizes as a program writes it."""
    writer = _Writer(guarded=False)
    writer.reads = list(range(max(program.reads, default=-1) + 1))
    writer.sizes = [E.size(f"n{n}") for n in range(program.sizes)]
    return writer.write(formula)


def _rows_are_numbers(masks: list[tuple[str, Expr, Expr]]) -> bool:
    """Whether no row is NaN: nothing read is infinite, and the first or the own key is always kept."""
    if any(E.reads(value) for kind, value, _ in masks if kind == "score"):
        return False
    hidden = [value for kind, value, fill in masks if kind == "keep" and fill in (E.NEG_INF, LOWERED)]
    variables = {v.value: v for predicate in hidden for v in predicate.free}
    k, q = variables.get("k"), variables.get("q")
    places = [E.ZERO] if q is None or k is None or q.args != k.args else [E.ZERO, q]
    return any(all(M.substitute(p, {k: place} if k else {}) is E.TRUE for p in hidden) for place in places)


def _peel_masks(score: Expr) -> tuple[list[tuple[str, Expr, Expr]], bool]:
    """Outermost first: ("keep", predicate, fill) and at last ("score", value, -); and whether the score
    was simplified by assuming the masks' predicates."""
    found: list[tuple[str, Expr, Expr]] = []
    narrowed = False
    while (masked := _as_mask(score)) is not None:
        predicate, whole, fill = masked
        # A number added to a masked score may leave it visible; a number in place of the score hides it.
        stays = fill is not LOWERED and any(n is S.SCORE for n in E.walk(fill))
        holds = () if stays else (predicate, *E.parts(predicate, "and"))
        score = M.substitute(whole, dict.fromkeys(holds, E.TRUE) | {M.not_(p): E.FALSE for p in holds})
        narrowed |= score is not whole
        if fill in (E.NEG_INF, LOWERED) and found and found[-1][0] == "keep" and found[-1][2] is fill:
            predicate = M.and_(found.pop()[1], predicate)
        found.append(("keep", predicate, fill))
    found.append(("score", score, E.ZERO))
    return found, narrowed


def _as_mask(score: Expr) -> tuple[Expr, Expr, Expr] | None:
    """(predicate, score where it holds, what stands where it does not)."""
    if score.op == "where":
        condition, yes, no = score.args
        ways = ((condition, yes, no), (M.not_(condition), no, yes))
        masks = [way for way in ways if _is_fill(way[2]) and not _is_fill(way[1])]
        added = [(keep, value, M.sub(other, value)) for keep, value, other in ways]
        masks += [(keep, value, M.add(S.SCORE, fill)) for keep, value, fill in added if _is_fill(fill)]
        return next(iter(masks), None)
    if score.op == "max":
        return _at_least(*score.args)
    if score.op != "add":
        return None
    for place, term in enumerate(score.args):
        rest = M.add(*score.args[:place], *score.args[place + 1 :])
        masked = _added_mask(rest, term)
        if masked is not None:
            return masked
    return None


def _added_mask(rest: Expr, term: Expr) -> tuple[Expr, Expr, Expr] | None:
    """The mask in a selection that is added to a score: its branches, or branches of these, are a fill."""
    branches = reached([term], lambda n: n.args[1:] if n.op == "where" else ())  # of nested selections
    leaves = {n for n in branches if n.op != "where"} if term.op == "where" else set()
    fill = min((leaf for leaf in leaves if _is_fill(leaf)), key=lambda leaf: leaf.value, default=None)
    others = leaves - {fill}
    if fill is None or not others:
        return None
    keep = _where_not(term, fill)
    value = next(iter(others))
    # Adding minus infinity is not the same as putting it there: NaN stays NaN, gradients flow.
    if fill is E.NEG_INF:
        return keep, M.add(rest, value if len(others) == 1 else _replaced(term, fill)), LOWERED
    if len(others) == 1 and value.op == "const":
        return None if _is_fill(value) else (keep, M.add(rest, value), M.add(S.SCORE, M.sub(fill, value)))
    return keep, M.add(rest, _replaced(term, fill)), M.add(S.SCORE, fill)


def _where_not(tree: Expr, fill: Expr) -> Expr:
    """Where nested selections do not choose the fill."""
    if tree.op != "where":
        return E.FALSE if tree is fill else E.TRUE
    condition, yes, no = tree.args
    return M.or_(M.and_(condition, _where_not(yes, fill)), M.and_(M.not_(condition), _where_not(no, fill)))


def _replaced(tree: Expr, fill: Expr) -> Expr:
    """The selections with zero in place of the fill."""
    if tree.op != "where":
        return E.ZERO if tree is fill else tree
    condition, yes, no = tree.args
    return M.where(condition, _replaced(yes, fill), _replaced(no, fill))


def _at_least(score: Expr, floor: Expr) -> tuple[Expr, Expr, Expr] | None:
    """The mask of a score that is raised to a lowest number, as transformers models write it: what the mask
    hides becomes that number, next to which the score itself is below the resolution of float64."""
    masked = _as_mask(score) if _is_fill(floor) and floor is not E.NEG_INF else None
    if masked is None:
        return None
    condition, whole, fill = masked
    added = M.sub(fill, S.SCORE) if fill is not LOWERED else E.NEG_INF
    lowest = fill if fill.op == "const" else added
    if lowest.op != "const" or max(lowest.value, floor.value) > -LOST:
        return None
    return condition, M.function("max", whole, floor), M.function("max", lowest, floor)


def _is_fill(node: Expr) -> bool:
    return node.op == "const" and node is not E.NAN and node.value <= -UNDERFLOWS


class _Writer:
    """Rewrites canonical expressions as a program's: numbers reads and sizes in order of appearance.

    `guarded`: some reads are used only where a condition holds, and elsewhere their indices may be out of
    range. A program evaluates every read everywhere, so such indices are clamped.
    """

    def __init__(self, guarded: bool) -> None:
        self.guarded = guarded
        self.reads: list[Any] = []
        self.sizes: list[Expr] = []

    def write(self, node: Expr) -> Expr:
        if node.op == "var":
            assert node.value in S.INDICES, node
            return E.var(node.value)
        if node.op == "size":
            if node not in self.sizes:
                self.sizes.append(node)
            return E.size(f"n{self.sizes.index(node)}")
        if node.op == "read":
            return self._read(node.value, node.args)
        if node.op == "raw":
            return operation(node.value, *(self.write(a) for a in node.args))
        if node.op == "random":
            seed = self._read(Seed(node.value), ())
            counters = [self.write(a) for a in node.args]
            counters += [E.ZERO] * (4 - len(counters))
            return E.make("random", (seed, *counters), None, "float")
        if not node.args:
            return node
        writers = {"add": self._sum, "mul": self._product, "le": self._at_most}
        if node.op in writers:
            return writers[node.op](node)
        if node.op == "recip":
            if node.args[0].op == "sqrt":
                return operation("rsqrt", self.write(node.args[0].args[0]))
            return operation("div", E.ONE, self.write(node.args[0]))
        is_unequal = node.op == "not" and node.args[0].op == "eq"
        if node.op == "eq" or is_unequal:
            sides = node.args[0].args if is_unequal else node.args
            return operation("ne" if is_unequal else "eq", *map(self.write, self._ordered(sides)))
        if node.op in ("and", "or"):
            join = functools.partial(operation, node.op)
            return functools.reduce(join, self._guarded(self._ordered(node.args)))
        if node.op == "where":
            return operation("where", *self._guarded(node.args))
        return operation(node.op, *(self.write(a) for a in node.args))

    def _guarded(self, nodes: Sequence[Expr]) -> list[Expr]:
        """Write nodes of which some decide whether the others are used."""
        before, self.guarded = self.guarded, True
        written = [self.write(n) for n in nodes]
        self.guarded = before
        return written

    def _read(self, source: Source, indices: tuple[Expr, ...]) -> Expr:
        if source not in self.reads:
            self.reads.append(source)
        if self.guarded and isinstance(source, fx.Node):
            shape = (size_expression(s) for s in source.meta["val"].shape)
            indices = tuple(within(i, extent) for i, extent in zip(indices, shape, strict=True))
        return E.read(self.reads.index(source), tuple(self.write(i) for i in indices))

    def _ordered(self, nodes: tuple[Expr, ...]) -> list[Expr]:
        """An order that does not depend on how nodes were built: indices first, then reads; ties by text."""
        return sorted(nodes, key=lambda n: (n.op == "const", bool(E.reads(n)), _shape_key(n)))

    def _at_most(self, node: Expr) -> Expr:
        """left <= right, with the key on the left where it stands alone: `k <= q`, `k > q - 4`."""
        left, right = node.args
        difference = M.sub(right, left)
        for term in E.parts(difference, "add"):
            factor, rest = M.coefficient(term)
            if rest.op == "var" and rest.value == "k" and factor in (1, -1):
                other = M.sub(difference, term)
                above = ("ge", M.neg(other)), ("gt", M.sub(M.neg(other), E.ONE))
                ways = above if factor == 1 else (("le", other),)
                name, bound = min(ways, key=lambda way: len(list(E.walk(way[1]))))
                return operation(name, self.write(rest), self.write(bound))
        return operation("le", self.write(left), self.write(right))

    def _sum(self, node: Expr) -> Expr:
        # What is far larger than scores comes last: what is added to it loses digits.
        first, *terms = sorted(node.args, key=lambda t: (_is_of_large(t), _term_key(t)))
        whole = self.write(first)
        for term in terms:
            factor, rest = (term.value, E.ONE) if term.op == "const" else M.coefficient(term)
            if not isinstance(factor, str) and factor < 0:
                size = E.const(-factor) if rest is E.ONE else M.scale(-factor, rest)
                whole = operation("sub", whole, self.write(size))
            else:
                whole = operation("add", whole, self.write(term))
        return whole

    def _product(self, node: Expr) -> Expr:
        factor, rest = M.coefficient(node)
        over = [f.args[0] for f in E.parts(rest, "mul") if f.op == "recip"]
        under = [f for f in E.parts(rest, "mul") if f.op != "recip"]
        parts = [self.write(f) for f in sorted(under, key=_term_key)]
        if factor == -1 and parts:
            parts[0] = operation("neg", parts[0])
        elif factor != 1 or not parts:
            parts.insert(0, E.const(factor))
        whole = functools.reduce(functools.partial(operation, "mul"), parts)
        for divisor in over:
            whole = operation("div", whole, self.write(divisor))
        return whole


def within(index: Expr, extent: Expr) -> Expr:
    """The index, clamped unless it is known to be in range."""
    if index.op == "const":
        return index  # the model itself reads this element
    last = ranges.subtract(ranges.polynomial(extent), {(): 1})
    low, high = ranges.bounds(ranges.polynomial(index))
    sizes = index.op == "var" and index.args[0].op == extent.op == "size"
    if sizes and high is not None and not ranges.is_positive(ranges.subtract(high, last)):
        return index  # it runs over a whole dimension: two names of sizes may stand for one number
    if low is None or not ranges.is_nonnegative(low):
        index = M.function("max", index, E.ZERO)
    if high is None or not ranges.is_nonnegative(ranges.subtract(last, high)):
        index = M.function("min", index, M.from_polynomial(last))
    return index


def _is_of_large(term: Expr) -> bool:
    """Whether a term that is read from tensors is multiplied by a number that is far larger than scores."""
    factor = M.coefficient(term)[0] if E.reads(term) else 0
    return not isinstance(factor, str) and abs(factor) >= UNDERFLOWS


def _shape_key(node: Expr) -> str:
    """A text that names variables and operations but no tensors: stable between equal layers."""
    if node.op in ("const", "var", "size"):
        return f"{node.op}:{node.value}"
    return f"{node.op}({','.join(sorted(_shape_key(a) for a in node.args))})"


def _term_key(node: Expr) -> tuple[int, int, int, str]:
    """dot first, then formulas of the index, then reads, numbers last (first in products)."""
    if node.op == "const":
        return (9, 0, 0, str(node.value))
    ops = {n.op for n in E.walk(node)}
    rank = 0 if ops & {"dot", "s", "p"} else 2 if "read" in ops else 1
    negative = int(M.coefficient(node)[0] < 0)
    variables = sorted(S.INDICES.index(v.value) for v in node.free if v.value in S.INDICES)
    return (rank, negative, -variables[-1] if variables else 0, _shape_key(node))
