"""Attention computed piece by piece: partial sums over some of the keys, rescaled and added up.

An online softmax keeps, for the keys so far, a reference c (a running maximum or a log-sum-exp) and

    l = sum of exp(s[k] - c)        o = sum of exp(s[k] - c) * v[k]

and adds the next keys to both, times exp(c - c') where the reference changes. Written as sums of
exp(e) * r, with the exponents e kept apart, references cancel by themselves: whatever they are, o / l is

    sum over all pieces of exp(e) * r  /  sum over all pieces of exp(e) * z

with the same e above and below. So no rule knows what a running maximum is. The same algebra merges results
that are already divided, by their log-sum-exp: the logarithm of a sum, exponentiated, is that sum.
"""

import contextlib
import enum
import itertools
import math

from torch import fx

from attngraph.ir.graph.program_graph import is_random
from attngraph.ir.kept import kept
from attngraph.ir.language import E, Expr
from attngraph.ir.walk import operands_first
from attngraph.meaning.algebra import M
from attngraph.meaning.algebra import fractions as F
from attngraph.meaning.algebra.fractions import Fraction, NotASum, Term, Value, add, reciprocal
from attngraph.meaning.attention.normaliser import split_by
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import ELEMENTWISE, Category, Unliftable, is_part


class Kind(enum.Enum):
    """What a value of the graph is to a softmax: its logarithms, its weights, or sums weighted by them."""

    LOGARITHM = "a log-sum-exp, perhaps with something added"
    WEIGHTS = "exponentials, their sums, products and quotients"
    PRODUCT = "weights times a tensor, element by element"
    VALUES = "a sum weighted by exponentials"


_VALUED = (Kind.PRODUCT, Kind.VALUES)
_EXP = {"exp", "exp2", "softmax", "_softmax", "special_softmax", "sigmoid", "pow"}
_LOG = {"logsumexp", "log_softmax", "_log_softmax", "special_log_softmax", "logaddexp", "logaddexp2"}
_ADDS = {"add", "sub", "rsub", "lerp", "addcmul"}
_CONCATENATIONS = {"aten.cat.default", "aten.concat.default", "aten.stack.default"}
_PASSES = {"neg", "dropout", "native_dropout", "masked_fill", "where"}


class PartialSums:
    """The sums that values of one graph are."""

    def __init__(self, meaning: Meaning) -> None:
        self.meaning = meaning
        self._kinds: dict[fx.Node, Kind | None] = {}
        self._first: dict[fx.Node, fx.Node] = {}
        self._calls: dict[str, fx.Node] = {}

    def kind(self, node: fx.Node) -> Kind | None:
        """The kind of a node; its operands must have been asked about before, in the graph's order."""
        if node not in self._kinds:
            self._is_known(node)  # asked of all nodes in order, so that a long loop is no deep recursion
            if node.op == "call_function" and not is_random(node.target, node.args):
                # The first node that computes the same: code may take a block's maximum wherever it needs it.
                call = fx.map_arg((node.args, node.kwargs), lambda n: self._first.get(n, n))
                self._first[node] = self._calls.setdefault(f"{node.target} {call}", node)
            self._kinds[node] = self._find_kind(node) if node.op == "call_function" else None
        return self._kinds[node]

    @kept
    def pieces(self, node: fx.Node) -> frozenset[fx.Node]:
        """The nodes at which weights meet values, below a sum weighted by exponentials."""
        if self.kind(node) not in _VALUED:
            return frozenset()
        below = [n for n in node.all_input_nodes if self.kind(n) in _VALUED]
        if any(self.kind(n) is Kind.WEIGHTS for n in node.all_input_nodes) and not below:
            return frozenset((node,))
        return frozenset().union(*map(self.pieces, below))

    def _find_kind(self, node: fx.Node) -> Kind | None:
        operands = [n for n in node.all_input_nodes if self.meaning.is_tensor(n)]
        is_by_data = any(self.kind(n) is None and not self._is_known(n) for n in operands)
        kinds = [self.kind(n) for n in node.all_input_nodes]
        name = str(node.target).split(".")[1] if str(node.target).startswith("aten.") else ""
        present = set(kinds) - {None}
        category = self.meaning.category(node)
        if name in _LOG:
            return Kind.LOGARITHM if not present & {Kind.WEIGHTS, *_VALUED} else None
        if name in _EXP:
            return self._kind_of_exponential(node, name, present)
        if not present or (category is None and not is_part(node)):
            return None
        if name in ("log", "log2"):
            return Kind.LOGARITHM if present == {Kind.WEIGHTS} else None
        if name == "log_sigmoid":
            return Kind.LOGARITHM if present == {Kind.LOGARITHM} else None
        if category is Category.CONTRACTION:
            weights = [k for k in kinds if k in (Kind.WEIGHTS, Kind.PRODUCT)]
            adds = name.startswith(("addmm", "baddbmm")) and kinds[0] is Kind.VALUES
            return Kind.VALUES if len(weights) == 1 and (adds or present == {weights[0]}) else None
        if name == "sum":
            if present <= set(_VALUED):
                return Kind.VALUES
            return Kind.WEIGHTS if present == {Kind.WEIGHTS} else None
        if category is Category.MOVEMENT or name in _PASSES:
            if present <= set(_VALUED):
                return Kind.PRODUCT if present == {Kind.PRODUCT} else Kind.VALUES
            return next(iter(present)) if len(present) == 1 else None
        if name in _ADDS:
            if present & set(_VALUED):
                return Kind.VALUES if Kind.LOGARITHM not in present and not is_by_data else None
            return next(iter(present)) if len(present) == 1 else None
        if name in ("mul", "div", "reciprocal", "true_divide"):
            found = [k for k in kinds if k is not None]
            if Kind.LOGARITHM in present:
                is_multiple = found == [Kind.LOGARITHM] and not is_by_data and name == "mul"
                return Kind.LOGARITHM if is_multiple else None
            if present & set(_VALUED):
                return Kind.VALUES if sum(k in _VALUED for k in found) == 1 else None
            return Kind.PRODUCT if is_by_data else Kind.WEIGHTS
        return None

    def _kind_of_exponential(self, node: fx.Node, name: str, present: set[Kind | None]) -> Kind | None:
        if name == "sigmoid":
            return Kind.WEIGHTS if present == {Kind.LOGARITHM} else None
        if name == "pow" and isinstance(node.args[0], fx.Node):
            return None
        free = present <= {Kind.LOGARITHM}
        return Kind.WEIGHTS if free and not self._is_known(node) else None

    @kept
    def _is_known(self, node: fx.Node) -> bool:
        """Whether a node is computed from numbers and positions alone."""
        category, operands = self.meaning.category(node), filter(self.meaning.is_tensor, node.all_input_nodes)
        return category is Category.INDEX or (category in ELEMENTWISE and all(map(self._is_known, operands)))

    def begins(self, node: fx.Node) -> bool:
        """Whether exponentials are first taken at a node."""
        kinds = map(self.kind, node.all_input_nodes)
        return self.kind(node) in (Kind.WEIGHTS, Kind.LOGARITHM) and not any(kinds)

    def below(self, node: fx.Node) -> list[fx.Node]:
        """The values of some kind that a node is computed from, and itself, operands first."""
        return operands_first((node,), lambda n: [x for x in n.all_input_nodes if self.kind(x) is not None])

    # --- their values ---

    def of(self, node: fx.Node, at: tuple[Expr, ...]) -> Value:
        """One element of a node.

        Raises:
            NotASum: it is no quotient of sums of exponentials.
        """
        for below in self.below(node):  # operands first, so that a long loop is no deep recursion
            with contextlib.suppress(NotASum, Unliftable):
                self.value(self.meaning.read(below, self.meaning.places(below)[1]))
        return self.value(self.meaning.read(node, at))

    def value(self, node: Expr) -> Value:
        if node.op == "const":
            return () if node.value == 0 else F.single(E.ZERO, E.ONE, float(node.value))
        if node.op == "add":
            return add(*(x for term in node.args for x in self.value(term)))
        if node.op == "mul":
            found = F.single(E.ZERO, E.ONE)
            for factor in node.args:
                found = F.multiply(found, self.value(factor))
            return found
        if node.op == "recip":
            return reciprocal(self.value(node.args[0]))
        if node.op == "exp":
            return self._exponential(node.args[0])
        if node.op == "sigmoid":
            grown = self._exponential(M.neg(node.args[0]))
            return reciprocal(add(*F.single(E.ZERO, E.ONE), *grown))
        if node.op == "sum":
            return self._total(*node.args)
        if node.op == "where":
            return self._selection(*node.args)
        if node.op == "read" and self._is_inside(node):
            return self._element(node)
        if any(self._is_inside(n) for n in E.reads(node)):
            raise NotASum
        known = self.meaning.elementwise(node) if node.op == "read" and self._is_known(node.value) else node
        return self.value(known) if known is not node else F.single(E.ZERO, node)

    @kept
    def _is_joined(self, node: fx.Node) -> bool:
        """Whether a node moves, or computes element by element, results of pieces that were concatenated."""
        return (
            self.meaning.category(node) in (Category.MOVEMENT, Category.POINTWISE)
            and self._kinds.get(node) is not None
            and (str(node.target) in _CONCATENATIONS or any(map(self._is_joined, node.all_input_nodes)))
        )

    def _is_inside(self, read: Expr) -> bool:
        return self._kinds.get(read.value) is not None

    @kept
    def _element(self, read: Expr) -> Value:
        return self.value(self._formula(read))

    def _formula(self, read: Expr) -> Expr:
        """An element in terms of the operands'; of tensors that are computed alike the first is read."""

        def first(node: Expr, args: tuple[Expr, ...]) -> Expr:
            if node.op == "read":
                return E.read(self._first.get(node.value, node.value), args, node.kind)
            return M.construct(node, args)

        try:
            return E.rebuild(self.meaning.element(read.value, read.args), first)
        except Unliftable as problem:
            raise NotASum from problem

    def _exponential(self, exponent: Expr) -> Value:
        """e to a sum: logarithms in it are factors, and the rest stays an exponent."""
        found = F.single(E.ZERO, E.ONE)
        kept: list[Expr] = []
        waiting = list(F.addends(exponent))
        while waiting:
            term = waiting.pop()
            factor, rest = M.coefficient(term)
            if rest.op == "read" and self._is_opened(rest.value):
                waiting += F.addends(M.mul(E.const(factor), self._logarithm(rest)))
            elif rest.op in ("log", "log2"):
                power = factor if rest.op == "log" else factor / math.log(2)
                if not math.isclose(abs(power), 1.0):
                    raise NotASum
                of = self.value(rest.args[0])
                found = F.multiply(found, of if power > 0 else reciprocal(of))
            else:
                kept.append(term)
        whole = M.add(*kept)
        if any(a is E.NEG_INF for a in F.addends(whole)):
            return ()
        return F.multiply(found, F.single(whole, E.ONE))

    def _is_opened(self, node: fx.Node) -> bool:
        """Whether an exponent is written in terms of a node's operands, so that references cancel."""
        if self.kind(node) is not None or self._is_known(node):
            return True
        name = str(node.target).split(".")[1:2]
        by_number = name in (["mul"], ["div"]) and not isinstance(node.args[1], fx.Node)
        moves = self.meaning.category(node) is Category.MOVEMENT and str(node.target) not in _CONCATENATIONS
        return node.op == "call_function" and (by_number or moves or name in (["add"], ["sub"], ["neg"]))

    def _logarithm(self, read: Expr) -> Expr:
        """One element of a term of an exponent, in terms of the operands."""
        node: fx.Node = read.value
        if str(node.target) == "aten.log_sigmoid.default":  # whose rule has a form that cannot overflow
            inner = self.meaning.read(node.args[0], read.args)
            return M.neg(M.log(M.add(E.ONE, M.exp(M.neg(inner)))))
        return self._formula(read)

    def _selection(self, condition: Expr, yes: Expr, no: Expr) -> Value:
        """Exponentials of which some are replaced by zero: these have scores of minus infinity."""
        if not E.is_const(no, 0):
            condition, yes, no = M.not_(condition), no, yes
        if not E.is_const(no, 0) or any(self._is_inside(n) for n in E.reads(condition)):
            raise NotASum
        mask = M.where(condition, E.ZERO, E.NEG_INF)
        return F.multiply(self.value(yes), F.single(mask, E.ONE))

    def _total(self, variable: Expr, body: Expr) -> Value:
        moved = self.meaning.lift(body, lambda r: self._is_joined(r.value))
        parts = M.pieces(variable, moved, 1) if moved is not body else [moved]
        if len(parts) > 1:
            opened = [self._total(*p.args) if p.op == "sum" else self.value(p) for p in parts]
            return add(*itertools.chain(*opened))
        found: list[Fraction] = []
        for part in self.value(moved):
            if any(variable in e.free | r.free for s in part.powers for e, r, _ in s):
                raise NotASum
            terms: dict[Term, float] = {}
            for (exponent, rest), number in part.terms.items():
                moving, fixed = split_by(exponent, (variable,))
                inside = rest if E.is_const(moving, 0) else M.mul(M.exp(moving), rest)
                key = fixed, M.canonical_binders(M.total(variable, inside))
                terms[key] = terms.get(key, 0.0) + number
            found += F.fraction(terms, part.powers, part.sums)
        return add(*found)
