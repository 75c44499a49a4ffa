"""Values that are computed from the last few tokens, or folded over all tokens so far by one operation.

Of windows (causal convolutions, token shifts, differences, n-grams) the formula of an element, followed
through all operations that mix tokens, tells which tokens it reads: at token t only tokens from t - width + 1
to t. So whatever spells it (a padded convolution that is cut, a `cat` with zeros, a `roll`) is one thing.
Running products, maxima, minima and log-sum-exps are found where an operation of PyTorch computes them;
running sums in any spelling by `recurrence.py`, loops by `loops.py`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from torch import fx

from attngraph.ir import budgets
from attngraph.ir.graph.call import argument
from attngraph.ir.language import E, Expr
from attngraph.ir.walk import reached
from attngraph.meaning.algebra import M
from attngraph.meaning.check.region import region
from attngraph.meaning.rule import ELEMENTWISE, Category, is_part, tried
from attngraph.meaning.tokens.facts import Axes, Facts, Kind, Scan, outside_reads, read_by
from attngraph.meaning.tokens.streams import Stream

_MOST = budgets.FORMULA_WORDS
CONVOLUTIONS = frozenset({"aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default"})


@dataclasses.dataclass(frozen=True)
class Window(Scan):
    """A value that is computed from the `latest` tokens of others.

    `operands`: the values that are read at earlier tokens. `region`: the operations between them and the
    value, in the graph's order. `formula`: what an element equals in terms of the operands; None where the
    region contains a convolution, which is better run as it is (its operand is then zero before the first
    token).
    """

    region: tuple[fx.Node, ...]
    formula: Expr | None
    operands: tuple[fx.Node, ...] = ()
    latest: int | None = None

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        if self.formula is not None:
            return read_by(self.formula)
        given = (n for step in self.region for n in step.all_input_nodes)
        return tuple(n for n in dict.fromkeys(given) if n not in self.region)

    @property
    def reason(self) -> str:
        return f"the last {self.latest} tokens of {' and '.join(f'%{n.name}' for n in self.operands)}"


def _written_out(formula: Expr) -> Expr | None:
    """The formula with what is folded over the places of a window (pooled, say) written term by term, so that
    each element is that of a token so many places before. (Terms are not merged: what chooses zero before the
    first token stays beside its read.) None if it is too long, or folds anything else."""

    def change(node: Expr, args: tuple[Expr, ...]) -> Expr:
        count = _places_counted(*args) if node.op in E.BINDERS else 0
        if not 0 < count * node.words <= _MOST:
            return E.with_args(node, args)
        terms = (M.substitute(args[1], {args[0]: E.const(n)}) for n in range(count))
        return functools.reduce(lambda a, b: E.make(_TOGETHER[node.op], (a, b), None, node.kind), terms)

    found = E.rebuild(formula, change)
    return None if any(n.op in E.BINDERS for n in E.walk(found)) else found


_TOGETHER = {"sum": "add", "amax": "max", "amin": "min"}


def _places_counted(variable: Expr, body: Expr) -> int:
    """How many places of a window a fold counts: each is so far from another place. 0 if it counts none."""
    (extent,) = variable.args
    places = (n for n in E.walk(body) if n.kind in ("int", "bool") and n.op != "read")
    counts = any(variable in n.free and len(n.free) > 1 for n in places)
    return int(extent.value) if counts and extent.op == "const" else 0


_OPS = {
    "aten.cumprod.default": "prod", "aten.cummax.default": "max", "aten.cummin.default": "min",
    "aten.logcumsumexp.default": "logsumexp",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class History(Window):
    """A value that is computed from all earlier tokens of others, by the model's own operations. `streams`:
    of the operands that have an entry for each few tokens (`streams.py`). `latest_of`: of how many of the
    latest tokens others are read, where that is not all of them. `seen`: up to how many tokens it was run to
    see that it looks back alone, 0 if that was shown for any number."""

    streams: Mapping[fx.Node, Stream] = dataclasses.field(default_factory=dict)
    latest_of: Mapping[fx.Node, int] = dataclasses.field(default_factory=dict)
    seen: int = 0
    reason = "computed from all earlier tokens"


@dataclasses.dataclass(frozen=True)
class RunningFold(Scan):
    """A value that folds `element` of all tokens up to its own: `how` is one of
    `ir/ops/loop.py`'s. `variables`: those of its dimensions besides row and token."""

    how: str
    element: Expr
    variables: tuple[Expr, ...]

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        return read_by(self.element)

    @property
    def reason(self) -> str:
        return f"a running {self.how} over earlier tokens"


class WindowFinder:
    """Looks for windows and running folds in one graph."""

    def __init__(self, facts: Facts) -> None:
        self.meaning, self.space, self.facts = facts.meaning, facts.space, facts
        self._lifted: dict[frozenset[Kind], dict[Expr, Expr | None]] = {}
        """Through values of which kinds: what elements of values before are formulas of."""

    def window(self, node: fx.Node, axes: Axes) -> Window | None:
        """How a value with these axes is computed from the last tokens; None if it is not."""
        for through in (frozenset({Kind.MIXING}), frozenset({Kind.MIXING, Kind.POSITION})):
            formula = self._formula(node, axes, through)
            offsets = None if formula is None else self._offsets(formula)
            if offsets is not None and all(latest <= 0 for _, latest in offsets.values()):
                break
        else:
            return None
        if not any(earliest for earliest, _ in offsets.values()):
            return None
        width = 1 - min(earliest for earliest, _ in offsets.values())
        steps = region([node], [n for n in self.facts if not self.facts.mixes(n)])
        between = tuple(n for n in steps if n is node or (n in self.facts and self.facts.mixes(n)))
        operands = sorted((n for n, (earliest, _) in offsets.items() if earliest), key=lambda n: n.name)
        convolutions = [n for n in between if str(n.target) in CONVOLUTIONS]
        if convolutions:
            alike = all(map(self._reads_zeros, convolutions)) and self._is_computed_alike(node, axes)
            return Window(between, None, tuple(operands), width) if alike else None
        assert formula is not None
        written = _written_out(formula)
        return None if written is None else Window(between, written, tuple(operands), width)

    def _formula(self, node: fx.Node, axes: Axes, through: frozenset[Kind]) -> Expr | None:
        """What an element equals, followed through the node and through values of these kinds."""
        at = self.space.indices(axes, self.meaning.shape(node))

        def is_looked_into(read: Expr) -> bool:
            return self.facts[read.value].kind in through or self._is_index(read.value)

        done, lift = self._lifted.setdefault(through, {}), self.meaning.lift
        found = tried(lambda: lift(self.meaning.element(node, at), is_looked_into, most=_MOST, done=done))
        return None if found is None else self._at_the_beginning(found)

    def _offsets(self, formula: Expr) -> dict[fx.Node, tuple[int, int]] | None:
        """For every value with tokens that is read: the earliest and the latest token; None for others."""
        found: dict[fx.Node, tuple[int, int]] = {}
        for read in E.reads(formula):
            fact = self.facts.known(read.value)
            if fact is None:
                return None
            if fact.is_shared:
                if any(self.space.moves(index) for index in read.args):
                    return None
                continue
            earliest, latest = found.get(read.value, (0, 0))
            for digits, index in zip(fact.axes, read.args, strict=True):
                if self.space.token not in digits:
                    if not self.space.follows_digits(digits, index):
                        return None
                    continue
                if digits != (self.space.token,):
                    return None
                reach = self.space.reach(index)
                if reach is None:
                    return None
                earliest, latest = min(earliest, reach[0]), max(latest, reach[1])
            found[read.value] = earliest, latest
        counted = any(n is self.space.row or self.space.is_count(n) for n in outside_reads(formula))
        return None if counted else found

    def _at_the_beginning(self, formula: Expr) -> Expr:
        """The formula with the first token, where only the first token reads it, written as the token."""
        first, same = M.le(self.space.token, E.ZERO), M.eq(self.space.token, E.ZERO)

        def at_token(node: Expr, args: tuple[Expr, ...]) -> Expr:
            fact = self.facts.known(node.value) if node.op == "read" else None
            if fact is None:
                return M.construct(node, args)
            places = (self.space.token if digits == (self.space.token,) and E.is_const(index, 0) else index
                      for digits, index in zip(fact.axes, args, strict=True))  # fmt: skip
            return E.read(node.value, tuple(places), node.kind)

        def change(node: Expr, args: tuple[Expr, ...]) -> Expr:
            if node is same:
                return first
            if node.op == "where" and node.args[0] is first:
                return M.where(args[0], E.rebuild(args[1], at_token), args[2])
            return M.construct(node, args)

        return E.rebuild(formula, change)

    def _is_computed_alike(self, node: fx.Node, axes: Axes) -> bool:
        """Whether results of convolutions are used alike for all tokens: none is put before the first."""

        def is_after(read: Expr) -> bool:
            return self.facts.mixes(read.value) and str(read.value.target) not in CONVOLUTIONS

        at = self.space.indices(axes, self.meaning.shape(node))
        element = self.meaning.element(node, at) if str(node.target) not in CONVOLUTIONS else E.ZERO
        after = self.meaning.lift(element, is_after)
        conditions = (n.args[0] for n in E.walk(after) if n.op == "where")
        return not any(self.space.token in outside_reads(condition) for condition in conditions)

    def _reads_zeros(self, convolution: fx.Node) -> bool:
        """Whether a convolution reads zeros wherever it reads no element of a known value: it is then the
        same convolution of a sequence that begins with zeros. So it is where it reads another one alone,
        which gives before the first token what it computes from zeros."""
        source = convolution.args[0]
        assert isinstance(source, fx.Node)
        if not self.facts.mixes(source):
            return True
        at = tuple(E.var(f"c{dim}", extent) for dim, extent in enumerate(self.meaning.shape(source)))

        def is_looked_into(read: Expr) -> bool:
            moved = self.facts.mixes(read.value) and self.meaning.category(read.value) in ELEMENTWISE
            return moved or self._is_index(read.value)

        element = tried(lambda: self.meaning.lift(self.meaning.read(source, at), is_looked_into, most=_MOST))
        if element is None:
            return False
        if self._is_of_convolutions(element):
            return not any(argument(convolution, "padding"))
        chosen = reached([element], lambda n: n.args[1:] if n.op == "where" else ())
        return all(
            not self.facts.mixes(n.value) if n.op == "read" else n.op == "where" or E.is_const(n, 0)
            for n in chosen
        )

    def _is_of_convolutions(self, element: Expr) -> bool:
        """Whether a value that a convolution reads is computed in one way at every place, from others."""
        nodes = list(E.walk(element))
        read = {n.value for n in nodes if n.op == "read"}
        mixing = set(filter(self.facts.mixes, read))
        is_plain = all(self.facts[n].is_shared for n in read - mixing) and all(n.op != "where" for n in nodes)
        return bool(mixing) and is_plain and all(str(n.target) in CONVOLUTIONS for n in mixing)

    def _is_index(self, node: fx.Node) -> bool:
        """Whether elements are computed from their index alone, as in `zeros`."""
        return node.op == "call_function" and self.meaning.category(node) is Category.INDEX

    def fold(self, node: fx.Node, axes: Axes) -> RunningFold | None:
        """How a value with these axes is folded over the tokens so far, or None."""
        called: Any = node.args[0] if is_part(node) and node.args[1] == 0 else node
        how = _OPS.get(str(called.target))
        if how is None:
            return None
        operand = called.args[0]
        fact, rank = self.facts.known(operand), len(axes)
        over = int(argument(called, "dim")) % max(rank, 1)
        if rank == 0 or axes[over] != (self.space.token,):
            return None
        at = self.space.indices(axes, self.meaning.shape(node))
        of_each = fact is not None and (fact.is_of_token or fact.kind is Kind.POSITION)
        if fact is None or not of_each or not self.space.follows(fact.axes, at):
            return None
        variables = tuple(i for i, digits in zip(at, axes, strict=True) if not digits)
        return RunningFold(how, E.read(operand, at, self.meaning.kind(operand)), variables)
