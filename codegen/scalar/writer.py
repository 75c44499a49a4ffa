"""The scalar form as source: what C and Triton have in common.

`write` returns a formula's source and emits the lines that it needs, each named value at the place where it
is computed. A subclass for a language prints constants, casts and reads; all operations are printed from
their rows (`ir/language/functions.py`). Names are made from numbers and literals by `repr`, so no text of a
user's reaches the source.
"""

import abc
import collections
import re
from collections.abc import Mapping, Sequence

from attngraph.codegen.remarks import UnsupportedError
from attngraph.codegen.scalar.form import Lowering, Scalar
from attngraph.codegen.scalar.read_gradients import ReadGradient
from attngraph.ir.language import DOT, SCORE, E, Expr, Keep, Operation, Score, Statement, Weight, operation_of
from attngraph.ir.language.derivative import ZERO, derivative

COMPARE, SUM, PRODUCT, SIGN, ATOM = 1, 6, 7, 8, 9
FACTOR = PRODUCT + 1
"""How tightly operations bind."""


class Writer(abc.ABC):
    """Writes the formulas of one function. `names`: the names of values that have one."""

    binds: Mapping[str, int] = {}
    """How tightly operators bind, for those that this language prints without brackets."""
    zero = "0.0"
    choice: str
    """How the language writes `where`: a format of the condition and the two values."""

    def __init__(self, lower: Lowering) -> None:
        self.lower = lower
        self.names: dict[Scalar, str] = {}
        self._uses: collections.Counter[Expr] = collections.Counter()

    # --- defined by each language ---

    @abc.abstractmethod
    def line(self, code: str) -> None:
        """Write a line for each pair of a query and a key."""

    @abc.abstractmethod
    def declare(self, name: str, code: str, is_truth: bool = False) -> None:
        """Write a line that declares a name with the value of a number, or of a boolean."""

    @abc.abstractmethod
    def leaf(self, value: Scalar) -> tuple[str, int]: ...

    @abc.abstractmethod
    def cast(self, value: Scalar) -> tuple[str, int]: ...

    @abc.abstractmethod
    def read(self, value: Scalar) -> str: ...

    @abc.abstractmethod
    def spelling(self, row: Operation, is_whole: bool) -> str: ...

    @abc.abstractmethod
    def is_named(self, value: Scalar) -> bool: ...

    @abc.abstractmethod
    def name(self, value: Scalar, code: str) -> str:
        """Write the line that gives a value a name."""

    # --- statements ---

    def assign(self, name: str, statement: Score | Keep | Weight) -> None:
        """Write a statement's new value of the score or the weight."""
        if isinstance(statement, Keep):
            code = self.choice.format(self.truth(statement.predicate), name, self.real(statement.fill))
        else:
            code = self.score(statement.value)
        self.set(name, code)

    def set(self, name: str, code: str) -> None:
        """Assign the score or the weight, and forget values computed from the old one."""
        self.line(f"{name} = {code}")
        self.changed(name)

    def changed(self, name: str) -> None:
        kept = {v for v in self.names if all(n.op != name for n in E.walk(v.source))}
        self.names = {v: code for v, code in self.names.items() if v in kept}

    # --- formulas ---

    def truth(self, formula: Expr) -> str:
        return self.write(formula, self.lower.truth(self.lower(formula)))

    def real(self, formula: Expr, level: int = 0) -> str:
        return self.write(formula, self.lower.real(formula), level)

    def integer(self, formula: Expr, level: int = 0) -> str:
        return self.write(formula, self.lower(formula), level)

    def score(self, formula: Expr) -> str:
        """A formula as a score."""
        return self.real(formula)

    def write(self, formula: Expr, value: Scalar, level: int = 0) -> str:
        """The source of a formula's value, in brackets where its operator binds less tightly than `level`."""
        self._uses = collections.Counter(arg for n in E.walk(formula) for arg in n.args)
        return self.code(value, level)

    def uses(self, value: Scalar) -> int:
        """How often the value occurs in the current formula."""
        return self._uses[value.source] if self.lower(value.source) is value else 0

    def code(self, value: Scalar, level: int = 0) -> str:
        known = self.names.get(value)
        if known is not None:
            return known
        code, binds = self.spell(value)
        if value in self.names or self.is_named(value):
            return self.named(value, code)
        return code if binds >= level else f"({code})"

    def named(self, value: Scalar, code: str) -> str:
        if value not in self.names:
            self.names[value] = self.name(value, code)
        return self.names[value]

    def atom(self, value: Scalar) -> str:
        """A name or a number, for a value that the source mentions more than once."""
        if value in self.names or value.is_leaf or (value.op == "cast" and value.args[0].op == "const"):
            return self.code(value, ATOM)
        return self.named(value, self.code(value))

    def operand(self, parent: Scalar, value: Scalar, level: int) -> str:
        return self.code(value, level)

    def spell(self, value: Scalar) -> tuple[str, int]:
        """A value's source, and how tightly its operator binds."""
        if value.is_leaf:
            return self.leaf(value)
        if value.op == "cast":
            return self.cast(value)
        if value.op == "read":
            return self.read(value), ATOM
        row = operation_of(value.op)
        template = self.spelling(row, value.args[-1].is_whole) if row is not None else ""
        if not template:
            raise UnsupportedError(f"`{value.op}`")
        own = self.binds.get(value.op, ATOM)
        operands = []
        for place, arg in enumerate(value.args):
            mentions = template.count(f"{{{place}}}") + value.args.count(arg) - 1
            if own != ATOM:
                level = own + (place > 0 or own == COMPARE)
            else:
                level = 0 if re.search(rf"[(,] ?\{{{place}\}}[,)]", template) else ATOM
            is_shared = mentions > 1 and not arg.is_leaf
            operands.append(self.atom(arg) if is_shared else self.operand(value, arg, level))
        return template.format(*operands, kind=value.kind), own


class Chain:
    """A program's statements as lines for one tile, forwards and then backwards by the chain rule.

    Forwards, statements store the values that their derivatives need: `before<n>`, the score before statement
    n, and `kept<n>`. Backwards, `ds` is the gradient of a statement's result and becomes that of the score
    before it. Gradients that reach the dot directly are summed in `of_dot`, those of the reads in
    `of_read<i>`. `written`: the names of gradients that have been assigned.
    """

    def __init__(self, writer: Writer, reads: Sequence[ReadGradient]) -> None:
        self.writer, self.reads = writer, reads
        self.written: set[str] = set()

    def forward(self, number: int, statement: Score | Keep) -> None:
        """Write a statement, storing the values that its derivatives need."""
        writer = self.writer
        reads = (derivative(formula_of(statement), r.node) for r in self.reads)
        if use_score(*slopes(statement, is_first=number == 0), *reads):
            writer.declare(f"before{number}", "s")
        if isinstance(statement, Keep):
            writer.declare(f"kept{number}", writer.truth(statement.predicate), is_truth=True)
            writer.set("s", writer.choice.format(f"kept{number}", "s", writer.real(statement.fill)))
        else:
            writer.assign("s", statement)

    def backward(self, number: int, statement: Score | Keep, wanted: Sequence[int]) -> None:
        """Turn `ds` of a statement's result into that of the score before it, and add to the wanted
        reads'."""
        writer, kept = self.writer, f"kept{number}"
        by_score, by_dot = slopes(statement, is_first=number == 0)
        others = {f"of_read{i}": derivative(formula_of(statement), self.reads[i].node) for i in wanted}
        others["of_dot"] = by_dot
        if use_score(by_score, *others.values()):
            writer.set("s", f"before{number}")
        masks = isinstance(statement, Keep)
        for name, slope in others.items():
            self.add(name, writer.choice.format(kept, writer.zero, "ds") if masks else "ds", slope)
        if masks:
            hidden = writer.zero if by_score is ZERO else f"ds * {writer.real(by_score, FACTOR)}"
            writer.line(f"ds = {writer.choice.format(kept, 'ds', hidden)}")
        elif not E.is_const(by_score, 1):
            writer.line(f"ds = ds * {writer.real(by_score, FACTOR)}")

    def add(self, name: str, flow: str, slope: Expr) -> None:
        """Add `flow` times `slope` to the gradient called `name`."""
        if slope is ZERO:
            return
        code = flow if E.is_const(slope, 1) else f"{flow} * {self.writer.real(slope, FACTOR)}"
        if name in self.written:
            self.writer.line(f"{name} += {code}")
        else:
            self.writer.declare(name, code)
        self.written.add(name)


def use_score(*formulas: Expr) -> bool:
    """Whether any of the formulas depends on the dot or the score."""
    return any(n in (DOT, SCORE) for formula in formulas for n in E.walk(formula))


def formula_of(statement: Statement) -> Expr:
    """The formula that replaces the score: for a mask, its fill."""
    return statement.fill if isinstance(statement, Keep) else statement.value


def slopes(statement: Statement, *, is_first: bool) -> tuple[Expr, Expr]:
    """The derivatives of a statement's formula by the score before it and by the dot. In the first statement
    the score is the dot: the first result is the whole derivative, the second is zero. Raises
    UnsupportedError: as `derivative`."""
    formula = formula_of(statement)
    if not is_first:
        return derivative(formula, SCORE), derivative(formula, DOT)
    return derivative(E.replaced(formula, {SCORE: DOT}), DOT), ZERO
