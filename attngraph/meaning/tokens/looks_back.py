"""Whether a token's value is computed from itself and earlier tokens alone: shown by algebra, for any length.

An element at token t is written as a formula of the values that are known token by token, through every
operation between. It looks back alone if three things hold of that formula:

    every token that is read is t, or one that is known to be no later than t
    every sum (or maximum) over tokens adds nothing from the tokens after t: with t + 1 + d in the place of
    its variable, d being any number, what is summed is 0 (minus infinity under a maximum)
    a sum over blocks of m tokens adds nothing from those that reach past t: block w reaches to token
    m * w + c, and with m * w + c - 1 - d in the place of t what is summed is 0
    nothing else in it depends on how many tokens there are

Then a sequence begins with the results that it has alone. A variable of which a sum adds nothing after t is
known to be no later than t in what it sums, so that attention of attention is followed, too; and t to be no
earlier than the end of a block that a sum adds. A number that hides (`masks/fold.py`) is taken for minus
infinity in an exponent whose own token is shown. An operation without an element rule hides what it reads, so
it is followed only along the dimensions that it does not mix (`meaning/tokens/opaque.py`). Where that shows
nothing, the operations are run with a shadow, at many lengths (`many_lengths.py`).

Such a value, which may be no attention and no sum known here, is the last resort: what it is computed from is
kept for every token, and the model's own operations run on all of it again (`HistoryFinder`).
"""

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Mapping

from torch import fx

from attngraph.ir import budgets
from attngraph.ir.graph.program_graph import is_size, op_name
from attngraph.ir.language import E, Expr
from attngraph.ir.ops import nodes
from attngraph.ir.walk import reached
from attngraph.meaning.algebra import M, ranges
from attngraph.meaning.masks.fold import HIDES, chooses
from attngraph.meaning.rule import Unliftable
from attngraph.meaning.tokens.facts import Axes, Fact, Facts, Indices, Kind, Space, own_variables, place_text
from attngraph.meaning.tokens.low import is_chosen, may_be_low
from attngraph.meaning.tokens.many_lengths import ManyLengths, Region
from attngraph.meaning.tokens.opaque import compared, is_choice
from attngraph.meaning.tokens.streams import blocks_of, more_than_tokens, streams_of
from attngraph.meaning.tokens.token_probe import TokenProbe
from attngraph.meaning.tokens.windows import History

_NEUTRAL = {"sum": 0, "amax": -float("inf"), "amin": float("inf")}
"""What adds nothing to a sum, to a maximum, to a minimum."""
_MORE = E.var("d")
"""Any number of tokens, none included."""
_ANY = E.var("any")
"""Any number."""
_UNDERFLOWS = 100.0
"""The exponential of minus this may be taken for zero."""
_FILL = E.var("fill")
"""A number that hides."""


class NotShown(Exception):
    """It cannot be shown that later tokens are not looked at; says why."""


class OfAll(NotShown):
    """Because all tokens of the sequence are summed, so it cannot be shown of what is computed from it
    either."""


class LooksBack:
    """The proof for values of one graph.

    Args:
        element: an element of a node in terms of its operands' elements; raises `Unliftable`.
    """

    def __init__(self, facts: Facts, element: Callable[[fx.Node, Indices], Expr]) -> None:
        self.facts, self.meaning, self.space, self.element = facts, facts.meaning, facts.space, element
        self._shown: set[tuple[Expr, frozenset[Expr]]] = set()
        self._lifted: dict[Expr, Expr] = {}
        self._given: Collection[fx.Node] = ()
        """Values besides those known token by token that a formula reads."""
        self._left = 0
        self._is_low, self._is_chosen = (
            functools.cache(functools.partial(f, facts)) for f in (may_be_low, is_chosen)
        )

    def formula(self, node: fx.Node, axes: Axes) -> Expr:
        """An element of a node at these axes in terms of values that are known token by token. Raises
        `NotShown`: an operation is not followed."""
        self._left = budgets.FORMULA_WORDS
        try:
            return self._formula(self.meaning.read(node, self.space.indices(axes, self.meaning.shape(node))))
        except RecursionError:
            raise NotShown("its formula is too long") from None

    def require(self, node: fx.Node, axes: Axes) -> None:
        """Raise `NotShown` unless it is shown that an element of the node at these axes looks back alone."""
        formula = self.formula(node, axes)
        try:
            self._visit(formula, frozenset({self.space.token}))
        except RecursionError:
            raise NotShown("its formula is too long") from None

    def latest(self, node: fx.Node, axes: Axes, given: Collection[fx.Node]) -> dict[fx.Node, int]:
        """Of values that an element at these axes is computed from, besides those `given`, of how many of
        their latest tokens, its own included; those are left out of which all are."""
        found: dict[fx.Node, int | None] = {}

        def look(formula: Expr, far: Mapping[Expr, int | None]) -> None:
            """`far`: so many tokens back each variable of a sum reads, None if any number."""
            for part in reached(
                [formula], lambda n: () if n.op in E.BINDERS and n is not formula else n.args
            ):
                if part.op in E.BINDERS and part is not formula:
                    of_tokens = self.space.counts_tokens(part.args[0].args[0])
                    pieces = (
                        M.pieces(part.args[0], part.args[1], some=True)
                        if of_tokens and part.op == "sum"
                        else []
                    )
                    for piece in pieces if len(pieces) > 1 else [part]:
                        if piece.op not in E.BINDERS:
                            look(piece, far)
                            continue
                        inner = {**far, piece.args[0]: self._far(piece)} if of_tokens else far
                        look(E.make("and", (piece.args[1],), None, "bool"), inner)
                elif part.op == "read":
                    note(part, far)

        def note(read: Expr, far: Mapping[Expr, int | None]) -> None:
            fact = self.facts.known(read.value)
            for digits, index in zip(fact.axes if fact else (), read.args, strict=False):
                if self.space.token in digits:
                    back = 1 if index is self.space.token else far.get(index)
                    before = found.get(read.value, 0)
                    found[read.value] = None if before is None or back is None else max(before, back)

        self._given, kept, self._lifted = given, self._lifted, {}
        try:
            look(E.make("and", (self.formula(node, axes),), None, "bool"), {})
        except NotShown:
            return {}
        finally:
            self._given, self._lifted = (), kept
        return {value: far for value, far in found.items() if far is not None}

    def _far(self, fold: Expr) -> int | None:
        """Of how many of the latest tokens a fold over tokens adds something; None if of any number."""
        variable, body = fold.args
        token = self.space.token
        numbers = {abs(int(n.value)) for c in E.walk(body) if c.op in ("le", "lt") and variable in c.free
                   for n in E.walk(c) if n.op == "const" and n.kind == "int"}  # fmt: skip
        for count in sorted({n + more for n in numbers for more in (0, 1)} - {0}):
            earlier = M.sub(token, M.add(E.const(count), _MORE))
            at = _at(self._hidden(body, variable, token), {variable: earlier})
            if E.is_const(at, _NEUTRAL[fold.op]):
                return count
        return None

    def _formula(self, element: Expr) -> Expr:
        """An element in terms of values that are known token by token."""

        def resolve(node: Expr, args: tuple[Expr, ...]) -> Expr:
            found = M.construct(node, args)
            if found.op != "read" or is_choice(found.value, 0) or self._is_leaf(found.value):
                return found
            if found not in self._lifted:
                try:
                    self._lifted[found] = self._formula(self.element(found.value, found.args))
                except Unliftable as why_not:
                    raise NotShown(f"{op_name(found.value)}: {why_not}") from None
                self._left -= 1
                if self._left < 0:
                    raise NotShown("its formula is too long")
            return self._lifted[found]

        def count(node: Expr, args: tuple[Expr, ...]) -> Expr:
            found = _without_reference(M.construct(node, args))
            counted = compared(self.meaning, found, self._formula) if found.op in ("le", "lt") else found
            return found if counted is found else self._formula(counted)

        return E.rebuild(E.rebuild(element, resolve), count)

    def _is_leaf(self, node: fx.Node) -> bool:
        """Whether a formula reads a value; sizes, places and known patterns are written out instead."""
        if node in self._given:
            return True
        if self.facts.known(node) is None or self.facts.of_sizes(node):
            return False
        if node in self.meaning.values:
            with contextlib.suppress(Unliftable):
                return self.meaning.element(node, own_variables(self.meaning.shape(node))).op == "read"
        return True

    def _visit(self, node: Expr, below: frozenset[Expr]) -> None:
        """Require it of a part of the formula, in which the places `below` are no later than t."""
        if (node, below) in self._shown:
            return
        if self.space.is_count(node):
            raise NotShown("it depends on how many tokens or sequences there are")
        if node.op == "random":
            raise NotShown("it drops weights at random; call model.eval() first")
        if node.op == "var":
            if node not in below and node.args and self.space.counts(node.args[0]):
                raise NotShown("it is computed from a place in the batch or in the sequence")
        elif node.op in E.BINDERS:
            self._visit_sum(node, below)
        elif node.op == "read":
            self._visit_read(node, below)
        else:
            for part in node.args:
                self._visit(part, below)
        self._shown.add((node, below))

    def _visit_read(self, read: Expr, below: frozenset[Expr]) -> None:
        fact = self.facts.known(read.value)
        if fact is None:
            raise NotShown("it is computed from the largest few of some values")
        for digits, index in zip(fact.axes or ((),) * len(read.args), read.args, strict=True):
            if self.space.token in digits:
                if digits != (self.space.token,) or not any(_is_at_most(index, v) for v in below):
                    raise NotShown(f"token {place_text(index, self.space.tokens)} is read")
                self._visit(index, below)
            elif not digits:
                self._visit(index, below)
            elif not self.space.follows_digits(digits, index):
                raise NotShown("a sequence reads another one of the batch")

    def _visit_sum(self, node: Expr, below: frozenset[Expr]) -> None:
        variable, body = node.args
        if not self.space.counts_tokens(variable.args[0]):
            return self._visit(body, below)
        more = M.sub(variable.args[0], self.space.tokens)  # places before the first token
        from_the_end = M.sub(M.sub(variable.args[0], E.ONE), variable)
        places = [variable, from_the_end, *([M.add(variable, more)] if E.is_const(more) else [])]
        for summed in (M.substitute(body, {variable: place}) for place in dict.fromkeys(places)):
            for last in sorted(below, key=lambda place: place.order):
                if last.free <= summed.free and self._ends(node.op, variable, summed, last):
                    place = M.sub(last, E.var(f"{variable.value} before"))
                    return self._visit(
                        _at(self._hidden(summed, variable, last), {variable: place}), below | {place}
                    )
        for last in sorted(below, key=lambda place: place.order):
            if (ended := self._blocks_end(node.op, variable, body, last, below)) is not None:
                return self._visit(*ended)
        parts = M.pieces(variable, body, some=True) if node.op == "sum" else []
        if len(parts) < 2:
            # The largest score of all, which weights are taken relative to, may cancel in what follows.
            raise (OfAll if node.op == "sum" else NotShown)("every token is read")
        for part in parts:
            self._visit(part, below)

    def _ends(self, op: str, variable: Expr, body: Expr, last: Expr) -> bool:
        """Whether nothing is added for places after `last`, and there are so many places."""
        if not _is_at_most(self.space.tokens, variable.args[0]):
            return False
        later = M.add(last, E.ONE, _MORE)
        return E.is_const(_at(self._hidden(body, variable, last), {variable: later}), _NEUTRAL[op])

    def _blocks_end(
        self, op: str, variable: Expr, body: Expr, last: Expr, below: frozenset[Expr]
    ) -> tuple[Expr, frozenset[Expr]] | None:
        """What is summed for a block that ends at `last` or before, and which places are no later than t
        then; None unless nothing is added for later ones, and there are all others."""
        blocks = blocks_of(self.facts, variable, body)
        more = None if blocks is None else more_than_tokens(variable.args[0], blocks.size, self.space.tokens)
        unbound = (v for v in last.free if not v.args or v is self.space.token)
        free = next((v for v in unbound if v not in M.sub(last, v).free), None)
        if blocks is None or more is None or free is None:
            return None
        size, block, rest = blocks.size, E.var(f"block {variable.value}"), M.sub(last, free)
        for reach in range(max(blocks.reach, size - 1 - more), blocks.reach + size):

            def end(of: Expr, reach: int = reach) -> Expr:
                return M.add(M.mul(E.const(size), of), E.const(reach))

            own = M.floordiv(M.sub(last, E.const(reach)), E.const(size))
            hidden = self._hidden(body, variable, own if _is_at_most(E.ZERO, own) else None)
            late = M.sub(end(variable), M.add(E.ONE, _MORE, rest))
            if E.is_const(_at(hidden, {free: late}), _NEUTRAL[op]):
                early = {free: M.sub(M.add(end(block), E.var(f"{variable.value} after")), rest)}
                places = frozenset(_at(place, early) for place in below)
                return _at(hidden, {variable: block, **early}), places | {end(block)}
        return None

    def _hidden(self, body: Expr, variable: Expr, own: Expr | None) -> Expr:
        """What is summed, with minus infinity for numbers that hide, in exponents that show the place `own`,
        if there is one. In others such a number is any: where all have it, all places count alike."""

        def change(node: Expr, args: tuple[Expr, ...]) -> Expr:
            found = M.construct(node, args)
            if found.op != "exp" or variable not in found.free:
                return found
            parts = E.parts(found.args[0], "add")
            exponent = M.add(*(_lowered(part, E.NEG_INF) for part in parts))
            marked = M.add(*(_FILL if self._may_be_low(part) else _lowered(part, _FILL) for part in parts))
            shown = own is not None and _FILL not in set(E.walk(_at(marked, {variable: own})))
            return M.exp(exponent if shown else M.add(*(_lowered(part, _ANY) for part in parts)))

        return E.rebuild(body, change)

    def _may_be_low(self, term: Expr) -> bool:
        """Whether a term of an exponent may be as low as a number that hides, by what data are."""
        if any(map(self._is_low, {n.value for n in E.reads(term)})):
            return True
        rest = M.coefficient(term)[1]
        if rest.op == "where":
            return any(map(self._may_be_low, rest.args[1:]))
        return chooses(rest, lambda read: self._is_chosen(read.value))


def _without_reference(exponential: Expr) -> Expr:
    """An exponential with a factor for the largest score that it is taken relative to: where sums of such are
    divided by each other, the factor cancels."""
    parts = E.parts(exponential.args[0], "add") if exponential.op == "exp" else ()
    references = [p for p in parts if any(n.op == "amax" for n in E.parts(p, "mul"))]
    if not references:
        return exponential
    rest = M.add(*(p for p in parts if p not in references))
    return M.mul(M.exp(rest), E.make("raw", (M.add(*references),), "reference"))


def _at(body: Expr, places: Mapping[Expr, Expr]) -> Expr:
    """A formula of finite numbers at some places of variables."""

    def replace(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if node in places:
            return places[node]
        found = _of_quotients(M.construct(node, args))
        if found.op in ("min", "max") and found.kind == "int":
            least, most = found.args if _is_at_most(*found.args) else reversed(found.args)
            found = found if not _is_at_most(least, most) else least if found.op == "min" else most
        if found.op in ("le", "lt") and (found.args[0] is E.NEG_INF or found.args[1] is E.NEG_INF):
            return E.const(found.op == "le" and found.args[0] is E.NEG_INF)  # finite numbers are larger
        return E.NEG_INF if found.op == "add" and E.NEG_INF in found.args else found

    return E.rebuild(body, replace)


def _of_quotients(comparison: Expr) -> Expr:
    """A comparison with a quotient as one with a product: n // m <= k as n < m * (k + 1)."""
    if comparison.op not in ("le", "lt") or comparison.args[0].kind != "int":
        return comparison
    less, more = comparison.args
    if comparison.op == "lt":
        less = M.add(less, E.ONE)
    for place, side in enumerate((less, more)):
        for term in E.parts(side, "add"):
            if term.op == "floordiv" and term.args[1].op == "const" and int(term.args[1].value) > 0:
                whole, by = term.args
                other = M.mul(by, M.sub(more if place == 0 else less, M.sub(side, term)))
                if place == 0:
                    return M.le(whole, M.sub(M.add(other, by), E.ONE))
                return M.le(other, whole)
    return comparison


def _is_at_most(a: Expr, b: Expr) -> bool:
    return M.le(a, b) is E.TRUE or ranges.is_at_most(a, b)


def _lowered(term: Expr, to: Expr) -> Expr:
    """A term of an exponent, with this in the place of a finite number that hides."""
    factor, rest = M.coefficient(term)
    if rest.op != "where":
        return term
    condition, *branches = rest.args
    return M.where(condition, *(_lowered_branch(factor, b, to) for b in branches))


def _lowered_branch(factor: float, branch: Expr, to: Expr) -> Expr:
    """`factor` times a branch. A number that does not hide is any: its exponential may be zero as such, but
    not beside others that are as small."""
    number = factor * next((t.value for t in E.parts(branch, "add") if t.op == "const" and t is not E.NAN), 0)
    if -math.inf < number <= -HIDES:
        return to
    return _ANY if -HIDES < number <= -_UNDERFLOWS else M.mul(E.const(factor), _lowered(branch, to))


_GIVEN = (Kind.FIXED, Kind.TOKEN, Kind.ATTENTION, Kind.SCAN)


class HistoryFinder:
    """Looks for values of one graph that are computed from all earlier tokens. `assumed`: why that could not
    be shown of those that are taken to be such values because the user says so (`assume_causal`)."""

    def __init__(self, facts: Facts, probe: TokenProbe, looks_back: LooksBack, assume_causal: bool) -> None:
        self.facts, self.space, self.probe, self.looks_back = facts, facts.space, probe, looks_back
        self.assume_causal, self.many_lengths = assume_causal, ManyLengths(facts, probe)
        self.assumed: dict[fx.Node, str] = {}
        self._of_all: set[fx.Node] = set()
        """Values for which a sum over all tokens is in the way, and what is computed from them."""

    def find(self, node: fx.Node, axes: Axes) -> History | None:
        """How a value with these axes is computed from all earlier tokens of others; None if it is not."""
        space, facts, probe = self.space, self.facts, self.probe
        if not self._of_all.isdisjoint(node.all_input_nodes):
            self._of_all.add(node)
        if not _stands_alone(space, axes):
            return None
        given = {n: f.axes for n, f in facts.items() if self._is_given(n, f)}
        order, leaves = probe.region(node, given)
        operands = [n for n in leaves if n in facts and space.place(facts[n].axes, space.token) is not None]
        inner = tuple(n for n in order if n not in leaves and not is_size(n))
        is_whole = len(inner) <= budgets.HISTORY_NODES and not probe.is_cut(order)
        if not operands or not is_whole or not any(map(self._is_of_pairs, inner)):
            return None
        for leaf in leaves:
            known = facts.get(leaf)
            if known is None or (leaf in operands) != any(known.axes) or not _stands_alone(space, known.axes):
                return None
        seen = 0
        try:
            if node in self._of_all:
                raise OfAll("every token is read")
            self.looks_back.require(node, axes)
        except NotShown as why_not:
            begins = {n: facts[n].axes for n in leaves if n in facts}
            seen = self.many_lengths.longest(node, axes, Region(order, begins))
            if not seen:
                if isinstance(why_not, OfAll):
                    self._of_all.add(node)
                if not self.assume_causal:
                    return None
                self.assumed[node] = str(why_not)
        streams = streams_of(facts, inner, operands, self._formula)
        inner, operands = _from(node, inner, [*operands, *streams])
        streams = {n: streams[n] for n in operands if n in streams}
        latest = {} if node in self.assumed else self.looks_back.latest(node, axes, streams)
        return History(inner, None, tuple(operands), streams=streams, latest_of=latest, seen=seen)

    def _formula(self, node: fx.Node, axes: Axes) -> Expr | None:
        try:
            return self.looks_back.formula(node, axes)
        except NotShown:
            return None

    def _is_given(self, node: fx.Node, fact: Fact) -> bool:
        """Whether a value is kept, or fixed. What follows from sizes and places alone is computed anew, as
        views are in which rows and tokens are not dimensions of their own."""
        if fact.kind not in _GIVEN or isinstance(fact.scan, History):
            return False
        return _stands_alone(self.space, fact.axes) and not self.facts.of_sizes(node)

    def _is_of_pairs(self, node: fx.Node) -> bool:
        """Whether a value has an entry for each pair of tokens, or is computed from such within one
        operation."""
        several = sum(self.space.counts_tokens(n) for n in self.probe.extents(node)) > 1
        return several or nodes.whole(node) is not None


def _from(
    node: fx.Node, region: tuple[fx.Node, ...], operands: list[fx.Node]
) -> tuple[tuple[fx.Node, ...], list[fx.Node]]:
    """The operations of a region that compute a value from operands, and which of these it needs."""
    inner = set(region) - set(operands)
    needed = set(reached([node], lambda n: n.all_input_nodes if n in inner else ()))
    return tuple(n for n in region if n in needed & inner), [n for n in operands if n in needed]


def _stands_alone(space: Space, axes: Axes) -> bool:
    """Whether row and token are dimensions of their own, the rows first; or neither is there."""
    places = [axes.index((v,)) if (v,) in axes else None for v in (space.row, space.token)]
    return not any(axes) or (space.row is not None and places[0] == 0 and places[1] is not None)
