"""What one token gets from the first ones: a sum of products of things that belong to one token each.

For a numbered token (the third, say) every operation between it and the values that are known token by token
is followed: sums over tokens are written out, masks are decided, paddings and chunks fall away, loops over
tokens or blocks are followed as far as the token needs them. What is left is a sum of terms, each a product
of factors that read one token (or none), summed over other axes of the model. So however a model spells a
sum over earlier tokens (a matrix of pairs, chunks with states between them, a `cumsum`, a loop), its terms
are the same. Nothing here edits the graph, and nothing is proved: `recurrence.py` reads a claim from the
terms.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

from torch import fx

from attngraph.ir.kept import kept
from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import M
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import tried
from attngraph.meaning.tokens.facts import Facts, Indices, Kind, read_token

TERMS = 400
"""Terms of one element. With more, nothing is read from it."""
FEW = 8
"""Summands that are written out one by one, where no term stands for all of them."""


VIEWS = frozenset(f"aten.{name}" for name in (
    "slice.Tensor", "narrow.default", "select.int", "transpose.int", "permute.default", "unsqueeze.default",
    "squeeze.dim", "squeeze.dims", "expand.default", "alias.default", "clone.default", "contiguous.default",
))  # fmt: skip


class NoTerms(Exception):
    """The element is no sum of products of single tokens' factors; says why."""


@dataclasses.dataclass(frozen=True)
class Factor:
    """A factor that reads one token (None: no token), at which its expression has the token's variable."""

    token: int | None
    value: Expr


@dataclasses.dataclass(frozen=True)
class Term:
    """`number` times the factors, summed over the variables `over`."""

    number: float
    factors: tuple[Factor, ...] = ()
    over: frozenset[Expr] = frozenset()

    def times(self, other: "Term", fresh: Callable[[Expr], Expr]) -> "Term":
        clash = {v: fresh(v.args[0]) for v in self.over & other.over}
        other = other.renamed(clash) if clash else other
        return Term(self.number * other.number, self.factors + other.factors, self.over | other.over)

    def renamed(self, names: Mapping[Expr, Expr]) -> "Term":
        factors = tuple(Factor(f.token, M.substitute(f.value, names)) for f in self.factors)
        return Term(self.number, factors, frozenset(names.get(v, v) for v in self.over))

    @property
    def tokens(self) -> set[int]:
        return {f.token for f in self.factors if f.token is not None}

    def value(self) -> Expr:
        """The term as an expression, of which every factor has the same token's variable."""
        product = M.mul(_number(self.number), *(f.value for f in self.factors))
        return M.totals(sorted(self.over, key=lambda v: v.order), product)


Terms = tuple[Term, ...]


class Unfolding:
    """Unfolds elements of one graph.

    Args:
        meaning: with a number for the size that counts the tokens, `tokens`.
        through: values that are followed although they are known token by token.
    """

    def __init__(
        self, meaning: Meaning, facts: Facts, tokens: int, through: frozenset[fx.Node] = frozenset()
    ) -> None:
        self.meaning, self.facts, self.space, self.tokens = meaning, facts, facts.space, tokens
        self.through = through
        self._place = {node: place for place, node in enumerate(facts)}
        self._along: dict[fx.Node, frozenset[int]] = {}

    def terms(self, node: fx.Node, at: Indices) -> Terms:
        """An element of a node. Raises `NoTerms`, `Unliftable`: it is no sum of products of single tokens'
        factors."""
        return self._unfold(self.meaning.element(node, at))

    # --- expressions ---

    @kept
    def _unfold(self, node: Expr) -> Terms:
        return _collected(self._unfolded(node))

    def _unfolded(self, node: Expr) -> Terms:
        match node.op:
            case "const":
                if node is E.NAN:
                    raise NoTerms("not a number")
                return (Term(float(node.value)),) if node.value else ()
            case "read":
                return self._read(node)
            case "sum":
                return self._sum(node)
            case "add":
                return tuple(term for a in node.args for term in self._unfold(a))
            case "mul":
                return self._product(map(self._unfold, sorted(node.args, key=self._work)))
            case "where":
                condition = self._without_tokens(node.args[0])
                if condition.op == "const":
                    return self._unfold(node.args[1 if condition.value else 2])
            case "exp":
                return self._exponential(node)
            case "recip":
                terms = self._unfold(node.args[0])
                if len(terms) == 1 and not terms[0].over:
                    factors = (Factor(f.token, M.recip(f.value)) for f in terms[0].factors)
                    return (Term(1 / terms[0].number, tuple(factors)),)
            case "var" | "size":
                return (Term(1.0, (Factor(None, node),)),)
        return self._function(node)

    def _work(self, factor: Expr) -> int:
        """What grows with the work of unfolding a factor: how late its values are computed."""
        found = -1
        for value in (n.value for n in E.reads(factor)):
            while str(value.target) in VIEWS:
                value = value.args[0]
            found = max(found, self._place.get(value, len(self._place)))
        return found

    def _product(self, parts: Iterable[Terms]) -> Terms:
        """`parts` are unfolded one by one: if one is zero, the others are not."""
        found: Terms = (Term(1.0),)
        for part in map(_as_one, parts):
            found = tuple(a.times(b, self.meaning.fresh) for a in found for b in part)
            if len(found) > TERMS:
                raise NoTerms("too many terms")
            if not found:
                break
        return found

    def _without_tokens(self, node: Expr) -> Expr:
        """An expression followed through all but the tokens, a number where it depends on no data."""
        facts = self.facts
        return self.meaning.lift(node, lambda r: not (r.value in facts and facts[r.value].is_of_token))

    def _read(self, node: Expr) -> Terms:
        fact = self.facts.known(node.value)
        if fact is None or node.value in self.through:
            return self._unfold(self.meaning.element(node.value, node.args))
        place = self.space.place(fact.axes, self.space.token)
        if fact.kind in (Kind.FIXED, Kind.POSITION):
            found = self._without_tokens(node)
            if found.op == "const":
                return self._unfold(found)
            along = [n for n in self.meaning.shape(node.value) if E.is_const(n, self.tokens)]
            if fact.kind is Kind.POSITION and len(along) > 1:  # it depends on two places
                looked_into = found is not node
                return self._unfold(found if looked_into else self.meaning.element(node.value, node.args))
            if fact.kind is Kind.FIXED and node.kind != "float" and found is not node and found.op != "read":
                return self._unfold(found)
        moved = self._moved_from(node)
        if moved is not None:
            return self._read(moved)
        if place is None:
            return (Term(1.0, (Factor(None, node),)),)
        index = node.args[place]
        if fact.axes[place] != (self.space.token,) or index.op != "const":
            raise NoTerms(read_token(index, self.space.tokens))
        args = (*node.args[:place], self.space.token, *node.args[place + 1 :])
        return (Term(1.0, (Factor(int(index.value), E.read(node.value, args, node.kind)),)),)

    def _moved_from(self, node: Expr) -> Expr | None:
        """The element of another value that a view shows here, so that equal elements are equal factors."""
        if str(node.value.target) not in VIEWS:
            return None
        found = self.meaning.element(node.value, node.args)
        fact = self.facts.known(found.value) if found.op == "read" else None
        if fact is None:
            return None
        joined = any(len(digits) > 1 and self.space.token in digits for digits in fact.axes)
        return None if joined else found

    def _sum(self, node: Expr) -> Terms:
        variable, body = node.args
        extent = variable.args[0]
        over_tokens = any(
            variable in read.args[dim].free
            for read in E.reads(body) for dim in self._dims_along_tokens(read.value)
        )  # fmt: skip
        if not over_tokens:
            try:
                terms = self._unfold(body)
            except NoTerms:  # its summands may be of several kinds, as those of parts that were joined
                if extent.op != "const" or extent.value > FEW:
                    raise
            else:
                own = {variable: self.meaning.fresh(extent)}
                return tuple(self._summed(t.renamed(own), own[variable]) for t in terms)
        if extent.op != "const":
            raise NoTerms("a sum over tokens whose number is not known")
        count = min(int(extent.value), self.tokens) if over_tokens else int(extent.value)
        elements = (M.substitute(body, {variable: E.const(n)}) for n in range(count))
        return tuple(term for element in elements for term in self._unfold(element))

    def _summed(self, term: Term, variable: Expr) -> Term:
        if any(variable in f.value.free for f in term.factors):
            return dataclasses.replace(term, over=term.over | {variable})
        if variable.args[0].op != "const":
            raise NoTerms("a sum of equal values whose number is not known")
        return dataclasses.replace(term, number=term.number * int(variable.args[0].value))

    def _exponential(self, node: Expr) -> Terms:
        """The exponential of a sum as a product of exponentials, one for each token."""
        parts: dict[int | None, list[Term]] = {}
        number = 0.0
        for term in self._unfold(node.args[0]):
            if not term.factors:
                number += term.number
            elif len(term.tokens) > 1:
                raise NoTerms("an exponential of a product of several tokens")
            else:
                parts.setdefault(next(iter(term.tokens), None), []).append(term)
        if number == -math.inf:
            return ()
        factors = [Factor(token, M.exp(M.add(*(t.value() for t in part)))) for token, part in parts.items()]
        return (Term(math.exp(number), tuple(factors)),)

    def _function(self, node: Expr) -> Terms:
        """A function of values of one token."""
        args = [self._unfold(a) for a in node.args]
        tokens = {token for terms in args for term in terms for token in term.tokens}
        if len(tokens) > 1:
            what = "a selection among values" if node.op == "where" else node.op
            raise NoTerms(f"{what} of several tokens")
        values = tuple(
            _as_kind(a, M.add(*(t.value() for t in terms)) if terms else E.const(0.0))
            for a, terms in zip(node.args, args, strict=True)
        )
        if node.op == "pow" and values[1].op == "const" and values[1].value in (0, 1):
            return self._unfold(node.args[0]) if values[1].value else (Term(1.0),)
        found = M.construct(node, values)
        if found.op == "const":
            return self._unfold(found)
        return (Term(1.0, (Factor(next(iter(tokens), None), found),)),)

    # --- which sums run over tokens ---

    def _dims_along_tokens(self, node: fx.Node) -> frozenset[int]:
        """The dimensions of a value whose index decides which token is read."""
        if node not in self._along:
            self._along[node] = frozenset()
            fact = self.facts.known(node)
            if fact is not None:
                dims = {d for d, digits in enumerate(fact.axes) if self.space.token in digits}
            else:
                dims = self._followed(node)
            self._along[node] = frozenset(dims)
        return self._along[node]

    def _followed(self, node: fx.Node) -> set[int]:
        if not self.meaning.is_tensor(node):
            return set()
        output = tuple(E.var(f"a{d}", extent) for d, extent in enumerate(self.meaning.shape(node)))
        element = tried(self.meaning.element, node, output)
        reads = [] if element is None else E.reads(element)
        used = [r.args[dim].free for r in reads for dim in self._dims_along_tokens(r.value)]
        return {d for d, variable in enumerate(output) if any(variable in free for free in used)}


def _as_one(terms: Terms) -> Terms:
    """Several terms of one token (or of none) as one factor: it need not be multiplied out."""
    tokens = {token for term in terms for token in term.tokens}
    if len(terms) < 2 or len(tokens) > 1:
        return terms
    return (Term(1.0, (Factor(next(iter(tokens), None), M.add(*(t.value() for t in terms))),)),)


def _as_kind(before: Expr, after: Expr) -> Expr:
    """Whole numbers stay whole numbers."""
    whole = before.kind == "int" and after.op == "const" and float(after.value).is_integer()
    return E.const(int(after.value)) if whole else after


def _number(value: float) -> Expr:
    return E.const(int(value)) if math.isfinite(value) and value == int(value) else E.const(value)


def _collected(terms: Terms) -> Terms:
    """Equal terms added up."""
    found: dict[tuple[tuple[Factor, ...], frozenset[Expr]], float] = {}
    for term in terms:
        ordered = sorted(term.factors, key=lambda f: (-1 if f.token is None else f.token, f.value.order))
        key = tuple(ordered), term.over
        found[key] = found.get(key, 0.0) + term.number
    if len(found) > TERMS:
        raise NoTerms("too many terms")
    return tuple(Term(n, factors, over) for (factors, over), n in found.items() if n)
