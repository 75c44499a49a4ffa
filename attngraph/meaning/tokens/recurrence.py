"""Sums over earlier tokens that can be carried: what a token writes, how it decays, and how it is read.

The third token's element is unfolded (`unfold.py`). A term with factors of the first token shows everything:
what belongs to the first token is written, what belongs to the second decays it on the way, what belongs to
the third reads it. The same sum has a term that the second token writes, without a decay by data between the
two, and usually one that the third writes itself. What reads the third token alone is added at the end.

    out_t = sum over s <= t of  read(t) * product of decay(j) for s < j <= t * write(s)   +  rest(t)

This is a claim, read from three tokens. Whether it holds is decided by running both
(`passes/insert_kv_cache/carry.py`). Nothing here edits the graph.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

from torch import fx

from attngraph.ir import budgets
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.meaning.algebra import simplify as M
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Category, Unliftable, category_of
from attngraph.meaning.tokens.axes import Axes, Indices, Space
from attngraph.meaning.tokens.facts import Fact, Kind, RunningSum, Sums
from attngraph.meaning.tokens.unfold import Factor, NoTerms, Term, Terms, Unfolding

THIRD = 2
_Counter = collections.Counter[Expr]


class SumFinder:
    """Looks for sums over earlier tokens in one graph, at most `budgets.SUM_ATTEMPTS` times.

    `why_not`: the reason for each value that was looked at in vain.
    """

    def __init__(self, graph: ProgramGraph, space: Space, tokens: int) -> None:
        self.space, self.tokens = space, tokens
        numbers = {} if space.tokens.op == "const" else {str(space.tokens.value): tokens}
        self._meaning = Meaning(graph.known_values(), graph.conditions, True, True, numbers)
        self._left, self.why_not = budgets.SUM_ATTEMPTS, dict[fx.Node, str]()

    def find(self, facts: Mapping[fx.Node, Fact], node: fx.Node, axes: Axes) -> Sums | None:
        """How a value with these axes follows from carried sums, or None."""
        if self.tokens <= THIRD or self._left <= 0:
            return None
        self._left -= 1
        try:
            return find_sums(self._meaning, self.space, facts, node, axes, self.tokens, _from_sums(facts))
        except (NoTerms, Unliftable) as why_not:
            self.why_not[node] = str(why_not)
            return None


def _from_sums(facts: Mapping[fx.Node, Fact]) -> frozenset[fx.Node]:
    """Sums over earlier tokens, and what is computed from them element by element."""
    found: set[fx.Node] = set()
    for node, fact in facts.items():
        moved = (
            node.op == "call_function"
            and fact.kind is Kind.TOKEN
            and category_of(node) in (Category.MOVEMENT, Category.POINTWISE)
        )
        if isinstance(fact.scan, Sums) or (moved and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return frozenset(found)


def find_sums(
    meaning: Meaning, space: Space, facts: Mapping[fx.Node, Fact], node: fx.Node, axes: Axes, tokens: int,
    from_sums: frozenset[fx.Node] = frozenset(),
) -> Sums:  # fmt: skip
    """How a value with these axes follows from carried sums.

    Args:
        meaning: in which the number of tokens is `tokens`, at least three.
        from_sums: values that are sums over earlier tokens themselves, or little more.

    Raises:
        NoTerms, Unliftable: it does not, as far as this can tell; says why.
    """
    shape = meaning.shape(node)
    if any(len(digits) > 1 for digits in axes):
        raise NoTerms("its tokens share a dimension with something else")
    own = tuple(E.var(f"own{dim}", extent) for dim, extent in enumerate(shape))
    at: Indices = tuple(
        E.const(THIRD) if space.token in digits else (space.row or E.ZERO) if digits else own[dim]
        for dim, digits in enumerate(axes)
    )
    found, through = _read(Unfolding(meaning, space, facts, tokens, from_sums), node, at), from_sums
    if isinstance(found, NoTerms) and from_sums:
        found, through = _read(Unfolding(meaning, space, facts, tokens), node, at), frozenset()
    if isinstance(found, NoTerms):
        raise found
    sums, rest = found
    variables = tuple(v for v, digits in zip(own, axes, strict=True) if not digits)
    return Sums(tuple(sums), rest, variables, through)


def _read(unfolding: Unfolding, node: fx.Node, at: Indices) -> tuple[list[RunningSum], Expr] | NoTerms:
    try:
        return _claims([_canonical(term) for term in unfolding.terms(node, at)])
    except NoTerms as why_not:
        return why_not
    except RecursionError:
        return NoTerms("it is computed by too many operations")


def _canonical(term: Term) -> Term:
    """The term with its summation variables named by where they occur."""
    if not term.over:
        return term
    plain = {v: E.var("n", v.args[0]) for v in term.over}

    def shape_of(factor: Factor) -> tuple[int, str]:
        return (-1 if factor.token is None else factor.token, str(M.substitute(factor.value, plain)))

    order: dict[Expr, None] = {}
    for factor in sorted(term.factors, key=shape_of):
        order.update((n, None) for n in E.walk(factor.value) if n in term.over)
    names = {v: E.var(f"n{place}", v.args[0]) for place, v in enumerate(order)}
    return term.renamed(names)


def _claims(terms: Terms | Sequence[Term]) -> tuple[list[RunningSum], Expr]:
    left = list(terms)
    found: list[RunningSum] = []
    for first in [t for t in terms if 0 in t.tokens]:
        found.append(_claim(first, left))
    strange = [t for t in left if t.tokens - {THIRD}]
    if strange:
        raise NoTerms("what the tokens before it contribute follows no pattern that can be carried")
    if not found:
        raise NoTerms("no earlier token contributes to it")
    return found, M.add(*(t.value() for t in left)) if left else E.const(0.0)


def _claim(first: Term, left: list[Term]) -> RunningSum:
    """The sum of which this is the first token's term; it is removed from `left` with its other terms."""
    write, between, read = (_of(first, token) for token in (0, 1, THIRD))
    left.remove(first)
    second = _match(left, {1: write, THIRD: read}, first.over)
    if second is None:
        raise NoTerms("the second token does not contribute to it as the first does")
    left.remove(second)
    inclusive, third = False, None
    if not between - read:
        third = _match(left, {THIRD: write + (read - between)}, first.over)
        if third is not None and _of(third, None) - _of(second, None):
            third = None  # a token's own term has a factor of its own: it is added at the end
        inclusive = third is not None
    if third is not None:
        left.remove(third)
        read = read - between
        factor, common = _quotient(second, third), _of(third, None)
        number = third.number
    else:
        factor, common = _quotient(first, second), _of(second, None)
        number = second.number
    decay = M.mul(factor, *between.elements())
    return RunningSum(
        M.mul(*read.elements()), M.mul(E.const(number), *common.elements(), *write.elements()), decay,
        tuple(sorted(first.over, key=lambda v: str(v.value))), inclusive,
    )  # fmt: skip


def _of(term: Term, token: int | None) -> _Counter:
    return collections.Counter(f.value for f in term.factors if f.token == token)


def _match(terms: Sequence[Term], wanted: Mapping[int, _Counter], over: frozenset[Expr]) -> Term | None:
    """The term with exactly these factors of tokens; any others read no token."""
    for term in terms:
        if term.over != over or term.tokens != {t for t, factors in wanted.items() if factors}:
            continue
        if all(_of(term, token) == factors for token, factors in wanted.items()):
            return term
    return None


def _quotient(longer: Term, shorter: Term) -> Expr:
    """What one more token between multiplies a term by, apart from factors of tokens."""
    above, below = _of(longer, None), _of(shorter, None)
    top, bottom = above - below, below - above
    number = longer.number / shorter.number
    return M.mul(E.const(number), *top.elements(), *(M.recip(f) for f in bottom.elements()))
